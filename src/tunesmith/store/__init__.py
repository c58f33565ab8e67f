"""Votes, runs and metrics in SQL. The only folder that imports SQLAlchemy and Alembic; it never loads torch.

Two files with one writer each: the server owns `votes.db` (`VoteStore`), the trainer owns `runs.db` (`RunStore`). Each
reads the other's file read-only, by cursors over growing ids (`RunReader`, `VoteReader`).
"""
