"""Items: a prompt with answers to judge. Given items are identified by their texts, the trainer's by their offer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, insert, select, update

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store.content import check_content, check_text, prompt_sha256
from tunesmith.collect.store.records import Candidate, NewItem, Offer
from tunesmith.collect.store.tables import candidates, insert_rows, item_candidates, items, prompts

MAX_ANSWERS = 10
"""Most answers of a ranking."""

LONGEST_REASON = 64
"""Characters of the reason for which an item is asked; what is longer is cut."""

_CHUNK = 500
"""Values in one IN clause: databases limit the number of parameters."""

V = TypeVar("V", int, str)


@dataclass(frozen=True, slots=True)
class Added:
    """Ids of the requested items, in that order, how many of them are new, and the ids of those that were there and
    became gold or held out.
    """

    item_ids: tuple[int, ...]
    num_new: int
    changed_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer of an item as stored."""

    id: int
    text: str


def check_answers(texts: Sequence[str], where: str) -> None:
    """Raise DataError for fewer than two answers, too many, equal ones, or text that cannot be stored."""
    if not 2 <= len(texts) <= MAX_ANSWERS:
        raise DataError(f"{where} has {len(texts)} answers; give 2 to {MAX_ANSWERS}")
    for number, text in enumerate(texts, start=1):
        check_text(text, f"answer {number} of {where}")
    if len(set(texts)) < len(texts):
        raise DataError(f"{where} has the same answer twice; nobody could tell them apart")


def check_item(item: NewItem, where: str) -> None:
    """Raise DataError if `item` cannot be stored or judged; `where` names it."""
    check_content(item.prompt, f"the prompt of {where}")
    check_answers([candidate.text for candidate in item.candidates], where)
    if item.kind == "pair" and len(item.candidates) != 2:
        raise DataError(f"{where} has {len(item.candidates)} answers; a pair has two, more are a ranking")
    if item.gold is not None and not 0 <= item.gold < len(item.candidates):
        raise DataError(f"gold of {where} is {item.gold}; it must be from 0 to {len(item.candidates) - 1}")


def add_items(connection: Connection, campaign_id: int, new: Sequence[NewItem]) -> Added:
    """Add items. Given items (without an offer) that exist, in whatever order of their answers, are not added again,
    but become gold or held out if `new` says so; nothing is unmarked.

    Raises DataError for what `check_item` refuses, and if an item is known to have another best answer.
    """
    for number, item in enumerate(new, start=1):
        check_item(item, f"item {number}")
    prompt_ids = _prompt_ids(connection, campaign_id, [item.prompt for item in new])
    known = _given_items(connection, campaign_id, prompt_ids)
    fresh: dict[object, tuple[int, NewItem]] = {}
    keys: list[object] = []
    marks: dict[int, NewItem] = {}
    for item, prompt_id in zip(new, prompt_ids, strict=True):
        key: object = (prompt_id, item.kind, frozenset(candidate.text for candidate in item.candidates))
        if item.offer_id is not None:
            key = item.offer_id
        elif key in known:
            marks[known[key]] = _merged(marks.get(known[key]), item)
        keys.append(key)
        if key not in known:
            fresh[key] = (prompt_id, _merged(fresh[key][1] if key in fresh else None, item))
    ids = known | dict(zip(fresh, _insert_all(connection, campaign_id, list(fresh.values())), strict=True))
    changed = _mark(connection, {id_: item for id_, item in marks.items() if item.heldout or item.gold is not None})
    return Added(tuple(ids[key] for key in keys), len(fresh), changed)


def ingest(connection: Connection, campaign_id: int, offers: Sequence[Offer], now: float) -> int:
    """Number of items made from new offers; stale offers are retired."""
    known: set[int] = set()
    for chunk in chunks([offer.id for offer in offers]):
        query = select(items.c.offer_id).where(items.c.campaign_id == campaign_id, items.c.offer_id.in_(chunk))
        known |= {int(id_) for id_ in connection.execute(query).scalars() if id_ is not None}
    stale = max((offer.retires_before for offer in offers), default=0)
    fresh = [offer for offer in offers if offer.id not in known and offer.id >= stale]
    add_items(connection, campaign_id, [_item_of(offer) for offer in fresh])
    if stale:
        is_stale = and_(items.c.campaign_id == campaign_id, items.c.offer_id < stale, items.c.retired_at.is_(None))
        connection.execute(update(items).where(is_stale).values(retired_at=now, is_open=False))
    return len(fresh)


