"""Votes that were made elsewhere, stored as if they had been made here."""

import random
from collections.abc import Sequence

from sqlalchemy import Connection, exists, insert, select

from tunesmith.store.campaigns import campaign, rater_named
from tunesmith.store.candidates import candidate_ids, texts_of_items
from tunesmith.store.content import check_text
from tunesmith.store.items import add_items
from tunesmith.store.queue import add_presentation, refresh_open_items
from tunesmith.store.records import GivenVote
from tunesmith.store.tables import presentations, votes


def add_votes(
    connection: Connection, draw: random.Random, campaign_id: int, given: Sequence[GivenVote], now: float
) -> int:
    """Number of votes added. A rater's vote on an item that they have judged or hold already is passed over."""
    item_ids = add_items(connection, campaign_id, [vote.item for vote in given]).item_ids
    num_new = 0
    for vote, item_id in zip(given, item_ids, strict=True):
        rater_id = rater_named(connection, vote.rater, now)
        is_there = exists().where(presentations.c.item_id == item_id, presentations.c.rater_id == rater_id)
        if connection.execute(select(is_there)).scalar():
            continue
        _add(connection, draw, vote, item_id, rater_id, now)
        num_new += 1
    overlap = campaign(connection, campaign_id).settings.overlap
    refresh_open_items(connection, campaign_id, overlap, sorted(set(item_ids)))
    return num_new


def _add(connection: Connection, draw: random.Random, vote: GivenVote, item_id: int, rater_id: int, now: float) -> None:
    time = now if vote.created_at is None else vote.created_at
    shown = add_presentation(
        connection, draw, 2, state="done", item_id=item_id, rater_id=rater_id, shown_at=time, lease_until=time
    )
    ids = candidate_ids(connection, item_id)
    # The item may have been there with its answers the other way round.
    better = texts_of_items(connection, [item_id])[item_id].index(vote.item.candidates[vote.better].text)
    side = "left" if shown.order[0] == better else "right"
    verdict = {"much_better": f"{side}_much", "better": side}.get(vote.verdict, vote.verdict)
    is_decided = vote.verdict in ("much_better", "better")
    connection.execute(
        insert(votes).values(
            presentation_id=shown.id,
            revision=1,
            verdict=verdict,
            reason=check_text(vote.reason, "the reason"),
            chosen_candidate_id=ids[better] if is_decided else None,
            rejected_candidate_id=ids[1 - better] if is_decided else None,
            dwell_ms=vote.dwell_ms,
            created_at=time,
        )
    )
