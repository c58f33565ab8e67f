"""Effective votes, rankings and written answers, by cursor: what the trainer, statistics and exports read."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, exists, or_, select

from tunesmith.store.candidates import candidates_of_items
from tunesmith.store.content import decode_content
from tunesmith.store.records import (
    MARGIN_BETTER,
    MARGIN_MUCH,
    Candidate,
    Command,
    StoredDemonstration,
    StoredRanking,
    StoredVote,
)
from tunesmith.store.tables import (
    commands,
    demonstrations,
    items,
    presentations,
    prompts,
    rankings,
    raters,
    votes,
)

Record = TypeVar("Record", StoredVote, StoredRanking, StoredDemonstration)

_PAGE = 500


def votes_after(
    connection: Connection, cursor: int, limit: int, campaign_id: int | None = None, *, changes: bool = True
) -> list[StoredVote]:
    """Effective votes with an id above `cursor`, in order. Without `changes`, those that count alone: no skips and
    nothing withdrawn.
    """
    rows = _effective(connection, votes, cursor, limit, campaign_id, changes=changes)
    answers = candidates_of_items(connection, [row.item_id for row in rows])
    return [_stored_vote(row, answers[row.item_id]) for row in rows]


def rankings_after(
    connection: Connection, cursor: int, limit: int, campaign_id: int | None = None, *, changes: bool = True
) -> list[StoredRanking]:
    """As `votes_after`, of rankings."""
    rows = _effective(connection, rankings, cursor, limit, campaign_id, changes=changes)
    answers = candidates_of_items(connection, [row.item_id for row in rows])
    return [
        StoredRanking(
            candidates=tuple(answers[row.item_id]),
            ranks=() if row.ranks_json is None else tuple(json.loads(row.ranks_json)),
            is_gold=row.is_gold,
            **_common(row),
        )
        for row in rows
    ]


def demonstrations_after(
    connection: Connection, cursor: int, limit: int, campaign_id: int | None = None
) -> list[StoredDemonstration]:
    """As `votes_after`, of written answers."""
    rows = _effective(connection, demonstrations, cursor, limit, campaign_id, changes=True)
    return [StoredDemonstration(text=row.text, **_common(row)) for row in rows]


def commands_after(connection: Connection, cursor: int, limit: int) -> list[Command]:
    """Commands with an id above `cursor`, in order."""
    rows = connection.execute(select(commands).where(commands.c.id > cursor).order_by(commands.c.id).limit(limit))
    return [Command(**row) for row in rows.mappings()]


def pages(read: Callable[[int, int], Sequence[Record]]) -> Iterator[Record]:
    """Everything that `read(cursor, limit)` gives, page by page."""
    cursor = 0
    while page := read(cursor, _PAGE):
        yield from page
        cursor = page[-1].id


def _effective(
    connection: Connection, table: Table, cursor: int, limit: int, campaign_id: int | None, *, changes: bool
) -> Sequence[Any]:
    """Rows of `table` that no higher revision has replaced, with what they belong to.

    A skip or withdrawal that replaces nothing is no news to anyone.
    """
    later = table.alias()
    is_last = ~exists().where(later.c.presentation_id == table.c.presentation_id, later.c.revision > table.c.revision)
    joined = (
        table.join(presentations, presentations.c.id == table.c.presentation_id)
        .join(items, items.c.id == presentations.c.item_id)
        .join(prompts, prompts.c.id == items.c.prompt_id)
        .join(raters, raters.c.id == presentations.c.rater_id)
    )
    context = (
        presentations.c.item_id,
        presentations.c.order_json,
        presentations.c.rater_id.label("of_rater"),
        items.c.campaign_id,
        items.c.heldout,
        items.c.is_gold,
        items.c.gold_candidate_id,
        items.c.offer_id,
        prompts.c.content_json,
        raters.c.name.label("rater"),
    )
    own = [column for column in table.c if column.name not in ("rater_id", "prompt_id")]
    query = select(*own, *context).select_from(joined).where(table.c.id > cursor, is_last)
    if "verdict" in table.c:
        counts = table.c.verdict.not_in(("skip", "withdrawn"))
        query = query.where(or_(counts, table.c.revision > 1) if changes else counts)
    if campaign_id is not None:
        query = query.where(items.c.campaign_id == campaign_id)
    return connection.execute(query.order_by(table.c.id).limit(limit)).all()


def _common(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "presentation_id": row.presentation_id,
        "item_id": row.item_id,
        "campaign_id": row.campaign_id,
        "rater_id": row.of_rater,
        "rater": row.rater,
        "prompt": decode_content(row.content_json),
        "heldout": row.heldout,
        "created_at": row.created_at,
        "revision": row.revision,
    }


def _stored_vote(row: Any, answers: Sequence[Candidate]) -> StoredVote:
    order: list[int] = json.loads(row.order_json)
    left, right = (answers[place] for place in order)
    chosen, rejected = (right, left) if row.verdict in ("right", "right_much") else (left, right)
    margin = 0.0
    if row.verdict in ("left", "right"):
        margin = MARGIN_BETTER
    elif row.verdict in ("left_much", "right_much"):
        margin = MARGIN_MUCH
    return StoredVote(
        verdict=row.verdict,
        margin=margin,
        chosen=chosen,
        rejected=rejected,
        is_gold=row.is_gold,
        offer_id=row.offer_id,
        dwell_ms=row.dwell_ms,
        reason=row.reason,
        **_common(row),
    )