def texts_of_items(connection: Connection, item_ids: Sequence[int]) -> dict[int, list[str]]:
    """The answers of each item, by position."""
    texts: dict[int, list[str]] = {item_id: [] for item_id in item_ids}
    for row in _answers(connection, item_ids, (item_candidates.c.item_id, candidates.c.text)):
        texts[row.item_id].append(row.text)
    return texts


def candidates_of_items(connection: Connection, item_ids: Sequence[int]) -> Mapping[int, list[Candidate]]:
    """The answers of each item with tokens and log-probs, by position."""
    found: dict[int, list[Candidate]] = {item_id: [] for item_id in item_ids}
    for row in _answers(connection, item_ids, (item_candidates.c.item_id, *candidates.c)):
        found[row.item_id].append(
            Candidate(row.text, row.token_ids_json, row.logps_json, row.weight_version, row.source_id)
        )
    return found


def answers_of_items(connection: Connection, item_ids: Sequence[int]) -> Mapping[int, list[StoredAnswer]]:
    """The answers of each item with their ids, by position."""
    found: dict[int, list[StoredAnswer]] = {item_id: [] for item_id in item_ids}
    for row in _answers(connection, item_ids, (item_candidates.c.item_id, candidates.c.id, candidates.c.text)):
        found[row.item_id].append(StoredAnswer(row.id, row.text))
    return found


def candidate_ids(connection: Connection, item_id: int) -> list[int]:
    """Ids of an item's answers, by position."""
    query = select(item_candidates.c.candidate_id).where(item_candidates.c.item_id == item_id)
    return list(connection.execute(query.order_by(item_candidates.c.position)).scalars())


def chunks(values: Sequence[V]) -> Iterator[Sequence[V]]:
    """Unique `values` in pieces that fit into one query."""
    unique = list(dict.fromkeys(values))
    for start in range(0, len(unique), _CHUNK):
        yield unique[start : start + _CHUNK]


