"""The audit log, indexes for what is removed by age or by person, and what versions have learnt from."""

import sqlalchemy as sa
from alembic import op

revision = "votes_0003"
down_revision = "votes_0002"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add a table, two indexes, and columns to the copies of versions."""
    op.create_table(
        "audit",
        sa.Column("id", _ID, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("rater_id", _ID, nullable=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("detail_json", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_audit_rater_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_inferences_created_at", "inferences", ["created_at"])
    op.create_index("ix_feedback_rater_id", "feedback", ["rater_id"])
    for name in ("last_vote_id", "last_feedback_id", "last_request_id"):
        op.add_column("policy_versions", sa.Column(name, _ID, nullable=True))
    is_learnt = sa.Column("learnt_deleted", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("policy_versions", is_learnt)
