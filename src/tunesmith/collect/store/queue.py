"""The queue of raters: which item is shown next, and leases on items.

All functions run in the one transaction of the single writer, so counts cannot race.
"""

import random
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, exists, func, insert, or_, select, true, update

from tunesmith.collect.store.items import texts_of_items
from tunesmith.collect.store.records import Campaign, Presentation
from tunesmith.collect.store.tables import items, new_id, presentations, prompts, rankings, raters, votes

MAX_HELD = 20
"""Most presentations that a rater holds at once."""

_SEED_BITS = 31


def next_presentations(
    connection: Connection, rng: random.Random, rater_id: int, campaign: Campaign, count: int, now: float
) -> list[Presentation]:
    """The presentations that the rater holds, oldest first, then fresh items; at most `count` in all."""
    if campaign.closed_at is not None or count < 1:
        return []
    count = min(count, MAX_HELD)
    held = _renew_held(connection, rater_id, campaign, now)
    num_fresh = min(count - len(held), quota_left(connection, rater_id, campaign, now))
    for _ in range(num_fresh):
        item_id = _pick_item(connection, rng, rater_id, campaign, now)
        if item_id is None:
            break
        held.append(_show(connection, rng, item_id, rater_id, now + campaign.settings.lease_s, now))
    return load_presentations(connection, held[:count], campaign)


def quota_left(connection: Connection, rater_id: int, campaign: Campaign, now: float) -> int:
    """Number of further items that the campaign's limit allows the rater, beyond those voted on and those held."""
    limit = campaign.settings.max_votes_per_rater
    if not limit:
        return MAX_HELD
    query = (
        select(func.count())
        .select_from(presentations.join(items))
        .where(presentations.c.rater_id == rater_id, items.c.campaign_id == campaign.id, _is_active(now))
    )
    return max(0, limit - int(connection.execute(query).scalar_one()))


def has_free_slot(connection: Connection, item: Any, presentation_id: int, campaign: Campaign, now: float) -> bool:
    """True if the item (a row with `id`, `is_gold`, `retired_at`) needs one more vote, that of this presentation."""
    if item.retired_at is not None or campaign.closed_at is not None:
        return False
    if item.is_gold:
        return True
    query = select(func.count()).where(
        presentations.c.item_id == item.id, presentations.c.id != presentation_id, _is_active(now), by_people()
    )
    return int(connection.execute(query).scalar_one()) < campaign.settings.overlap


GIVEN_ORDER = -1
"""The seed of a presentation whose order was not drawn here but comes with an imported vote."""

SHOWN_ELSEWHERE = -2
"""The seed of a presentation outside of the queue, in the arena, whose order was drawn there."""


SIDES_UNKNOWN = -3
"""The seed of a presentation in an application that does not say on which side it showed an answer."""


def knows_side() -> ColumnElement[bool]:
    """True for a presentation whose order is that in which the answers were shown. An imported vote, which was never
    leased, has it only if it came with the vote.
    """
    was_leased = presentations.c.lease_until > presentations.c.shown_at
    return or_(was_leased & (presentations.c.seed != SIDES_UNKNOWN), presentations.c.seed == GIVEN_ORDER)


def by_people() -> ColumnElement[bool]:
    """True for a presentation to a person: what machines say fills no slot, and is in no statistics."""
    return presentations.c.rater_id.not_in(select(raters.c.id).where(raters.c.is_machine == true()))


def new_presentation(
    rng: random.Random, num_answers: int, *, shown_at: float, lease_until: float, state: str = "open"
) -> dict[str, Any]:
    """Columns of a presentation of `num_answers` answers, without item and rater; their order is drawn here."""
    seed = rng.getrandbits(_SEED_BITS)
    order = list(range(num_answers))
    random.Random(seed).shuffle(order)
    return {
        "token": secrets.token_urlsafe(16),
        "order_json": order,
        "seed": seed,
        "shown_at": shown_at,
        "lease_until": lease_until,
        "state": state,
    }


def add_presentation(
    connection: Connection,
    rng: random.Random,
    num_answers: int,
    *,
    item_id: int,
    rater_id: int,
    shown_at: float,
    lease_until: float,
) -> int:
    """Id of a new presentation of an item with `num_answers` answers to a rater; their order is drawn here."""
    values = new_presentation(rng, num_answers, shown_at=shown_at, lease_until=lease_until)
    return new_id(connection.execute(insert(presentations).values(item_id=item_id, rater_id=rater_id, **values)))


def refresh_open_items(
    connection: Connection, campaign_id: int, overlap: int, item_ids: Sequence[int] | None = None
) -> None:
    """Recompute `is_open` of a campaign's items, or of some of them, from their votes."""
    num_done = _num_presentations(presentations.c.state == "done")
    query = update(items).values(
        is_open=and_(items.c.retired_at.is_(None), or_(items.c.is_gold == true(), num_done < overlap))
    )
    query = query.where(items.c.campaign_id == campaign_id)
    connection.execute(query if item_ids is None else query.where(items.c.id.in_(item_ids)))


def _is_active(now: float) -> ColumnElement[bool]:
    """True for a presentation that takes one of its item's slots: voted on, or leased."""
    return or_(
        presentations.c.state == "done",
        and_(presentations.c.state == "open", presentations.c.lease_until > now),
    )


def _num_presentations(condition: ColumnElement[bool]) -> Any:
    """Number of an item's presentations to people that meet `condition`, as a subquery."""
    query = select(func.count()).where(presentations.c.item_id == items.c.id, condition, by_people())
    return query.correlate(items).scalar_subquery()


