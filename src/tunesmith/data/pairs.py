"""Preference rows in TRL's columns: pairs (`prompt`, `chosen`, `rejected`, optionally `margin` and `tie`) and rankings
(`prompt`, `completions`, optionally `ranks` or `scores`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tunesmith.config.sections import PairsSection
from tunesmith.core.errors import DataError
from tunesmith.data.content import as_completion, as_content
from tunesmith.data.dialogues import Exchange, as_messages, is_dialogue, split_messages, split_text
from tunesmith.data.prompts import MESSAGES, missing_column
from tunesmith.data.rankings import COMPLETIONS, as_ranking, check_one_form
from tunesmith.data.rows import Row, parse_rows
from tunesmith.data.tally import BadRows, RowError
from tunesmith.data.values import kind_of
from tunesmith.schema.records import Pair, Prompt, Ranking, Text

PreferenceLike = Mapping[str, object] | Pair | Ranking
"""Preferences as given in Python: a row, or a record."""

_PAIR_COLUMNS = ("prompt", "chosen", "rejected", "margin", "tie")


def load_preferences(
    source: str | Path | Sequence[PreferenceLike], section: PairsSection | None = None, bad: BadRows | None = None
) -> list[Pair | Ranking]:
    """The pairs and rankings of `source`, in its order, one for each row.

    `source` is anything that `data.sources` reads, or a list of rows or of records. Text or conversational, the same in
    all columns of a row. A row with `completions` is a ranking, any other a pair. Without a `prompt` column `chosen`
    and `rejected` hold the whole exchange: the messages that they have in common become the prompt, HH-RLHF dialogues
    are taken apart (`section.dialogues`), and other texts have no prompt. Columns that mean nothing here are kept in
    `prompt.columns`. Rows that cannot be used go to `bad`, which may skip them; without it they are an error. Raises
    DataError that names and counts them: a missing column, a wrong type, an empty completion, a margin below 0, or
    equal completions without `tie`. Lengths in tokens are checked by `collate.encode_preferences`.
    """
    bad = bad or BadRows()
    if isinstance(source, str | Path) and not str(source):
        raise DataError("no pairs are given; name a JSONL file with `chosen` and `rejected` columns in `pairs.source`")
    if not isinstance(source, str | Path) and source and all(isinstance(item, Pair | Ranking) for item in source):
        bad.opened("the list of pairs")
        bad.saw(len(source))
        return [item for item in source if isinstance(item, Pair | Ranking)]
    as_text = (section or PairsSection()).dialogues == "text"
    rows = cast(str | Path | Sequence[object], source)
    return parse_rows(rows, lambda row: as_preference(row, as_text), label="pairs", bad=bad)


def load_pairs(source: str | Path | Sequence[PreferenceLike], section: PairsSection | None = None) -> list[Pair]:
    """What `load_preferences` gives, strictly, with each ranking as every two of its completions."""
    return [
        pair
        for item in load_preferences(source, section)
        for pair in (item.pairs() if isinstance(item, Ranking) else [item])
    ]


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


def as_preference(row: Row, dialogues_as_text: bool) -> Pair | Ranking:
    """The pair or ranking in `row`. Raises RowError for a row that is neither."""
    if COMPLETIONS in row.columns and "chosen" not in row.columns:
        return as_ranking(row)
    return _as_pair(row, dialogues_as_text)


def _as_pair(row: Row, dialogues_as_text: bool) -> Pair:
    columns = row.columns
    for name in ("chosen", "rejected"):
        if name not in columns:
            raise RowError(missing_column(name, columns), "missing column")
    source = next((name for name in ("prompt", MESSAGES) if columns.get(name) is not None), None)
    prompt: Text = as_content(columns[source], source) if source else ""
    chosen, rejected = as_completion(columns["chosen"], "chosen"), as_completion(columns["rejected"], "rejected")
    tie = _tie(columns.get("tie"))
    if chosen == rejected and not tie:
        raise RowError(
            '`chosen` and `rejected` are the same; remove the row, or mark it with "tie": true', "same completions"
        )
    exchange = _exchange(prompt, chosen, rejected, dialogues_as_text)
    check_one_form({"prompt": exchange.prompt, "chosen": exchange.chosen, "rejected": exchange.rejected})
    others = {name: value for name, value in columns.items() if name not in (*_PAIR_COLUMNS, source)}
    return Pair(
        Prompt(id=row.where, content=exchange.prompt, columns=others),
        exchange.chosen,
        exchange.rejected,
        margin=_margin(columns.get("margin"), tie),
        tie=tie,
    )


def _exchange(prompt: Text, chosen: Text, rejected: Text, dialogues_as_text: bool) -> Exchange:
    """The prompt and the two answers, where the sides hold the whole exchange; else as they are."""
    exchange = Exchange(prompt, chosen, rejected)
    if isinstance(chosen, tuple) and isinstance(rejected, tuple):
        shared = split_messages(chosen, rejected)
        # Some data sets hold the last question as text in `prompt` beside whole conversations.
        last = shared.prompt[-1] if isinstance(shared.prompt, tuple) else None
        repeats_prompt = last is not None and last["content"] == prompt
        exchange = shared if not prompt or repeats_prompt else exchange
    elif not prompt and is_dialogue(chosen) and is_dialogue(rejected):
        texts = str(chosen), str(rejected)
        exchange = split_text(*texts) if dialogues_as_text else split_messages(*map(as_messages, texts))
        # Checked again: of a dialogue only the answer counts.
        as_completion(exchange.chosen, "chosen")
        as_completion(exchange.rejected, "rejected")
    return exchange


def _tie(value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RowError(f"`tie` is {kind_of(value)}; give true or false", "wrong type")


def _margin(value: object, tie: bool) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"`margin` is {kind_of(value)}; give a number, in units of reward, or null", "wrong type")
    if not math.isfinite(value) or value < 0:
        raise RowError(
            f"`margin` is {value}; it must be finite and at least 0 (the better completion stands in `chosen`)",
            "bad value",
        )
    if tie and value:
        raise RowError(f"`margin` is {value} but `tie` is true; a tie has no margin", "bad value")
    return float(value)
