"""What versions have learnt from; metrics are read from `metrics.jsonl`, where the trainer has written them all."""

import sqlalchemy as sa
from alembic import op

revision = "runs_0002"
down_revision = "runs_0001"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add columns to the versions, and drop the copy of the metrics."""
    for name in ("last_vote_id", "last_feedback_id", "last_request_id"):
        op.add_column("policy_versions", sa.Column(name, _ID, nullable=True))
    is_learnt = sa.Column("learnt_deleted", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("policy_versions", is_learnt)
    op.drop_table("metrics")
