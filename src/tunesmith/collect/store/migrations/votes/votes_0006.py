"""The order in which given items are asked, and why each was."""

import sqlalchemy as sa
from alembic import op

revision = "votes_0006"
down_revision = "votes_0005"


def upgrade() -> None:
    """Add two columns to the items, one of them to the index of the queue."""
    op.add_column("items", sa.Column("place", sa.Integer, nullable=False, server_default="0"))
    op.add_column("items", sa.Column("selection", sa.String(64), nullable=False, server_default=""))
    op.drop_index("ix_items_queue", "items")
    op.create_index("ix_items_queue", "items", ["campaign_id", "is_open", "is_gold", "offer_id", "place", "id"])
