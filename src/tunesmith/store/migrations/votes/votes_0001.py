"""Tables of `votes.db`. There is no downgrade: an older release refuses a newer file."""

# pyright: basic

import sqlalchemy as sa
from alembic import op

revision = "votes_0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create the tables."""
    _make_people()
    _make_questions()
    _make_presentations()
    _make_answers()
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


def _create_with_id(name: str, *parts: sa.schema.SchemaItem) -> None:
    """Create a table with an autoincremented primary key `id`."""
    id_ = sa.Column("id", _ID, autoincrement=True, nullable=False)
    op.create_table(name, id_, *parts, sa.PrimaryKeyConstraint("id", name=f"pk_{name}"), sqlite_autoincrement=True)


def _make_people() -> None:
    _create_with_id(
        "campaigns",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("guidelines", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("overlap", sa.Integer(), nullable=False),
        sa.Column("lease_s", sa.Double(), nullable=False),
        sa.Column("undo_s", sa.Double(), nullable=False),
        sa.Column("max_votes_per_rater", sa.Integer(), nullable=False),
        sa.Column("gold_share", sa.Double(), nullable=False),
        sa.Column("answer_style", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.UniqueConstraint("name", name="uq_campaigns_name"),
        sa.CheckConstraint("overlap >= 1", name=op.f("ck_campaigns_overlap")),
        sa.CheckConstraint("answer_style IN ('raw', 'markdown')", name=op.f("ck_campaigns_answer_style")),
    )
    _create_with_id(
        "raters",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("token_sha256", sa.String(64), nullable=True),
        sa.Column("invited_by", _ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("disabled_at", sa.Double(), nullable=True),
        sa.UniqueConstraint("name", name="uq_raters_name"),
        sa.UniqueConstraint("token_sha256", name="uq_raters_token_sha256"),
        sa.ForeignKeyConstraint(["invited_by"], ["raters.id"], name="fk_raters_invited_by"),
        sa.CheckConstraint("role IN ('rater', 'admin')", name=op.f("ck_raters_role")),
    )
    _create_with_id(
        "commands",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("argument", sa.Text(), nullable=False),
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_commands_rater_id"),
    )


def _make_questions() -> None:
    _create_with_id(
        "prompts",
        sa.Column("campaign_id", _ID, nullable=False),
        sa.Column("content_json", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.UniqueConstraint("campaign_id", "sha256", name="uq_prompts_campaign_id_sha256"),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"], name="fk_prompts_campaign_id"),
    )
    _create_with_id(
        "candidates",
        sa.Column("prompt_id", _ID, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("token_ids_json", sa.Text(), nullable=True),
        sa.Column("logps_json", sa.Text(), nullable=True),
        sa.Column("weight_version", sa.Integer(), nullable=True),
        sa.Column("source_id", sa.String(200), nullable=False),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name="fk_candidates_prompt_id"),
    )
    _create_with_id(
        "items",
        sa.Column("campaign_id", _ID, nullable=False),
        sa.Column("prompt_id", _ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("is_gold", sa.Boolean(), nullable=False),
        sa.Column("gold_candidate_id", _ID, nullable=True),
        sa.Column("heldout", sa.Boolean(), nullable=False),
        sa.Column("offer_id", _ID, nullable=True),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("retired_at", sa.Double(), nullable=True),
        sa.UniqueConstraint("campaign_id", "offer_id", name="uq_items_campaign_id_offer_id"),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"], name="fk_items_campaign_id"),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name="fk_items_prompt_id"),
        sa.ForeignKeyConstraint(["gold_candidate_id"], ["candidates.id"], name="fk_items_gold_candidate_id"),
        sa.CheckConstraint("kind IN ('pair', 'ranking')", name=op.f("ck_items_kind")),
    )
    op.create_index("ix_items_queue", "items", ["campaign_id", "is_open", "is_gold", "offer_id", "id"])
    op.create_index("ix_items_prompt_id", "items", ["prompt_id"])
    op.create_table(
        "item_candidates",
        sa.Column("item_id", _ID, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("candidate_id", _ID, nullable=False),
        sa.PrimaryKeyConstraint("item_id", "position", name="pk_item_candidates"),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_item_candidates_item_id"),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_item_candidates_candidate_id"),
    )


def _make_presentations() -> None:
    _create_with_id(
        "presentations",
        sa.Column("item_id", _ID, nullable=False),
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("token", sa.String(43), nullable=False),
        sa.Column("order_json", sa.Text(), nullable=False),
        sa.Column("seed", _ID, nullable=False),
        sa.Column("shown_at", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.UniqueConstraint("token", name="uq_presentations_token"),
        sa.UniqueConstraint("item_id", "rater_id", name="uq_presentations_item_id_rater_id"),
        sa.ForeignKeyConstraint(["item_id"], ["items.id"], name="fk_presentations_item_id"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_presentations_rater_id"),
        sa.CheckConstraint("state IN ('open', 'done', 'skipped', 'expired')", name=op.f("ck_presentations_state")),
    )
    op.create_index("ix_presentations_rater_state", "presentations", ["rater_id", "state"])


def _make_answers() -> None:
    _create_with_id(
        "votes",
        sa.Column("presentation_id", _ID, nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("chosen_candidate_id", _ID, nullable=True),
        sa.Column("rejected_candidate_id", _ID, nullable=True),
        sa.Column("dwell_ms", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request_key", sa.String(200), nullable=True),
        *_of_presentation("votes"),
        sa.ForeignKeyConstraint(["chosen_candidate_id"], ["candidates.id"], name="fk_votes_chosen_candidate_id"),
        sa.ForeignKeyConstraint(["rejected_candidate_id"], ["candidates.id"], name="fk_votes_rejected_candidate_id"),
    )
    _create_with_id(
        "rankings",
        sa.Column("presentation_id", _ID, nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("ranks_json", sa.Text(), nullable=True),
        sa.Column("dwell_ms", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request_key", sa.String(200), nullable=True),
        *_of_presentation("rankings"),
    )
    _create_with_id(
        "demonstrations",
        sa.Column("presentation_id", _ID, nullable=False),
        sa.Column("prompt_id", _ID, nullable=False),
        sa.Column("rater_id", _ID, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("request_key", sa.String(200), nullable=True),
        *_of_presentation("demonstrations"),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name="fk_demonstrations_prompt_id"),
        sa.ForeignKeyConstraint(["rater_id"], ["raters.id"], name="fk_demonstrations_rater_id"),
    )


def _of_presentation(table: str) -> tuple[sa.UniqueConstraint | sa.ForeignKeyConstraint, ...]:
    """One row for each revision and each request of a presentation."""
    return (
        sa.UniqueConstraint("presentation_id", "revision", name=f"uq_{table}_presentation_id_revision"),
        sa.UniqueConstraint("presentation_id", "request_key", name=f"uq_{table}_presentation_id_request_key"),
        sa.ForeignKeyConstraint(["presentation_id"], ["presentations.id"], name=f"fk_{table}_presentation_id"),
    )
