"""Metrics are read from `metrics.jsonl`, where the trainer has written them all."""

from alembic import op

revision = "runs_0002"
down_revision = "runs_0001"


def upgrade() -> None:
    """Drop the copy of them."""
    op.drop_table("metrics")
