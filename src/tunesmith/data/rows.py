"""Strict reading of rows: every bad row is found, named and counted before anything is used.

Rows come from a source that `data.sources` knows, or from a Python list, where they are mappings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tunesmith.core.errors import DataError
from tunesmith.data.sources import source_rows
from tunesmith.data.tally import BadRows, RowError
from tunesmith.data.text_files import Candidate
from tunesmith.data.values import checked_columns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands (`prompts.jsonl:3`, `prompts[2]`) and its columns."""

    where: str
    columns: Mapping[str, object]


def parse_rows(
    source: str | Path | Sequence[object],
    parse: Callable[[Row], T],
    *,
    label: str = "rows",
    bad: BadRows | None = None,
) -> list[T]:
    """`parse(row)` of every row of a source or of a list of mappings, in order.

    `parse` raises `RowError(reason, kind)` for a row that it cannot use. A row whose `id` stood before is bad too.
    `label` names a list in messages. Bad rows go to `bad`, which may skip them; without it they are an error. Raises
    DataError listing the first bad rows and the count of all, or if there are no rows.
    """
    bad = bad or BadRows()
    if isinstance(source, str | Path):
        bad.opened(str(source))
        candidates = source_rows(source)
    else:
        bad.opened(f"the list of {label}")
        candidates = _list_rows(source, label)
    parsed: list[T] = []
    place_of_id: dict[str, str] = {}
    for where, read in candidates:
        bad.saw(1)
        try:
            row = Row(where=where, columns=read())
            item = parse(row)
            _check_id(row, place_of_id)
        except RowError as error:
            bad.add(where, error)
        else:
            parsed.append(item)
    bad.check()
    if not parsed:
        raise DataError(f"{bad.source} has no rows; give at least one")
    return parsed


def _check_id(row: Row, place_of_id: dict[str, str]) -> None:
    value = row.columns.get("id")
    if value is None:
        return
    place = place_of_id.setdefault(repr(value), row.where)
    if place != row.where:
        raise RowError(f"id {str(value)[:80]!r} stands already at {place}", "repeated id")


def _list_rows(items: Iterable[object], label: str) -> Iterator[Candidate]:
    for index, item in enumerate(items):
        yield f"{label}[{index}]", lambda item=item: checked_columns(item, "a mapping of columns")
