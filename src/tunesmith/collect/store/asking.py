"""The order in which given items are asked of raters, and why. Each function runs in a transaction.

Items that raters were shown keep the reason for which they were: what is chosen anew are the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, exists, false, or_, select, true, update

from tunesmith.base.schema.records import Text
from tunesmith.collect.store import audit
from tunesmith.collect.store.items import LONGEST_REASON, chunks, texts_of_items
from tunesmith.collect.store.queue import by_people
from tunesmith.collect.store.records import Campaign, ItemKind
from tunesmith.collect.store.tables import items, presentations, prompts

RANDOM = "random"
"""Why a pair is asked that chance chose."""

_PAGE = 500


@dataclass(frozen=True, slots=True)
class WaitingItem:
    """A given item that waits for its first vote, of which no rater was shown anything."""

    id: int
    prompt_id: int
    prompt: Text
    answers: tuple[str, ...]
    kind: ItemKind
    heldout: bool


@dataclass(frozen=True, slots=True)
class AskedItem:
    """The item `item_id` in a new order, and why it is asked."""

    item_id: int
    reason: str


def waiting_after(connection: Connection, cursor: int, campaign_id: int) -> list[WaitingItem]:
    """At most `_PAGE` items with an id above `cursor`, in the order of their ids."""
    query = (
        select(items.c.id, items.c.prompt_id, items.c.kind, items.c.heldout, prompts.c.content_json)
        .select_from(items.join(prompts, prompts.c.id == items.c.prompt_id))
        .where(items.c.id > cursor, *_is_given(campaign_id), ~_was_shown())
        .order_by(items.c.id)
        .limit(_PAGE)
    )
    rows = connection.execute(query).all()
    texts = texts_of_items(connection, [row.id for row in rows])
    return [
        WaitingItem(row.id, row.prompt_id, row.content_json, tuple(texts[row.id]), row.kind, row.heldout)
        for row in rows
    ]


def set_order(
    connection: Connection, campaign: Campaign, method: str, wanted: Sequence[AskedItem], now: float
) -> Mapping[str, int]:
    """Have raters asked about `wanted` in this order, behind items that were begun and before all others; `method` is
    what chose them. It replaces the order before.

    Returns the numbers of items that are in order (`num_placed`), and of those left out (`num_gone`): they were shown,
    closed or removed meanwhile.
    """
    given = _is_given(campaign.id)
    was_placed = or_(items.c.place != 0, items.c.selection != "")
    connection.execute(update(items).where(*given, ~_was_shown(), was_placed).values(place=0, selection=""))
    free: set[int] = set()
    for chunk in chunks([one.item_id for one in wanted]):
        is_free = items.c.id.in_(chunk), *given, ~_was_shown()
        free |= set(connection.execute(select(items.c.id).where(*is_free)).scalars())
    reasons = {one.item_id: one.reason for one in wanted if one.item_id in free}
    connection.execute(update(items).where(*given, _was_shown()).values(place=-len(reasons) - 1))
    rows = [
        {"of": item_id, "at": number - len(reasons), "why": reason[:LONGEST_REASON]}
        for number, (item_id, reason) in enumerate(reasons.items())
    ]
    if rows:
        at_id = update(items).where(items.c.id == bindparam("of"))
        connection.execute(at_id.values(place=bindparam("at"), selection=bindparam("why")), rows)
    detail = {"campaign": campaign.settings.name, "selection": method, "num_placed": len(rows)}
    audit.add(connection, "pairs selected", None, detail, now)
    return {"num_placed": len(rows), "num_gone": len({one.item_id for one in wanted}) - len(rows)}


def _is_given(campaign_id: int) -> Sequence[Any]:
    """Conditions of open items of the campaign that are no offers of a trainer and no checks of raters."""
    queue = items.c.campaign_id == campaign_id, items.c.is_open == true(), items.c.is_gold == false()
    return (*queue, items.c.offer_id.is_(None))


def _was_shown() -> Any:
    return exists().where(presentations.c.item_id == items.c.id, by_people())
