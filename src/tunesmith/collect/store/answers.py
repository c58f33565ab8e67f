"""Votes, rankings and written answers: append-only rows; a presentation's highest revision is the effective one."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, exists, insert, select, update

from tunesmith.base.core.errors import UnknownPresentationError, VoteConflictError, VoteError
from tunesmith.collect.store.campaigns import campaign as load_campaign
from tunesmith.collect.store.campaigns import check_not_deleted, raters_named
from tunesmith.collect.store.content import check_text
from tunesmith.collect.store.items import (
    StoredAnswer,
    add_items,
    answers_of_items,
    candidate_ids,
    chunks,
    texts_of_items,
)
from tunesmith.collect.store.queue import (
    GIVEN_ORDER,
    SHOWN_ELSEWHERE,
    add_presentation,
    has_free_slot,
    new_presentation,
    quota_left,
    refresh_open_items,
)
from tunesmith.collect.store.records import VERDICTS, Campaign, GivenVote, NewItem, Verdict, VoteReceipt
from tunesmith.collect.store.tables import demonstrations, insert_rows, items, new_id, presentations, rankings, votes

_MAX_DWELL_MS = 2**31 - 1
_LEFT = ("left_much", "left")
_RIGHT = ("right_much", "right")
_MIRRORED: Mapping[Verdict, Verdict] = {
    "left_much": "right_much",
    "left": "right",
    "right": "left",
    "right_much": "left_much",
}


class Answering:
    """A rater's answer to one presentation, inside a transaction. With `is_mirrored` the sides of a vote are those of
    a pair shown the other way round.

    Raises UnknownPresentationError if the token is not this rater's.
    """

    def __init__(
        self, connection: Connection, token: str, rater_id: int, now: float, *, is_mirrored: bool = False
    ) -> None:
        shown = connection.execute(
            select(presentations).where(presentations.c.token == token, presentations.c.rater_id == rater_id)
        ).first()
        if shown is None:
            raise UnknownPresentationError("there is no such presentation; ask for the next one")
        self._connection = connection
        self._now = now
        self._is_mirrored = is_mirrored
        self._shown: Any = shown
        self._item: Any = connection.execute(select(items).where(items.c.id == shown.item_id)).one()
        self._campaign: Campaign = load_campaign(connection, self._item.campaign_id)
        self._answers: Table = votes if self._item.kind == "pair" else rankings
        # Indices of the item's answers from left to right.
        self._order: tuple[int, ...] = shown.order_json

    def vote(self, verdict: Verdict, reason: str, dwell_ms: int | None, request_key: str | None) -> VoteReceipt:
        """Store a verdict; for a ranking only `skip` is allowed."""
        if verdict not in VERDICTS:
            raise VoteError(f"verdict {verdict!r} is unknown; give one of {', '.join(VERDICTS)}")
        check_text(reason, "the reason")
        if self._is_mirrored:
            verdict = _MIRRORED.get(verdict, verdict)
        content: dict[str, object] = {"verdict": verdict, "reason": reason}
        if self._item.kind != "pair":
            if verdict != "skip":
                raise VoteError(f"{verdict!r} does not fit {len(self._order)} answers; rank them, or skip")
            return self._add({**content, "ranks_json": None}, dwell_ms, request_key)
        ids = candidate_ids(self._connection, self._item.id)
        left, right = (ids[index] for index in self._order)
        chosen, rejected = None, None
        if verdict in _LEFT:
            chosen, rejected = left, right
        elif verdict in _RIGHT:
            chosen, rejected = right, left
        content |= {"chosen_candidate_id": chosen, "rejected_candidate_id": rejected}
        return self._add(content, dwell_ms, request_key)

    def rank(self, ranks: Sequence[int], reason: str, dwell_ms: int | None, request_key: str | None) -> VoteReceipt:
        """Store a ranking, given for the answers from left to right. Ranks are stored without gaps."""
        if self._item.kind != "ranking":
            raise VoteError("these two answers are a pair; give a verdict")
        check_text(reason, "the reason")
        num = len(self._order)
        if len(ranks) != num or not all(1 <= rank <= num for rank in ranks):
            raise VoteError(
                f"ranks {list(ranks)} do not fit; give {num} ranks from 1 (the best) to {num}, equal ones for ties"
            )
        distinct = sorted(set(ranks))
        by_position = [0] * num
        for position, rank in zip(self._order, ranks, strict=True):
            by_position[position] = distinct.index(rank) + 1
        content = {"verdict": "ranked", "reason": reason, "ranks_json": tuple(by_position)}
        return self._add(content, dwell_ms, request_key)

    def withdraw(self, request_key: str | None) -> VoteReceipt:
        """Undo the last vote or ranking, which opens the presentation again."""
        last = self._last(self._answers)
        if last is None:
            raise VoteError("there is no vote to undo")
        repeated = self._repeated(self._answers, last, {"verdict": "withdrawn"}, request_key)
        if repeated is not None:
            return repeated
        self._check_undo_time(last)
        if self._shown.state == "skipped":
            self._check_slot()
        receipt = self._insert(self._answers, {"verdict": "withdrawn", "reason": ""}, last, request_key)
        self._set_state("open")
        return receipt

    def demonstrate(self, text: str, request_key: str | None) -> VoteReceipt:
        """Store an answer that the rater wrote. The state of the presentation does not change."""
        if not text.strip():
            raise VoteError("the answer is empty; write one, or leave it out")
        check_text(text, "the answer")
        last = self._last(demonstrations)
        repeated = self._repeated(demonstrations, last, {"text": text}, request_key)
        if repeated is not None:
            return repeated
        content = {"text": text, "prompt_id": self._item.prompt_id, "rater_id": self._shown.rater_id}
        return self._insert(demonstrations, content, last, request_key)

    def _add(self, content: Mapping[str, object], dwell_ms: int | None, request_key: str | None) -> VoteReceipt:
        """Append a revision, unless it is stored already."""
        last = self._last(self._answers)
        repeated = self._repeated(self._answers, last, content, request_key)
        if repeated is not None:
            return repeated
        if last is not None and last.verdict != "withdrawn":
            self._check_undo_time(last)
        state = "skipped" if content["verdict"] == "skip" else "done"
        if state == "done" and not self._holds_slot:
            self._check_slot()
        dwell_ms = None if dwell_ms is None else min(max(0, dwell_ms), _MAX_DWELL_MS)
        receipt = self._insert(self._answers, {**content, "dwell_ms": dwell_ms}, last, request_key)
        self._set_state(state)
        return receipt

    def _repeated(
        self, table: Table, last: Any | None, content: Mapping[str, object], request_key: str | None
    ) -> VoteReceipt | None:
        """The receipt of the row with this request key, or of the last one if its content is the same."""
        if request_key is not None:
            if not 0 < len(request_key) <= 200:
                raise VoteError(f"the request key has {len(request_key)} characters; give 1 to 200")
            check_text(request_key, "the request key")
            is_same_request = table.c.presentation_id == self._shown.id, table.c.request_key == request_key
            found = self._connection.execute(select(table).where(*is_same_request)).first()
            if found is not None and not _is_same(found, content):
                raise VoteError("this request key was used with another content; give each vote a key of its own")
            if found is not None:
                return self._receipt(found)
        return self._receipt(last) if last is not None and _is_same(last, content) else None

    def _last(self, table: Table) -> Any | None:
        query = select(table).where(table.c.presentation_id == self._shown.id).order_by(table.c.revision.desc())
        return self._connection.execute(query.limit(1)).first()

    def _insert(
        self, table: Table, content: Mapping[str, object], last: Any | None, request_key: str | None
    ) -> VoteReceipt:
        """Insert the revision after `last`."""
        values: dict[str, Any] = {**content, "revision": 1 if last is None else int(last.revision) + 1}
        values |= {"presentation_id": self._shown.id, "created_at": self._now, "request_key": request_key}
        row_id = new_id(self._connection.execute(insert(table).values(**values)))
        row = self._connection.execute(select(table).where(table.c.id == row_id)).one()
        return self._receipt(row, is_repeat=False)

    def _receipt(self, row: Any, *, is_repeat: bool = True) -> VoteReceipt:
        return VoteReceipt(
            id=row.id,
            token=self._shown.token,
            revision=row.revision,
            verdict=getattr(row, "verdict", "written"),
            created_at=row.created_at,
            undo_until=row.created_at + self._campaign.settings.undo_s if self._campaign.settings.undo_s else None,
            is_repeat=is_repeat,
        )

    @property
    def _holds_slot(self) -> bool:
        is_leased = self._shown.state == "open" and self._shown.lease_until > self._now
        return is_leased or self._shown.state == "done"

    def _check_undo_time(self, last: Any) -> None:
        undo_s = self._campaign.settings.undo_s
        if undo_s and self._now > last.created_at + undo_s:
            raise VoteConflictError(f"a vote can be changed for {undo_s:g} s, and this time is over")

    def _check_slot(self) -> None:
        is_free = has_free_slot(self._connection, self._item, self._shown.id, self._campaign, self._now)
        if not is_free or quota_left(self._connection, self._shown.rater_id, self._campaign, self._now) < 1:
            raise VoteConflictError("this item needs no more votes; ask for the next one")

    def _set_state(self, state: str) -> None:
        values: dict[str, object] = {"state": state}
        if state == "open":
            values["lease_until"] = self._now + self._campaign.settings.lease_s
        self._connection.execute(update(presentations).where(presentations.c.id == self._shown.id).values(**values))
        refresh_open_items(self._connection, self._campaign.id, self._campaign.settings.overlap, [int(self._item.id)])


def answering_pair(
    connection: Connection,
    rng: random.Random,
    campaign_id: int,
    item: NewItem,
    rater_id: int,
    now: float,
    seed: int = SHOWN_ELSEWHERE,
) -> Answering:
    """A rater's answer to a pair that was shown to them outside of the queue, in the order of its candidates, or, with
    the `seed` SIDES_UNKNOWN, in whatever order. Item and presentation are stored; a repeated call finds them.
    """
    check_not_deleted(connection, rater_id)
    (item_id,) = add_items(connection, campaign_id, [item]).item_ids
    # The pair may have been stored before, with its answers in the other order.
    texts = texts_of_items(connection, [item_id])[item_id]
    order = tuple(texts.index(candidate.text) for candidate in item.candidates)
    of_both = presentations.c.item_id == item_id, presentations.c.rater_id == rater_id
    theirs = select(presentations.c.token, presentations.c.order_json).where(*of_both)
    shown = connection.execute(theirs).first()
    if shown is None:
        settings = load_campaign(connection, campaign_id)
        if quota_left(connection, rater_id, settings, now) < 1:
            raise VoteConflictError("you have given all the votes that the campaign asks of one rater")
        until = now + settings.settings.lease_s
        add_presentation(connection, rng, 2, item_id=item_id, rater_id=rater_id, shown_at=now, lease_until=until)
        connection.execute(update(presentations).where(*of_both).values(order_json=order, seed=seed))
        shown = connection.execute(theirs).one()
    # They may have seen it before, in another conversation, with the sides exchanged.
    return Answering(connection, shown.token, rater_id, now, is_mirrored=tuple(shown.order_json) != order)


@dataclass(frozen=True, slots=True)
class AddedVotes:
    """Numbers of imported votes added, and of those left out because their rater has said otherwise of the item; ids of
    items that became held out.
    """

    num_new: int
    num_other: int
    changed_ids: frozenset[int]


def add_votes(
    connection: Connection, rng: random.Random, campaign_id: int, given: Sequence[GivenVote], now: float
) -> AddedVotes:
    """Add imported votes. One on an item that its rater has judged or holds already is skipped."""
    added = add_items(connection, campaign_id, [vote.item for vote in given])
    answers = answers_of_items(connection, added.item_ids)
    machines = {vote.rater for vote in given if vote.machine}
    rater_ids = raters_named(connection, [vote.rater for vote in given], now, machines)
    said = _verdicts_on(connection, added.item_ids)
    fresh: list[tuple[dict[str, Any], dict[str, Any]]] = []
    num_other = 0
    for vote, item_id in zip(given, added.item_ids, strict=True):
        rater_id = rater_ids[vote.rater]
        shown, content = _imported(rng, vote, answers[item_id], now)
        verdict = _without_side(content["verdict"], content["chosen_candidate_id"])
        if (item_id, rater_id) in said:
            num_other += said[item_id, rater_id] != verdict
            continue
        said[item_id, rater_id] = verdict
        fresh.append(({"item_id": item_id, "rater_id": rater_id, **shown}, content))
    ids = insert_rows(connection, presentations, [shown for shown, _ in fresh])
    rows = [{"presentation_id": id_, **content} for id_, (_, content) in zip(ids, fresh, strict=True)]
    if rows:
        connection.execute(insert(votes), rows)
    overlap = load_campaign(connection, campaign_id).settings.overlap
    for chunk in chunks(added.item_ids):
        refresh_open_items(connection, campaign_id, overlap, chunk)
    return AddedVotes(len(fresh), num_other, added.changed_ids)


def _imported(
    rng: random.Random, vote: GivenVote, answers: Sequence[StoredAnswer], now: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of the presentation and of the vote; `answers` are those of the stored item, by position."""
    time = now if vote.created_at is None else vote.created_at
    # The item may have been stored with its answers in the other order.
    texts = [answer.text for answer in answers]
    better = texts.index(vote.item.candidates[vote.better].text)
    shown = new_presentation(rng, 2, shown_at=time, lease_until=time, state="done")
    if vote.left is not None:
        left = texts.index(vote.item.candidates[vote.left].text)
        shown |= {"order_json": [left, 1 - left], "seed": GIVEN_ORDER}
    side = "left" if shown["order_json"][0] == better else "right"
    is_decided = vote.verdict in ("much_better", "better")
    return shown, {
        "revision": 1,
        "verdict": {"much_better": f"{side}_much", "better": side}.get(vote.verdict, vote.verdict),
        "reason": check_text(vote.reason, "the reason"),
        "chosen_candidate_id": answers[better].id if is_decided else None,
        "rejected_candidate_id": answers[1 - better].id if is_decided else None,
        "dwell_ms": None if vote.dwell_ms is None else min(max(0, vote.dwell_ms), _MAX_DWELL_MS),
        "created_at": time,
    }


def _verdicts_on(connection: Connection, item_ids: Sequence[int]) -> dict[tuple[int, int], str | None]:
    """The verdict of each rater on each of the items that they were shown, without the side; None for no vote yet."""
    later = votes.alias()
    is_last = ~exists().where(later.c.presentation_id == votes.c.presentation_id, later.c.revision > votes.c.revision)
    joined = presentations.outerjoin(votes, (votes.c.presentation_id == presentations.c.id) & is_last)
    columns = presentations.c.item_id, presentations.c.rater_id, votes.c.verdict, votes.c.chosen_candidate_id
    found: dict[tuple[int, int], str | None] = {}
    for chunk in chunks(item_ids):
        for row in connection.execute(select(*columns).select_from(joined).where(presentations.c.item_id.in_(chunk))):
            verdict = None if row.verdict is None else _without_side(row.verdict, row.chosen_candidate_id)
            found[row.item_id, row.rater_id] = verdict
    return found


def _without_side(verdict: str, chosen_id: int | None) -> str:
    return verdict if chosen_id is None else f"{chosen_id} {verdict.removeprefix('left').removeprefix('right')}"


def _is_same(row: Any, content: Mapping[str, object]) -> bool:
    return all(getattr(row, name) == value for name, value in content.items())
