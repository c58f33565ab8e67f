"""Tables of `runs.db`. There is no downgrade: an older release refuses a newer file."""

# pyright: basic

import sqlalchemy as sa
from alembic import op

revision = "runs_0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "policy_versions",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("heldout_accuracy", sa.Double(), nullable=True),
        sa.Column("win_rate", sa.Double(), nullable=True),
        sa.Column("win_rate_low", sa.Double(), nullable=True),
        sa.Column("win_rate_high", sa.Double(), nullable=True),
        sa.Column("num_votes", sa.Integer(), nullable=False),
        sa.Column("kl", sa.Double(), nullable=True),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("serving", sa.Boolean(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_policy_versions"),
    )
    _create_with_id(
        "offers",
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("heldout", sa.Boolean(), nullable=False),
        sa.Column("prompt_json", sa.Text(), nullable=False),
        sa.Column("retires_before", _ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "offer_candidates",
        sa.Column("offer_id", _ID, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("token_ids_json", sa.Text(), nullable=True),
        sa.Column("logps_json", sa.Text(), nullable=True),
        sa.Column("source_id", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("offer_id", "position", name="pk_offer_candidates"),
        sa.ForeignKeyConstraint(["offer_id"], ["offers.id"], name="fk_offer_candidates_offer_id"),
    )
    _make_metrics()


def _create_with_id(name: str, *parts: sa.schema.SchemaItem) -> None:
    """Create a table with an autoincremented primary key `id`."""
    id_ = sa.Column("id", _ID, autoincrement=True, nullable=False)
    op.create_table(name, id_, *parts, sa.PrimaryKeyConstraint("id", name=f"pk_{name}"), sqlite_autoincrement=True)


def _make_metrics() -> None:
    _create_with_id(
        "metrics",
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
    )
    op.create_index("ix_metrics_name_id_value", "metrics", ["name", "id", "value"])
    _create_with_id(
        "jobs",
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("detail_json", sa.Text(), nullable=False),
    )
    op.create_table(
        "heartbeat",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(200), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("state", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_heartbeat"),
    )
