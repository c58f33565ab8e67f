"""Votes of machines, such as judges, on stored pairs. They are votes, but no person's: see `queue.by_people`."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, and_, exists, insert, or_, select, true

from tunesmith.base.core.errors import NameTakenError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store import audit
from tunesmith.collect.store.campaigns import named
from tunesmith.collect.store.content import check_name, check_text
from tunesmith.collect.store.items import StoredAnswer, answers_of_items, chunks
from tunesmith.collect.store.queue import SIDES_UNKNOWN, by_people
from tunesmith.collect.store.tables import insert_rows, items, new_id, presentations, prompts, raters, votes

_PAGE = 500
_DECIDED = ("left", "left_much", "right", "right_much")
_VERDICTS = {"first": "left", "second": "right", "tie": "tie"}


@dataclass(frozen=True, slots=True)
class MachineVote:
    """A machine's vote on the stored pair `item_id`: its first answer is better, its second one, or neither."""

    item_id: int
    better: Literal["first", "second", "tie"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PairToJudge:
    """A stored pair for a machine. `votes` are those of people for one of its answers: True for the first one.

    `is_open`: it is asked of people, and none has voted. `is_judged`: the machine has voted on it.
    """

    id: int
    prompt: Text
    answers: tuple[str, str]
    votes: tuple[bool, ...]
    is_open: bool
    is_judged: bool


@dataclass(frozen=True, slots=True)
class MachineStats:
    """Votes of the machine `name`, and its `hits`: for each vote of a person for one of two answers that it judged too,
    1 if it prefers the same one, 0 for the other, 0.5 for a tie. `prompts` are the ids of their prompts.
    """

    rater_id: int
    name: str
    num_votes: int
    num_ties: int
    hits: tuple[float, ...]
    prompts: tuple[int, ...]


def add(connection: Connection, name: str, given: Sequence[MachineVote], now: float) -> dict[str, int]:
    """Numbers of votes added, and of those on pairs that the machine has judged. It is made if there is none.

    Raises NameTakenError if a person, a key or a user of one has this name.
    """
    rater_id = _machine(connection, name, now)
    known = set[int]()
    found: dict[int, list[StoredAnswer]] = {}
    wanted = list({vote.item_id: vote for vote in given}.values())
    for chunk in chunks([vote.item_id for vote in wanted]):
        theirs = presentations.c.rater_id == rater_id, presentations.c.item_id.in_(chunk)
        known |= set(connection.execute(select(presentations.c.item_id).where(*theirs)).scalars())
        is_pair = items.c.id.in_(chunk), items.c.kind == "pair"
        ids = list(connection.execute(select(items.c.id).where(*is_pair)).scalars())
        found |= answers_of_items(connection, ids)
    fresh = [vote for vote in wanted if vote.item_id in found and vote.item_id not in known]
    shown = [
        {
            "item_id": vote.item_id,
            "rater_id": rater_id,
            "token": secrets.token_urlsafe(16),
            "order_json": (0, 1),
            "seed": SIDES_UNKNOWN,
            "shown_at": now,
            "lease_until": now,
            "state": "done",
        }
        for vote in fresh
    ]
    rows = [
        {"presentation_id": id_, **_content(vote, [answer.id for answer in found[vote.item_id]]), "created_at": now}
        for id_, vote in zip(insert_rows(connection, presentations, shown), fresh, strict=True)
    ]
    if rows:
        connection.execute(insert(votes), rows)
        audit.add(connection, "judged", None, {"id": rater_id, "num_votes": len(rows)}, now)
    return {"num_new": len(rows), "num_there": len(wanted) - len(rows)}


def pairs_after(connection: Connection, cursor: int, judge: str, campaign_id: int | None) -> list[PairToJudge]:
    """At most `_PAGE` pairs with an id above `cursor`: those that people have voted on, and open ones."""
    is_voted = exists().where(presentations.c.item_id == items.c.id, presentations.c.state == "done", by_people())
    query = (
        select(items.c.id, items.c.is_open, items.c.is_gold, prompts.c.content_json, is_voted.label("is_voted"))
        .select_from(items.join(prompts, prompts.c.id == items.c.prompt_id))
        .where(items.c.id > cursor, items.c.kind == "pair", or_(is_voted, items.c.is_open == true()))
        .order_by(items.c.id)
        .limit(_PAGE)
    )
    if campaign_id is not None:
        query = query.where(items.c.campaign_id == campaign_id)
    rows = connection.execute(query).all()
    ids = [row.id for row in rows]
    answers = answers_of_items(connection, ids)
    preferred: dict[int, list[bool]] = {id_: [] for id_ in ids}
    for row in _decided(connection, ids, by_people()):
        preferred[row.item_id].append(row.chosen_candidate_id == answers[row.item_id][0].id)
    theirs = select(presentations.c.item_id).join(raters, raters.c.id == presentations.c.rater_id)
    is_theirs = presentations.c.item_id.in_(ids), raters.c.name == judge, raters.c.is_machine == true()
    judged = set(connection.execute(theirs.where(*is_theirs)).scalars())
    return [
        PairToJudge(
            id=row.id,
            prompt=row.content_json,
            answers=(answers[row.id][0].text, answers[row.id][1].text),
            votes=tuple(preferred[row.id]),
            is_open=bool(row.is_open) and not row.is_voted and not row.is_gold,
            is_judged=row.id in judged,
        )
        for row in rows
    ]


def stats(connection: Connection, campaign_id: int | None) -> list[MachineStats]:
    """Those of every machine with votes in the campaign, or in all."""
    of_machine = presentations.c.rater_id.in_(select(raters.c.id).where(raters.c.is_machine == true()))
    query = select(
        presentations.c.rater_id, presentations.c.item_id, items.c.prompt_id, raters.c.name, votes.c.chosen_candidate_id
    )
    query = query.select_from(
        votes.join(presentations, presentations.c.id == votes.c.presentation_id)
        .join(items, items.c.id == presentations.c.item_id)
        .join(raters, raters.c.id == presentations.c.rater_id)
    ).where(_is_last(), votes.c.verdict.in_((*_DECIDED, "tie")), of_machine)
    if campaign_id is not None:
        query = query.where(items.c.campaign_id == campaign_id)
    judged: dict[int, list[Any]] = {}
    for row in connection.execute(query.order_by(votes.c.id)):
        judged.setdefault(row.rater_id, []).append(row)
    said: dict[int, list[int]] = {}
    for chunk in chunks([row.item_id for rows in judged.values() for row in rows]):
        for row in _decided(connection, chunk, by_people()):
            said.setdefault(row.item_id, []).append(row.chosen_candidate_id)
    return [_stats_of(rows, said) for rows in judged.values()]


def _stats_of(rows: Sequence[Any], said: Mapping[int, Sequence[int]]) -> MachineStats:
    hits: list[float] = []
    prompt_ids: list[int] = []
    for row in rows:
        for chosen_id in said.get(row.item_id, ()):
            hits.append(0.5 if row.chosen_candidate_id is None else float(row.chosen_candidate_id == chosen_id))
            prompt_ids.append(row.prompt_id)
    num_ties = sum(row.chosen_candidate_id is None for row in rows)
    return MachineStats(rows[0].rater_id, rows[0].name, len(rows), num_ties, tuple(hits), tuple(prompt_ids))


def _decided(connection: Connection, item_ids: Sequence[int], who: Any) -> Sequence[Any]:
    """Effective votes for one of two answers on these items."""
    query = select(presentations.c.item_id, votes.c.chosen_candidate_id)
    query = query.select_from(votes.join(presentations, presentations.c.id == votes.c.presentation_id))
    is_wanted = presentations.c.item_id.in_(item_ids), votes.c.verdict.in_(_DECIDED)
    return connection.execute(query.where(*is_wanted, _is_last(), who).order_by(votes.c.id)).all()


def _is_last() -> Any:
    later = votes.alias()
    return ~exists().where(
        and_(later.c.presentation_id == votes.c.presentation_id, later.c.revision > votes.c.revision)
    )


def _content(vote: MachineVote, answer_ids: Sequence[int]) -> dict[str, Any]:
    """Columns of a vote; the first answer is the left one."""
    chosen = None if vote.better == "tie" else answer_ids[vote.better == "second"]
    rejected = None if vote.better == "tie" else answer_ids[vote.better == "first"]
    return {
        "revision": 1,
        "verdict": _VERDICTS[vote.better],
        "reason": check_text(vote.reason, "the reason"),
        "chosen_candidate_id": chosen,
        "rejected_candidate_id": rejected,
    }


def _machine(connection: Connection, name: str, now: float) -> int:
    name = check_name(name, "the judge's name")
    found = connection.execute(select(raters.c.id, raters.c.is_machine).where(raters.c.name == name)).first()
    if found is None:
        values = {**named(name), "role": "rater", "created_at": now, "is_machine": True}
        return new_id(connection.execute(insert(raters).values(**values)))
    if not found.is_machine:
        raise NameTakenError(
            f"{name!r} is a person here, whose votes a judge may not give; give the judge another model"
        )
    return int(found.id)
