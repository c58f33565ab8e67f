"""The first tables of `runs.db`. There is no downgrade: an older release refuses a newer file."""

revision = "runs_0001"
down_revision = None


def upgrade() -> None:
    """Do nothing: every file has these tables, which `database.py` makes."""
