"""Prompts from a JSONL file, from a Python list, or from the built-in openings of film reviews."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.config.schema import PromptsSection
from tunesmith.core.errors import DataError
from tunesmith.data.content import as_content
from tunesmith.data.films import OPENINGS
from tunesmith.data.rows import Row, RowError, parse_rows
from tunesmith.schema.records import Message, Prompt

PromptLike = str | Sequence[Message] | Mapping[str, object] | Prompt
"""A prompt as given in Python: text, a list of messages, a row with the prompt in its `prompt` column, or a
`Prompt`.
"""

FILMS = "films"
"""Name of the built-in source. A file of that name is reached as `./films`."""

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Names that a reward function receives from the trainer; no column may have them."""


def load_prompts(source: str | Path | Sequence[PromptLike], section: PromptsSection | None = None) -> list[Prompt]:
    """The prompts of `source`, in its order.

    `source` is `films`, the path of a JSONL file (plain or gzipped), or a list of texts, of message lists or of rows.
    The column that `section.text_column` names becomes the content; the other columns are kept for reward functions.
    Ids are `file:line`, `films:n` from 1, or `prompts[index]`. Raises DataError that names and counts the rows that
    cannot be used. Lengths in tokens are checked by `collate.check_prompt_lengths`, prefixes cut by
    `collate.prefix_prompts`.
    """
    column = (section or PromptsSection()).text_column
    if isinstance(source, str) and source == FILMS:
        return [Prompt(id=f"{FILMS}:{number}", content=opening) for number, opening in enumerate(OPENINGS, start=1)]
    if isinstance(source, str | Path):
        if not str(source):
            raise DataError(
                f"no prompts are given; name a JSONL file with a `{column}` column, or `{FILMS}`, the built-in openings"
            )
        return parse_rows(source, lambda row: _as_prompt(row, column))
    if source and all(isinstance(item, Prompt) for item in source):
        return [item for item in source if isinstance(item, Prompt)]
    rows = [item if isinstance(item, Mapping) else {column: item} for item in source]
    return parse_rows(rows, lambda row: _as_prompt(row, column), label="prompts")


def _as_prompt(row: Row, column: str) -> Prompt:
    if column not in row.columns:
        raise RowError(missing_column(column, row.columns))
    reserved = RESERVED_COLUMNS.intersection(row.columns)
    if reserved:
        raise RowError(f"column `{min(reserved)}` has a name that reward functions receive from the trainer; rename it")
    others = {name: value for name, value in row.columns.items() if name != column}
    return Prompt(id=row.where, content=as_content(row.columns[column], column), columns=others)


def missing_column(column: str, columns: Mapping[str, object]) -> str:
    """The message for a row without `column`: what it has instead, and the closest name."""
    close = difflib.get_close_matches(column, list(columns), n=1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    return f"no column `{column}`; the row has {', '.join(f'`{name}`' for name in columns) or 'none'}{hint}"