def _renew_held(connection: Connection, rater_id: int, campaign: Campaign, now: float) -> list[int]:
    """Ids of the open presentations that the rater keeps, with their leases renewed.

    One whose lease ran out is kept if nobody has taken the slot since; else it expires.
    """
    columns = items.c.id, items.c.is_gold, items.c.retired_at, presentations.c.lease_until
    rows = connection.execute(
        select(*columns, presentations.c.id.label("shown"))
        .select_from(presentations.join(items))
        .where(
            presentations.c.rater_id == rater_id, presentations.c.state == "open", items.c.campaign_id == campaign.id
        )
        .order_by(presentations.c.id)
    ).all()
    kept: list[int] = []
    lost: list[int] = []
    for row in rows:
        stays = row.lease_until > now or (
            has_free_slot(connection, row, row.shown, campaign, now)
            and quota_left(connection, rater_id, campaign, now) > 0
        )
        (kept if stays else lost).append(row.shown)
        if stays:
            # At once: the renewed lease counts towards the quota of the next row.
            _update(connection, [row.shown], lease_until=now + campaign.settings.lease_s)
    if lost:
        _update(connection, lost, state="expired")
    return kept


def _pick_item(connection: Connection, rng: random.Random, rater_id: int, campaign: Campaign, now: float) -> int | None:
    """Id of the next item for the rater: a gold one with probability `gold_share`, else fresh offers before given
    items.
    """
    found = _first_item(connection, rater_id, campaign, now, is_offer=True)
    found = found or _first_item(connection, rater_id, campaign, now, is_offer=False)
    # Gold items are only mixed in among others: at the end of the queue they would be recognizable.
    if found is not None and rng.random() < campaign.settings.gold_share:
        gold = _unseen(rater_id, campaign, is_gold=True).order_by(items.c.id).limit(1)
        found = connection.execute(gold).scalar() or found
    return found


def _first_item(connection: Connection, rater_id: int, campaign: Campaign, now: float, *, is_offer: bool) -> int | None:
    """The newest offer, or the first given item (see `asking.set_order`), that the rater may still vote on. Read
    from `ix_items_queue`.
    """
    has_slot = _num_presentations(_is_active(now)) < campaign.settings.overlap
    query = _unseen(rater_id, campaign, is_gold=False).where(has_slot).limit(1)
    if is_offer:
        query = query.where(items.c.offer_id.is_not(None)).order_by(items.c.offer_id.desc())
    else:
        query = query.where(items.c.offer_id.is_(None)).order_by(items.c.place, items.c.id)
    return connection.execute(query).scalar()


def _unseen(rater_id: int, campaign: Campaign, *, is_gold: bool) -> Any:
    """Query of open items that the rater was never shown, or whose presentation to them expired."""
    mine = exists().where(
        presentations.c.item_id == items.c.id,
        presentations.c.rater_id == rater_id,
        presentations.c.state != "expired",
    )
    return select(items.c.id).where(
        items.c.campaign_id == campaign.id, items.c.is_open == true(), items.c.is_gold == is_gold, ~mine
    )


def _show(
    connection: Connection, rng: random.Random, item_id: int, rater_id: int, lease_until: float, now: float
) -> int:
    """Id of the stored presentation of an item to a rater: a new one, or the expired one, reopened."""
    found = connection.execute(
        select(presentations.c.id).where(presentations.c.item_id == item_id, presentations.c.rater_id == rater_id)
    ).scalar()
    if found is not None:
        _update(connection, [found], state="open", lease_until=lease_until)
        return int(found)
    num_answers = len(texts_of_items(connection, [item_id])[item_id])
    return add_presentation(
        connection, rng, num_answers, item_id=item_id, rater_id=rater_id, shown_at=now, lease_until=lease_until
    )


def _update(connection: Connection, ids: Sequence[int], **values: object) -> None:
    connection.execute(update(presentations).where(presentations.c.id.in_(ids)).values(**values))


def load_presentations(connection: Connection, ids: Sequence[int], campaign: Campaign) -> list[Presentation]:
    """The presentations of these ids, in this order."""
    if not ids:
        return []
    num_revisions = _num_answers(votes) + _num_answers(rankings)
    rows = connection.execute(
        select(presentations, items.c.kind, prompts.c.content_json, num_revisions.label("num_revisions"))
        .select_from(presentations.join(items).join(prompts))
        .where(presentations.c.id.in_(ids))
    ).all()
    texts = texts_of_items(connection, [row.item_id for row in rows])
    found = {row.id: _presentation(row, texts[row.item_id], campaign) for row in rows}
    return [found[id_] for id_ in ids]


def _num_answers(table: Table) -> Any:
    """Number of a presentation's rows in `table`, undone ones included, as a subquery."""
    query = select(func.count()).where(table.c.presentation_id == presentations.c.id)
    return query.correlate(presentations).scalar_subquery()


def _presentation(row: Any, texts: Sequence[str], campaign: Campaign) -> Presentation:
    order: tuple[int, ...] = row.order_json
    return Presentation(
        token=row.token,
        campaign_id=campaign.id,
        kind=row.kind,
        prompt=row.content_json,
        answers=tuple(texts[index] for index in order),
        answer_style=campaign.settings.answer_style,
        shown_at=row.shown_at,
        lease_until=row.lease_until,
        num_revisions=row.num_revisions,
    )
