"""Who is shown what next. Everything here runs in the one transaction of the one writer, so counts cannot race."""

import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, func, insert, or_, select, true, update

from tunesmith.store.content import decode_content
from tunesmith.store.items import texts_of_items
from tunesmith.store.records import Campaign, Presentation
from tunesmith.store.tables import items, presentations, prompts, rankings, votes

MAX_HELD = 20
"""A rater holds at most this many presentations at once."""

_SEED_BITS = 31


def next_presentations(
    connection: Connection, draw: random.Random, rater_id: int, campaign: Campaign, count: int, now: float
) -> list[Presentation]:
    """What the rater holds, oldest first, then fresh items, `count` in all at most."""
    if campaign.closed_at is not None or count < 1:
        return []
    count = min(count, MAX_HELD)
    held = _renew_held(connection, rater_id, campaign, now)
    num_fresh = min(count - len(held), num_allowed(connection, rater_id, campaign, now))
    for _ in range(num_fresh):
        item_id = _pick_item(connection, draw, rater_id, campaign, now)
        if item_id is None:
            break
        held.append(_show(connection, draw, item_id, rater_id, now + campaign.settings.lease_s, now))
    return load_presentations(connection, held[:count], campaign)


def num_allowed(connection: Connection, rater_id: int, campaign: Campaign, now: float) -> int:
    """How many more items the campaign's limit lets the rater have, beyond those voted on and those held."""
    limit = campaign.settings.max_votes_per_rater
    if not limit:
        return MAX_HELD
    query = (
        select(func.count())
        .select_from(presentations.join(items))
        .where(presentations.c.rater_id == rater_id, items.c.campaign_id == campaign.id, is_active(now))
    )
    return max(0, limit - int(connection.execute(query).scalar_one()))


def is_active(now: float) -> ColumnElement[bool]:
    """True of a presentation that takes one of its item's places: it was voted on, or its lease runs."""
    return or_(
        presentations.c.state == "done",
        and_(presentations.c.state == "open", presentations.c.lease_until > now),
    )


def has_room(connection: Connection, item: Any, presentation_id: int, campaign: Campaign, now: float) -> bool:
    """True if the item (a row with `id`, `is_gold`, `retired_at`) may have one more vote, this presentation's."""
    if item.retired_at is not None or campaign.closed_at is not None:
        return False
    if item.is_gold:
        return True
    query = select(func.count()).where(
        presentations.c.item_id == item.id, presentations.c.id != presentation_id, is_active(now)
    )
    return int(connection.execute(query).scalar_one()) < campaign.settings.overlap


@dataclass(frozen=True, slots=True)
class AddedPresentation:
    """The id of a new presentation, and the places of the item's candidates from left to right."""

    id: int
    order: tuple[int, ...]


def add_presentation(
    connection: Connection,
    draw: random.Random,
    num_answers: int,
    *,
    item_id: int,
    rater_id: int,
    shown_at: float,
    lease_until: float,
    state: str = "open",
) -> AddedPresentation:
    """Write down that an item with `num_answers` answers is shown to a rater, in an order that is drawn here."""
    seed = draw.getrandbits(_SEED_BITS)
    order = list(range(num_answers))
    random.Random(seed).shuffle(order)
    result = connection.execute(
        insert(presentations).values(
            item_id=item_id,
            rater_id=rater_id,
            token=secrets.token_urlsafe(16),
            order_json=json.dumps(order),
            seed=seed,
            shown_at=shown_at,
            lease_until=lease_until,
            state=state,
        )
    )
    key: Any = result.inserted_primary_key
    return AddedPresentation(int(key[0]), tuple(order))


def refresh_open_items(
    connection: Connection, campaign_id: int, overlap: int, item_ids: Sequence[int] | None = None
) -> None:
    """Set `is_open` of the items of a campaign, or of some of them, to what follows from their votes."""
    num_done = (
        select(func.count())
        .where(presentations.c.item_id == items.c.id, presentations.c.state == "done")
        .correlate(items)
        .scalar_subquery()
    )
    query = update(items).values(
        is_open=and_(items.c.retired_at.is_(None), or_(items.c.is_gold == true(), num_done < overlap))
    )
    query = query.where(items.c.campaign_id == campaign_id)
    connection.execute(query if item_ids is None else query.where(items.c.id.in_(item_ids)))


def load_presentations(connection: Connection, ids: Sequence[int], campaign: Campaign) -> list[Presentation]:
    """The presentations of these ids, in this order."""
    if not ids:
        return []
    rows = connection.execute(
        select(presentations, items.c.kind, prompts.c.content_json, _num_revisions().label("num_revisions"))
        .select_from(presentations.join(items).join(prompts))
        .where(presentations.c.id.in_(ids))
    ).all()
    texts = texts_of_items(connection, [row.item_id for row in rows])
    found = {row.id: _presentation(row, texts[row.item_id], campaign) for row in rows}
    return [found[id_] for id_ in ids]


