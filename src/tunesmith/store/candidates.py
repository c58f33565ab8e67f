"""The answers of items, read in a few large queries instead of one for each item."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from tunesmith.store.content import decode_floats, decode_ints
from tunesmith.store.records import Candidate
from tunesmith.store.tables import candidates, item_candidates

_CHUNK = 500
"""Ids in one query: databases limit the number of parameters."""


def texts_of_items(connection: Connection, item_ids: Sequence[int]) -> dict[int, list[str]]:
    """The answers of each item, by position."""
    texts: dict[int, list[str]] = {item_id: [] for item_id in item_ids}
    columns = item_candidates.c.item_id, candidates.c.text
    for row in _rows(connection, item_ids, columns):
        texts[row.item_id].append(row.text)
    return texts


def candidates_of_items(connection: Connection, item_ids: Sequence[int]) -> Mapping[int, list[Candidate]]:
    """The answers of each item with tokens and log-probs, by position."""
    found: dict[int, list[Candidate]] = {item_id: [] for item_id in item_ids}
    for row in _rows(connection, item_ids, (item_candidates.c.item_id, *candidates.c)):
        found[row.item_id].append(
            Candidate(
                text=row.text,
                token_ids=decode_ints(row.token_ids_json),
                logps=decode_floats(row.logps_json),
                weight_version=row.weight_version,
                source_id=row.source_id,
            )
        )
    return found


def candidate_ids(connection: Connection, item_id: int) -> list[int]:
    """Ids of an item's answers, by position."""
    query = select(item_candidates.c.candidate_id).where(item_candidates.c.item_id == item_id)
    return list(connection.execute(query.order_by(item_candidates.c.position)).scalars())


def chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """`ids` without repeats, in pieces that fit into one query."""
    unique = list(dict.fromkeys(ids))
    for start in range(0, len(unique), _CHUNK):
        yield unique[start : start + _CHUNK]


def _rows(connection: Connection, item_ids: Sequence[int], columns: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks(item_ids):
        yield from connection.execute(
            select(*columns)
            .select_from(item_candidates.join(candidates))
            .where(item_candidates.c.item_id.in_(chunk))
            .order_by(item_candidates.c.item_id, item_candidates.c.position)
        )