def _answers(connection: Connection, item_ids: Sequence[int], columns: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks(item_ids):
        yield from connection.execute(
            select(*columns)
            .select_from(item_candidates.join(candidates))
            .where(item_candidates.c.item_id.in_(chunk))
            .order_by(item_candidates.c.item_id, item_candidates.c.position)
        )


def _item_of(offer: Offer) -> NewItem:
    kind = "pair" if len(offer.candidates) == 2 else "ranking"
    return NewItem(
        offer.prompt,
        offer.candidates,
        kind=kind,
        heldout=offer.heldout,
        offer_id=offer.id,
        selection=offer.selection,
    )


def _prompt_ids(connection: Connection, campaign_id: int, contents: Sequence[Text]) -> list[int]:
    """Id of each prompt, which is inserted if new."""
    hashes = [prompt_sha256(content) for content in contents]
    ids: dict[str, int] = {}
    for chunk in chunks(hashes):
        query = select(prompts.c.sha256, prompts.c.id)
        query = query.where(prompts.c.campaign_id == campaign_id, prompts.c.sha256.in_(chunk))
        ids |= {row.sha256: row.id for row in connection.execute(query)}
    fresh = {digest: content for digest, content in zip(hashes, contents, strict=True) if digest not in ids}
    # In the order of the index of hashes, which is written page by page.
    order = sorted(fresh)
    rows = [{"campaign_id": campaign_id, "content_json": fresh[digest], "sha256": digest} for digest in order]
    ids |= dict(zip(order, insert_rows(connection, prompts, rows), strict=True))
    return [ids[digest] for digest in hashes]


def _given_items(connection: Connection, campaign_id: int, prompt_ids: Sequence[int]) -> dict[object, int]:
    """Ids of the given items of these prompts by prompt, kind and texts."""
    rows: list[Any] = []
    for chunk in chunks(prompt_ids):
        query = select(items.c.id, items.c.prompt_id, items.c.kind)
        rows += connection.execute(
            query.where(items.c.campaign_id == campaign_id, items.c.prompt_id.in_(chunk), items.c.offer_id.is_(None))
        ).all()
    texts = texts_of_items(connection, [row.id for row in rows])
    return {(row.prompt_id, row.kind, frozenset(texts[row.id])): row.id for row in rows}


def _merged(first: NewItem | None, second: NewItem) -> NewItem:
    """`first` with the marks of `second`, the same item; its answers may be in another order."""
    if first is None:
        return second
    gold = first.gold
    if second.gold is not None:
        best = second.candidates[second.gold].text
        place = next(place for place, one in enumerate(first.candidates) if one.text == best)
        if gold not in (None, place):
            raise _two_best(first.candidates[gold].text, second.candidates[second.gold])
        gold = place
    return replace(first, gold=gold, heldout=first.heldout or second.heldout)


def _two_best(known: str, other: Candidate) -> DataError:
    place = f"{other.source_id}: " if other.source_id else ""
    return DataError(
        f"{place}{other.text[:80]!r} is said to be the best answer, but of this item {known[:80]!r} is known to be; "
        "keep one of them"
    )


def _mark(connection: Connection, marked: Mapping[int, NewItem]) -> frozenset[int]:
    """Make stored items gold or held out, as `marked` says by their ids; returns the ids of those that were not."""
    changed: set[int] = set()
    answers = answers_of_items(connection, list(marked))
    for chunk in chunks(list(marked)):
        query = select(items.c.id, items.c.gold_candidate_id, items.c.heldout).where(items.c.id.in_(chunk))
        for row in connection.execute(query).all():
            values = _new_marks(row, marked[row.id], answers[row.id])
            if values:
                connection.execute(update(items).where(items.c.id == row.id).values(**values))
                changed.add(row.id)
    return frozenset(changed)


def _new_marks(row: Any, item: NewItem, answers: Sequence[StoredAnswer]) -> dict[str, object]:
    """The columns of a stored item that `item` changes."""
    values: dict[str, object] = {}
    if item.heldout and not row.heldout:
        values["heldout"] = True
    if item.gold is not None:
        best = item.candidates[item.gold]
        ids = {answer.text: answer.id for answer in answers}
        if row.gold_candidate_id is None:
            values |= {"is_gold": True, "gold_candidate_id": ids[best.text], "is_open": True}
        elif row.gold_candidate_id != ids[best.text]:
            raise _two_best(next(one.text for one in answers if one.id == row.gold_candidate_id), best)
    return values


def _insert_all(connection: Connection, campaign_id: int, new: Sequence[tuple[int, NewItem]]) -> list[int]:
    """Ids of new items, each given with the id of its prompt."""
    answers = [
        {
            "prompt_id": prompt_id,
            "text": candidate.text,
            "token_ids_json": candidate.token_ids,
            "logps_json": candidate.logps,
            "weight_version": candidate.weight_version,
            "source_id": check_text(candidate.source_id, "the source of an answer")[:200],
        }
        for prompt_id, item in new
        for candidate in item.candidates
    ]
    answer_ids = iter(insert_rows(connection, candidates, answers))
    ids_of = [[next(answer_ids) for _ in item.candidates] for _, item in new]
    rows = [
        {
            "campaign_id": campaign_id,
            "prompt_id": prompt_id,
            "kind": item.kind,
            "is_gold": item.gold is not None,
            "gold_candidate_id": None if item.gold is None else ids[item.gold],
            "heldout": item.heldout,
            "offer_id": item.offer_id,
            "is_open": True,
            "selection": check_text(item.selection, "the selection of an item")[:LONGEST_REASON],
        }
        for (prompt_id, item), ids in zip(new, ids_of, strict=True)
    ]
    item_ids = insert_rows(connection, items, rows)
    links = [
        {"item_id": item_id, "position": position, "candidate_id": id_}
        for item_id, ids in zip(item_ids, ids_of, strict=True)
        for position, id_ in enumerate(ids)
    ]
    if links:
        connection.execute(insert(item_candidates), links)
    return item_ids
