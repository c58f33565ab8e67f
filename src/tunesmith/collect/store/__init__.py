"""Votes and runs in SQL, and metrics from their files. The only folder that imports SQLAlchemy and Alembic; it never
loads torch.

There are two files with one writer each: the server owns `votes.db` (`VoteStore`), the trainer owns `runs.db`
(`RunStore`). Each reads the other's file by cursors over growing ids (`RunReader`, `VoteReader`).
"""
