"""Tables of `votes.db` and `runs.db`, in portable SQL types.

Times are seconds since the epoch (UTC) as double precision; nested values are JSON text. Ids grow and are never reused,
so a reader's cursor is an id. Clients see random tokens, never ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    insert,
    text,
)

from tunesmith.collect.store.content import decode_json, encode_json

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

_ID = BigInteger().with_variant(Integer, "sqlite")
"""SQLite autoincrements only columns of the type INTEGER."""

votes_metadata = MetaData(naming_convention=_NAMES)
"""The tables of `votes.db`, which the server writes."""

runs_metadata = MetaData(naming_convention=_NAMES)
"""The tables of `runs.db`, which the trainer writes."""


class _Json(TypeDecorator[Any]):
    """JSON text of nested values; arrays are read as tuples."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else encode_json(value)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return None if value is None else decode_json(value)


def new_id(result: Any) -> int:
    """Id of the row that an INSERT added."""
    return int(result.inserted_primary_key[0])


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of `rows`, which are inserted in this order by as few statements as there can be."""
    if not rows:
        return []
    if connection.dialect.name != "sqlite":
        return list(
            connection.execute(insert(table).returning(table.c.id, sort_by_parameter_order=True), rows).scalars()
        )
    # SQLite inserts rows one by one where ids are asked for. There is one writer, so the next ids are known beforehand.
    last = connection.execute(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name}).scalar()
    first = int(last or 0) + 1
    connection.execute(insert(table), [{"id": first + place, **row} for place, row in enumerate(rows)])
    return list(range(first, first + len(rows)))


def _id() -> Column[int]:
    return Column("id", _ID, primary_key=True, autoincrement=True)


def _time(name: str, *, nullable: bool = False) -> Column[float]:
    return Column(name, Double, nullable=nullable)


def _presentation_answers(name: str, *columns: Column[Any]) -> Table:
    """An append-only table of revisions: the highest one of a presentation is effective."""
    return Table(
        name,
        votes_metadata,
        _id(),
        _reference("presentation_id", "presentations.id"),
        *columns,
        _time("created_at"),
        Column("request_key", String(200), nullable=True),
        UniqueConstraint("presentation_id", "revision"),
        UniqueConstraint("presentation_id", "request_key"),
        sqlite_autoincrement=True,
    )


def _verdicts(name: str, *columns: Column[Any]) -> Table:
    """A table of judgements, with `columns` for what was chosen."""
    return _presentation_answers(
        name,
        Column("revision", Integer, nullable=False),
        Column("verdict", String(16), nullable=False),
        Column("reason", Text, nullable=False),
        *columns,
        Column("dwell_ms", Integer, nullable=True),
    )


def _reference(name: str, target: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, _ID, ForeignKey(target), nullable=nullable)


campaigns = Table(
    "campaigns",
    votes_metadata,
    _id(),
    Column("name", String(200), nullable=False, unique=True),
    Column("guidelines", Text, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("overlap", Integer, nullable=False),
    Column("lease_s", Double, nullable=False),
    Column("undo_s", Double, nullable=False),
    Column("max_votes_per_rater", Integer, nullable=False),
    Column("gold_share", Double, nullable=False),
    Column("answer_style", String(16), nullable=False),
    _time("created_at"),
    _time("closed_at", nullable=True),
    CheckConstraint("overlap >= 1", name="overlap"),
    CheckConstraint("answer_style IN ('raw', 'markdown')", name="answer_style"),
    sqlite_autoincrement=True,
)

raters = Table(
    "raters",
    votes_metadata,
    _id(),
    Column("name", String(200), nullable=False, unique=True),
    # Hash of what the spellings of a name share, by which one is found.
    Column("spelling", String(64), nullable=False, server_default=""),
    Column("role", String(16), nullable=False),
    Column("token_sha256", String(64), nullable=True, unique=True),
    _reference("invited_by", "raters.id", nullable=True),
    _time("created_at"),
    _time("expires_at", nullable=True),
    _time("disabled_at", nullable=True),
    # What a key of the API may do; null for people, who vote on the pages.
    Column("scopes_json", _Json, nullable=True),
    # Limits of a key; null for none.
    Column("requests_per_minute", Integer, nullable=True),
    Column("tokens_per_day", _ID, nullable=True),
    # A judge: its votes are no person's.
    Column("is_machine", Boolean, nullable=False, server_default=false()),
    CheckConstraint("role IN ('rater', 'admin')", name="role"),
    Index("ix_raters_spelling", "spelling"),
    # Machines are looked up with each vote, and users of keys may be many.
    Index("ix_raters_is_machine", "is_machine"),
    sqlite_autoincrement=True,
)

prompts = Table(
    "prompts",
    votes_metadata,
    _id(),
    _reference("campaign_id", "campaigns.id"),
    Column("content_json", _Json, nullable=False),
    Column("sha256", String(64), nullable=False),
    UniqueConstraint("campaign_id", "sha256"),
    sqlite_autoincrement=True,
)

candidates = Table(
    "candidates",
    votes_metadata,
    _id(),
    _reference("prompt_id", "prompts.id"),
    Column("text", Text, nullable=False),
    Column("token_ids_json", _Json, nullable=True),
    Column("logps_json", _Json, nullable=True),
    Column("weight_version", Integer, nullable=True),
    Column("source_id", String(200), nullable=False),
    sqlite_autoincrement=True,
)

items = Table(
    "items",
    votes_metadata,
    _id(),
    _reference("campaign_id", "campaigns.id"),
    _reference("prompt_id", "prompts.id"),
    Column("kind", String(16), nullable=False),
    Column("is_gold", Boolean, nullable=False),
    _reference("gold_candidate_id", "candidates.id", nullable=True),
    Column("heldout", Boolean, nullable=False),
    # An id of `runs.db`, hence no foreign key.
    Column("offer_id", _ID, nullable=True),
    # True while the item needs votes. Derived from presentations and campaign; stored for `ix_items_queue`.
    Column("is_open", Boolean, nullable=False),
    # Of given items those with a lower one are asked first.
    Column("place", Integer, nullable=False, server_default="0"),
    # Why it is asked: the method that chose it, with the value that it saw, or `random`; empty if nothing was chosen.
    Column("selection", String(64), nullable=False, server_default=""),
    _time("retired_at", nullable=True),
    CheckConstraint("kind IN ('pair', 'ranking')", name="kind"),
    UniqueConstraint("campaign_id", "offer_id"),
    Index("ix_items_queue", "campaign_id", "is_open", "is_gold", "offer_id", "place", "id"),
    Index("ix_items_prompt_id", "prompt_id"),
    sqlite_autoincrement=True,
)

item_candidates = Table(
    "item_candidates",
    votes_metadata,
    Column("item_id", _ID, ForeignKey("items.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    _reference("candidate_id", "candidates.id"),
)

presentations = Table(
    "presentations",
    votes_metadata,
    _id(),
    _reference("item_id", "items.id"),
    _reference("rater_id", "raters.id"),
    Column("token", String(43), nullable=False, unique=True),
    Column("order_json", _Json, nullable=False),
    # That of the order; negative if the order was given.
    Column("seed", _ID, nullable=False),
    _time("shown_at"),
    # Equal to `shown_at` for a vote that was made elsewhere.
    _time("lease_until"),
    Column("state", String(16), nullable=False),
    # The same rater never gets an item twice.
    UniqueConstraint("item_id", "rater_id"),
    CheckConstraint("state IN ('open', 'done', 'skipped', 'expired')", name="state"),
    Index("ix_presentations_rater_state", "rater_id", "state"),
    sqlite_autoincrement=True,
)

votes = _verdicts(
    "votes",
    _reference("chosen_candidate_id", "candidates.id", nullable=True),
    _reference("rejected_candidate_id", "candidates.id", nullable=True),
)
"""Votes on pairs. The verdict `withdrawn` cancels the earlier vote."""

# One rank per candidate in the order of the item; null for the verdicts `skip` and `withdrawn`.
rankings = _verdicts("rankings", Column("ranks_json", _Json, nullable=True))

demonstrations = _presentation_answers(
    "demonstrations",
    _reference("prompt_id", "prompts.id"),
    _reference("rater_id", "raters.id"),
    Column("text", Text, nullable=False),
    Column("revision", Integer, nullable=False),
)

inferences = Table(
    "inferences",
    votes_metadata,
    _id(),
    # The id that the client got.
    Column("name", String(64), nullable=False, unique=True),
    # The key that asked.
    _reference("rater_id", "raters.id"),
    # What the key's owner calls the person who asked, and the conversation; empty if nothing was said.
    Column("user", String(200), nullable=False),
    Column("episode", String(200), nullable=False),
    Column("model", String(1000), nullable=False),
    Column("prompt_json", _Json, nullable=False),
    Column("prompt_ids_json", _Json, nullable=False),
    # The request's sampling parameters, and tools if there were any.
    Column("options_json", _Json, nullable=False),
    _time("created_at"),
    Index("ix_inferences_episode", "episode"),
    Index("ix_inferences_user", "rater_id", "user"),
    Index("ix_inferences_created_at", "created_at"),
    sqlite_autoincrement=True,
)

inference_choices = Table(
    "inference_choices",
    votes_metadata,
    Column("inference_id", _ID, ForeignKey("inferences.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("text", Text, nullable=False),
    # With calls of tools, as a message.
    Column("message_json", _Json, nullable=True),
    Column("token_ids_json", _Json, nullable=False),
    # Under the model at the temperature that was sampled with.
    Column("logps_json", _Json, nullable=False),
    # Under the distribution that was sampled.
    Column("drawn_logps_json", _Json, nullable=False),
    Column("finish_reason", String(32), nullable=False),
    Column("weight_version", Integer, nullable=True),
    Column("source_id", String(200), nullable=False),
)

feedback = Table(
    "feedback",
    votes_metadata,
    _id(),
    Column("name", String(64), nullable=False, unique=True),
    # Of an answer, or of a conversation as a whole.
    _reference("inference_id", "inferences.id", nullable=True),
    Column("episode", String(200), nullable=False),
    Column("choice", Integer, nullable=False),
    # The key that said it, and the user of the key for whom; empty if it spoke for itself.
    _reference("key_id", "raters.id"),
    Column("user", String(200), nullable=False),
    # Whose vote it becomes: the key, or its user.
    _reference("rater_id", "raters.id"),
    Column("metric", String(200), nullable=False),
    # Null withdraws what was said before.
    Column("value_json", _Json, nullable=True),
    Column("tags_json", _Json, nullable=False),
    # The highest revision of what a key says of a choice is the effective one.
    Column("revision", Integer, nullable=False),
    _time("created_at"),
    UniqueConstraint("inference_id", "episode", "choice", "rater_id", "metric", "revision"),
    Index("ix_feedback_user", "key_id", "user"),
    Index("ix_feedback_rater_id", "rater_id"),
    sqlite_autoincrement=True,
)
"""Feedback of applications, append-only."""

key_usage = Table(
    "key_usage",
    votes_metadata,
    Column("rater_id", _ID, ForeignKey("raters.id"), primary_key=True),
    # Days since the epoch (UTC).
    Column("day", Integer, primary_key=True),
    Column("num_tokens", _ID, nullable=False),
)
"""Tokens that each key read and drew, which outlive the answers."""

audit = Table(
    "audit",
    votes_metadata,
    _id(),
    _time("created_at"),
    # Who did it; null for the server itself, and for a command on its machine.
    _reference("rater_id", "raters.id", nullable=True),
    Column("kind", String(32), nullable=False),
    Column("detail_json", _Json, nullable=False),
    sqlite_autoincrement=True,
)
"""What admins, keys and the server did, append-only."""

commands = Table(
    "commands",
    votes_metadata,
    _id(),
    Column("kind", String(32), nullable=False),
    Column("argument", Text, nullable=False),
    _reference("rater_id", "raters.id"),
    _time("created_at"),
    sqlite_autoincrement=True,
)


def _policy_versions(metadata: MetaData) -> Table:
    return Table(
        "policy_versions",
        metadata,
        Column("version", Integer, primary_key=True, autoincrement=False),
        _time("created_at"),
        Column("parent", Integer, nullable=True),
        Column("path", Text, nullable=False),
        Column("heldout_accuracy", Double, nullable=True),
        Column("win_rate", Double, nullable=True),
        Column("win_rate_low", Double, nullable=True),
        Column("win_rate_high", Double, nullable=True),
        Column("num_votes", Integer, nullable=False),
        Column("kl", Double, nullable=True),
        Column("accepted", Boolean, nullable=False),
        Column("serving", Boolean, nullable=False),
        Column("note", Text, nullable=False),
        # The newest vote, feedback and request that it, or a version before it, was trained on; ids of `votes.db`.
        Column("last_vote_id", _ID, nullable=True),
        Column("last_feedback_id", _ID, nullable=True),
        Column("last_request_id", _ID, nullable=True),
        Column("learnt_deleted", Boolean, nullable=False, server_default=false()),
    )


shown_versions = _policy_versions(votes_metadata)
"""The server's copy, so that `votes.db` can be read without `runs.db`."""

