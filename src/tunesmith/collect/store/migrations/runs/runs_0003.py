"""The method that chose each offered pair."""

import sqlalchemy as sa
from alembic import op

revision = "runs_0003"
down_revision = "runs_0002"


def upgrade() -> None:
    """Add a column to the offers."""
    op.add_column("offers", sa.Column("selection", sa.String(64), nullable=False, server_default="random"))
