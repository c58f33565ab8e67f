"""The first tables of `votes.db`. There is no downgrade: an older release refuses a newer file."""

revision = "votes_0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: every file has these tables, which `database.py` makes."""