policy_versions = _policy_versions(runs_metadata)

offers = Table(
    "offers",
    runs_metadata,
    _id(),
    Column("version", Integer, nullable=False),
    Column("heldout", Boolean, nullable=False),
    Column("selection", String(64), nullable=False, server_default="random"),
    Column("prompt_json", _Json, nullable=False),
    # Offers with a smaller id are stale from this one on.
    Column("retires_before", _ID, nullable=False),
    _time("created_at"),
    sqlite_autoincrement=True,
)

offer_candidates = Table(
    "offer_candidates",
    runs_metadata,
    Column("offer_id", _ID, ForeignKey("offers.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("text", Text, nullable=False),
    Column("token_ids_json", _Json, nullable=True),
    Column("logps_json", _Json, nullable=True),
    Column("source_id", String(200), nullable=False),
)

jobs = Table(
    "jobs",
    runs_metadata,
    _id(),
    Column("kind", String(64), nullable=False),
    Column("state", String(32), nullable=False),
    _time("created_at"),
    _time("ended_at", nullable=True),
    Column("detail_json", _Json, nullable=False),
    sqlite_autoincrement=True,
)

heartbeat = Table(
    "heartbeat",
    runs_metadata,
    # A single row, which is replaced.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("pid", Integer, nullable=False),
    Column("host", String(200), nullable=False),
    Column("time", Double, nullable=False),
    Column("state", String(64), nullable=False),
)
