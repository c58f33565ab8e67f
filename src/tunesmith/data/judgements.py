"""Completions that were judged one by one, in TRL's columns: `prompt`, `completion`, `label`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tunesmith.config.sections import PairsSection
from tunesmith.core.errors import DataError
from tunesmith.data.pairs import as_preference, check_one_form
from tunesmith.data.prompts import MESSAGES, missing_column
from tunesmith.data.rows import BadRows, Row, RowError, as_completion, as_content, kind_of
from tunesmith.data.sources import parse_rows
from tunesmith.schema.records import Judgement, Pair, Prompt, Ranking

JudgementLike = Mapping[str, object] | Judgement | Pair | Ranking
"""Judgements as given in Python: a row, or a record."""

LABEL = "label"

_COLUMNS = ("prompt", "completion", LABEL)
_WORDS = {"true": True, "false": False, "1": True, "0": False}
"""Cells of a CSV file."""


def load_judgements(
    source: str | Path | Sequence[JudgementLike], section: PairsSection | None = None, bad: BadRows | None = None
) -> list[Judgement | Pair | Ranking]:
    """The judgements of `source`, in its order, one record for each row.

    `source` is anything that `data.sources` reads, or a list of rows or of records. A row with `label` holds one
    `completion` of its `prompt`, true if it was wanted; any other is read as `data.pairs` reads it. Rows that cannot be
    used go to `bad`, which may skip them; without it they are an error. Raises DataError that names and counts them.
    """
    bad = bad or BadRows()
    if isinstance(source, str | Path) and not str(source):
        raise DataError(
            "no data are given; name a file with `prompt`, `completion` and `label`, or with pairs, in `pairs.source`"
        )
    if not isinstance(source, str | Path) and all(isinstance(item, Judgement | Pair | Ranking) for item in source):
        bad.opened("the list of judgements")
        bad.saw(len(source))
        return [item for item in source if isinstance(item, Judgement | Pair | Ranking)]
    as_text = (section or PairsSection()).dialogues == "text"
    rows = cast(str | Path | Sequence[object], source)
    return parse_rows(
        rows,
        lambda row: _as_judgement(row) if LABEL in row.columns else as_preference(row, as_text),
        label="judgements",
        bad=bad,
    )


def pairs_of(item: Pair | Ranking) -> list[Pair]:
    """The item as pairs: itself, or every two completions of a ranking."""
    return item.pairs() if isinstance(item, Ranking) else [item]


def judgements_of(item: Judgement | Pair | Ranking) -> list[Judgement]:
    """The item as judgements: of a pair the chosen completion was wanted, the other not. A tie says nothing."""
    if isinstance(item, Judgement):
        return [item]
    return [
        Judgement(pair.prompt, completion, is_wanted)
        for pair in pairs_of(item)
        for completion, is_wanted in ((pair.chosen, True), (pair.rejected, False))
        if not pair.tie
    ]


def _as_judgement(row: Row) -> Judgement:
    columns = row.columns
    if "completion" not in columns:
        raise RowError(missing_column("completion", columns), "missing column")
    source = next((name for name in ("prompt", MESSAGES) if columns.get(name) is not None), None)
    if source is None:
        raise RowError(missing_column("prompt", columns), "missing column")
    prompt, completion = as_content(columns[source], source), as_completion(columns["completion"], "completion")
    check_one_form({source: prompt, "completion": completion})
    others = {name: value for name, value in columns.items() if name not in (*_COLUMNS, source)}
    return Judgement(Prompt(id=row.where, content=prompt, columns=others), completion, _label(columns[LABEL]))


def _label(value: object) -> bool:
    label = _WORDS.get(str(value).strip().lower())
    if label is None:
        found = repr(value) if isinstance(value, str | int) else kind_of(value)
        raise RowError(f"`{LABEL}` is {found}; give true for a wanted completion, or false", "wrong type")
    return label
