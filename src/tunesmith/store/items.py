"""Items: a prompt with answers to judge. Given items are identified by their texts, the trainer's by their offer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, insert, select, update

from tunesmith.core.errors import DataError
from tunesmith.schema.records import Text
from tunesmith.store.content import check_content, check_text, prompt_sha256
from tunesmith.store.records import Candidate, NewItem, Offer
from tunesmith.store.tables import candidates, item_candidates, items, new_id, prompts

MAX_ANSWERS = 10
"""Most answers of a ranking."""

_CHUNK = 500
"""Values in one IN clause: databases limit the number of parameters."""

V = TypeVar("V", int, str)


@dataclass(frozen=True, slots=True)
class Added:
    """Ids of the requested items, in that order, and how many of them are new."""

    item_ids: tuple[int, ...]
    num_new: int


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
    """Add items. Given items (without an offer) that exist, in whatever order of their answers, are not added again."""
    for number, item in enumerate(new, start=1):
        check_item(item, f"item {number}")
    prompt_ids = _prompt_ids(connection, campaign_id, [item.prompt for item in new])
    known = _given_items(connection, campaign_id, prompt_ids)
    ids: list[int] = []
    num_new = 0
    for item, prompt_id in zip(new, prompt_ids, strict=True):
        key = (prompt_id, item.kind, frozenset(candidate.text for candidate in item.candidates))
        found = known.get(key) if item.offer_id is None else None
        if found is None:
            found = _insert(connection, campaign_id, prompt_id, item)
            num_new += 1
            if item.offer_id is None:
                known[key] = found
        ids.append(found)
    return Added(tuple(ids), num_new)


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
    return NewItem(offer.prompt, offer.candidates, kind=kind, heldout=offer.heldout, offer_id=offer.id)


def _prompt_ids(connection: Connection, campaign_id: int, contents: Sequence[Text]) -> list[int]:
    """Id of each prompt, which is inserted if new."""
    hashes = [prompt_sha256(content) for content in contents]
    ids: dict[str, int] = {}
    for chunk in chunks(hashes):
        query = select(prompts.c.sha256, prompts.c.id)
        query = query.where(prompts.c.campaign_id == campaign_id, prompts.c.sha256.in_(chunk))
        ids |= {row.sha256: row.id for row in connection.execute(query)}
    for digest, content in zip(hashes, contents, strict=True):
        if digest not in ids:
            values = {"campaign_id": campaign_id, "content_json": content, "sha256": digest}
            ids[digest] = new_id(connection.execute(insert(prompts).values(**values)))
    return [ids[digest] for digest in hashes]


def _given_items(
    connection: Connection, campaign_id: int, prompt_ids: Sequence[int]
) -> dict[tuple[int, str, frozenset[str]], int]:
    """Ids of the given items of these prompts by prompt, kind and texts."""
    rows: list[Any] = []
    for chunk in chunks(prompt_ids):
        query = select(items.c.id, items.c.prompt_id, items.c.kind)
        rows += connection.execute(
            query.where(items.c.campaign_id == campaign_id, items.c.prompt_id.in_(chunk), items.c.offer_id.is_(None))
        ).all()
    texts = texts_of_items(connection, [row.id for row in rows])
    return {(row.prompt_id, row.kind, frozenset(texts[row.id])): row.id for row in rows}


def _insert(connection: Connection, campaign_id: int, prompt_id: int, item: NewItem) -> int:
    ids: list[int] = []
    for candidate in item.candidates:
        values = {
            "text": candidate.text,
            "token_ids_json": candidate.token_ids,
            "logps_json": candidate.logps,
            "weight_version": candidate.weight_version,
            "source_id": check_text(candidate.source_id, "the source of an answer")[:200],
        }
        ids.append(new_id(connection.execute(insert(candidates).values(prompt_id=prompt_id, **values))))
    result = connection.execute(
        insert(items).values(
            campaign_id=campaign_id,
            prompt_id=prompt_id,
            kind=item.kind,
            is_gold=item.gold is not None,
            gold_candidate_id=None if item.gold is None else ids[item.gold],
            heldout=item.heldout,
            offer_id=item.offer_id,
            is_open=True,
        )
    )
    item_id = new_id(result)
    links = [{"item_id": item_id, "position": position, "candidate_id": id_} for position, id_ in enumerate(ids)]
    connection.execute(insert(item_candidates), links)
    return item_id
