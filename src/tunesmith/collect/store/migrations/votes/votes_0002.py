"""Keys of the API and their usage, the answers that it gave, and feedback on them."""

import sqlalchemy as sa
from alembic import op

revision = "votes_0002"
down_revision = "votes_0001"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add columns to the raters, and four tables."""
    op.add_column("raters", sa.Column("scopes_json", sa.Text, nullable=True))
    op.add_column("raters", sa.Column("requests_per_minute", sa.Integer, nullable=True))
    op.add_column("raters", sa.Column("tokens_per_day", _ID, nullable=True))
    op.create_table(
        "key_usage",
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("num_tokens", _ID, nullable=False),
        sa.PrimaryKeyConstraint("rater_id", "day", name="pk_key_usage"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_key_usage_rater_id"),
    )
    _add_inferences()
    _add_feedback()


def _add_inferences() -> None:
    op.create_table(
        "inferences",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("episode", sa.String(200), nullable=False),
        sa.Column("model", sa.String(1000), nullable=False),
        sa.Column("prompt_json", sa.Text, nullable=False),
        sa.Column("prompt_ids_json", sa.Text, nullable=False),
        sa.Column("options_json", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_inferences"),
        sa.UniqueConstraint("name", name="uq_inferences_name"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_inferences_rater_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_inferences_episode", "inferences", ["episode"])
    op.create_index("ix_inferences_user", "inferences", ["rater_id", "user"])
    op.create_table(
        "inference_choices",
        sa.Column("inference_id", _ID, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("message_json", sa.Text, nullable=True),
        sa.Column("token_ids_json", sa.Text, nullable=False),
        sa.Column("logps_json", sa.Text, nullable=False),
        sa.Column("drawn_logps_json", sa.Text, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.Column("weight_version", sa.Integer, nullable=True),
        sa.Column("source_id", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("inference_id", "position", name="pk_inference_choices"),
        sa.ForeignKeyConstraint(["inference_id"], ["inferences.id"], name="fk_inference_choices_inference_id"),
    )


def _add_feedback() -> None:
    name = "uq_feedback_inference_id_episode_choice_rater_id_metric_revision"
    if op.get_bind().dialect.name != "sqlite":
        # As SQLAlchemy shortens it in new tables: PostgreSQL has names of at most 63 characters.
        name = "uq_feedback_inference_id_episode_choice_rater_id_metric_1ec8"
    op.create_table(
        "feedback",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("inference_id", _ID, nullable=True),
        sa.Column("episode", sa.String(200), nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("key_id", _ID, nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("metric", sa.String(200), nullable=False),
        sa.Column("value_json", sa.Text, nullable=True),
        sa.Column("tags_json", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
        sa.UniqueConstraint("name", name="uq_feedback_name"),
        sa.UniqueConstraint(
            "inference_id",
            "episode",
            "choice",
            "rater_id",
            "metric",
            "revision",
            name=name,
        ),
        sa.ForeignKeyConstraint(["inference_id"], ["inferences.id"], name="fk_feedback_inference_id"),
        sa.ForeignKeyConstraint(["key_id"], ["raters.id"], name="fk_feedback_key_id"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_feedback_rater_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_feedback_user", "feedback", ["key_id", "user"])
