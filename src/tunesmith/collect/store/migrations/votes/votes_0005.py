"""Raters that are machines, such as judges: their votes count for no person's."""

import sqlalchemy as sa
from alembic import op

revision = "votes_0005"
down_revision = "votes_0004"


def upgrade() -> None:
    """Add a column to the raters, and its index."""
    op.add_column("raters", sa.Column("is_machine", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("ix_raters_is_machine", "raters", ["is_machine"])
