"""Preference pairs in TRL's columns: `prompt`, `chosen`, `rejected`, and optionally `margin` and `tie`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tunesmith.core.errors import DataError
from tunesmith.data.content import as_completion, as_content
from tunesmith.data.prompts import missing_column
from tunesmith.data.rows import Row, RowError, kind_of, parse_rows
from tunesmith.schema.records import Pair, Prompt, Text

_PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin", "tie")


def load_pairs(source: str | Path | Sequence[Mapping[str, object]]) -> list[Pair]:
    """The pairs of a JSONL file (plain or gzipped) or of a list of rows, in order.

    Text or conversational, the same in all columns of a row. Without a `prompt` column `chosen` and `rejected` hold the
    whole exchange and the prompt is empty text. Columns other than the five are kept in `Pair.prompt.columns`. Raises
    DataError that names and counts the rows that cannot be used: a missing column, a wrong type, an empty completion, a
    margin below 0, or two equal completions without `tie`. Lengths in tokens are checked by `collate.encode_pairs`.
    """
    if isinstance(source, str | Path) and not str(source):
        raise DataError("no pairs are given; name a JSONL file with `chosen` and `rejected` columns in `pairs.source`")
    return parse_rows(cast(str | Path | Sequence[object], source), _as_pair, label="pairs")


def write_pairs(path: str | Path, pairs: Sequence[Pair]) -> None:
    """Write pairs as JSONL that `load_pairs` reads back. `margin` and `tie` stand only where they are set."""
    with Path(path).open("w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(json.dumps(_as_row(pair), ensure_ascii=False) + "\n")


def _as_row(pair: Pair) -> dict[str, object]:
    row: dict[str, object] = dict(pair.prompt.columns)
    if pair.prompt.content:
        row["prompt"] = pair.prompt.content
    row |= {"chosen": pair.chosen, "rejected": pair.rejected}
    if pair.margin is not None:
        row["margin"] = pair.margin
    if pair.tie:
        row["tie"] = True
    return row


def _as_pair(row: Row) -> Pair:
    columns = row.columns
    for name in ("chosen", "rejected"):
        if name not in columns:
            raise RowError(missing_column(name, columns))
    has_content = columns.get("prompt") is not None
    content: Text = as_content(columns["prompt"], "prompt") if has_content else ""
    chosen, rejected = as_completion(columns["chosen"], "chosen"), as_completion(columns["rejected"], "rejected")
    given = {"chosen": chosen, "rejected": rejected} | ({"prompt": content} if has_content else {})
    texts = [name for name, value in given.items() if isinstance(value, str)]
    if 0 < len(texts) < len(given):
        lists = [name for name in given if name not in texts]
        raise RowError(f"`{texts[0]}` is text but `{lists[0]}` is a list of messages; give all columns in one form")
    tie = _tie(columns.get("tie"))
    if chosen == rejected and not tie:
        raise RowError('`chosen` and `rejected` are the same; remove the row, or mark it with "tie": true')
    others = {name: value for name, value in columns.items() if name not in _PAIR_COLUMNS}
    prompt = Prompt(id=row.where, content=content, columns=others)
    return Pair(prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(columns.get("margin"), tie), tie=tie)


def _tie(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RowError(f"`tie` is {kind_of(value)}; give true or false")


def _margin(value: object, tie: bool) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"`margin` is {kind_of(value)}; give a number, in units of reward, or null")
    if not math.isfinite(value) or value < 0:
        raise RowError(
            f"`margin` is {value}; it must be finite and at least 0 (the better completion stands in `chosen`)"
        )
    if tie and value:
        raise RowError(f"`margin` is {value} but `tie` is true; a tie has no margin")
    return float(value)