def _renew_held(connection: Connection, rater_id: int, campaign: Campaign, now: float) -> list[int]:
    """Ids of the presentations that stay with the rater, whose leases begin anew.

    One whose lease ran out stays if nobody has taken the place meanwhile; else it is given up.
    """
    rows = connection.execute(
        select(
            items.c.id,
            items.c.is_gold,
            items.c.retired_at,
            presentations.c.id.label("shown"),
            presentations.c.lease_until,
        )
        .select_from(presentations.join(items))
        .where(
            presentations.c.rater_id == rater_id,
            presentations.c.state == "open",
            items.c.campaign_id == campaign.id,
        )
        .order_by(presentations.c.id)
    ).all()
    kept: list[int] = []
    lost: list[int] = []
    for row in rows:
        stays = row.lease_until > now or (
            has_room(connection, row, row.shown, campaign, now) and num_allowed(connection, rater_id, campaign, now) > 0
        )
        (kept if stays else lost).append(row.shown)
        if stays:
            _set_lease(connection, row.shown, now + campaign.settings.lease_s)
    if lost:
        connection.execute(update(presentations).where(presentations.c.id.in_(lost)).values(state="expired"))
    return kept


def _pick_item(
    connection: Connection, draw: random.Random, rater_id: int, campaign: Campaign, now: float
) -> int | None:
    """Id of the next item for the rater: now and then a gold one, else fresh offers before given items."""
    found = _first_item(connection, rater_id, campaign, now, is_offer=True)
    found = found or _first_item(connection, rater_id, campaign, now, is_offer=False)
    # Gold items are mixed in among others, never left over at the end, where they would show.
    if found is not None and draw.random() < campaign.settings.gold_share:
        found = _first_gold(connection, rater_id, campaign) or found
    return found


def _first_item(connection: Connection, rater_id: int, campaign: Campaign, now: float, *, is_offer: bool) -> int | None:
    """The newest offer, or the oldest given item, that the rater may still vote on. Read from `ix_items_queue`."""
    num_active = (
        select(func.count())
        .where(presentations.c.item_id == items.c.id, is_active(now))
        .correlate(items)
        .scalar_subquery()
    )
    query = _unseen(rater_id, campaign, is_gold=False).where(num_active < campaign.settings.overlap).limit(1)
    if is_offer:
        query = query.where(items.c.offer_id.is_not(None)).order_by(items.c.offer_id.desc())
    else:
        query = query.where(items.c.offer_id.is_(None)).order_by(items.c.id)
    return connection.execute(query).scalar()


def _first_gold(connection: Connection, rater_id: int, campaign: Campaign) -> int | None:
    query = _unseen(rater_id, campaign, is_gold=True).order_by(items.c.id).limit(1)
    return connection.execute(query).scalar()


def _unseen(rater_id: int, campaign: Campaign, *, is_gold: bool) -> Any:
    """Open items that the rater was never shown, or was shown and let go."""
    mine = exists().where(
        presentations.c.item_id == items.c.id,
        presentations.c.rater_id == rater_id,
        presentations.c.state != "expired",
    )
    return select(items.c.id).where(
        items.c.campaign_id == campaign.id, items.c.is_open == true(), items.c.is_gold == is_gold, ~mine
    )


def _show(
    connection: Connection, draw: random.Random, item_id: int, rater_id: int, lease_until: float, now: float
) -> int:
    """Id of the presentation of an item to a rater, written down: a new one, or the one they let go."""
    found = connection.execute(
        select(presentations.c.id).where(presentations.c.item_id == item_id, presentations.c.rater_id == rater_id)
    ).scalar()
    if found is not None:
        connection.execute(update(presentations).where(presentations.c.id == found).values(state="open"))
        _set_lease(connection, found, lease_until)
        return int(found)
    num_answers = len(texts_of_items(connection, [item_id])[item_id])
    return add_presentation(
        connection, draw, num_answers, item_id=item_id, rater_id=rater_id, shown_at=now, lease_until=lease_until
    ).id


def _set_lease(connection: Connection, presentation_id: int, lease_until: float) -> None:
    query = update(presentations).where(presentations.c.id == presentation_id)
    connection.execute(query.values(lease_until=lease_until))


def _num_revisions() -> Any:
    """How often the presentation was answered or undone."""
    in_votes = select(func.count()).where(votes.c.presentation_id == presentations.c.id)
    in_rankings = select(func.count()).where(rankings.c.presentation_id == presentations.c.id)
    return in_votes.correlate(presentations).scalar_subquery() + in_rankings.correlate(presentations).scalar_subquery()


def _presentation(row: Any, texts: Sequence[str], campaign: Campaign) -> Presentation:
    order: list[int] = json.loads(row.order_json)
    return Presentation(
        token=row.token,
        campaign_id=campaign.id,
        kind=row.kind,
        prompt=decode_content(row.content_json),
        answers=tuple(texts[place] for place in order),
        answer_style=campaign.settings.answer_style,
        shown_at=row.shown_at,
        lease_until=row.lease_until,
        num_revisions=row.num_revisions,
    )
