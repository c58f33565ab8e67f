"""Prompts from a file, folder or hub id, from a Python list, or built in (`films`, `arithmetic`)."""

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from tunesmith.base.config.sections import PromptsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Message, Prompt, Text
from tunesmith.collect.data.rows import BadRows, Row, RowError, as_content, with_template_columns
from tunesmith.collect.data.sources import parse_rows
from tunesmith.collect.data.tables import as_rows

PromptLike = str | Sequence[Message] | Mapping[str, object] | Prompt
"""A prompt as given in Python: text, a list of messages, a row with the prompt in its `prompt` column, or a
`Prompt`.
"""

FILMS = "films"
"""Name of the built-in source. A file of that name is reached as `./films`."""

ARITHMETIC = "arithmetic"
"""Name of the built-in sums, for rewards that can be verified."""

MESSAGES = "messages"
"""Column of whole conversations, in TRL and in most chat data."""

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Names that a reward function receives from the trainer; no column may have them."""

LIMIT = 50
"""Both numbers lie in [0, LIMIT)."""

SHOTS = "2 + 3 = 5\n14 + 7 = 21\n30 + 12 = 42\n"
"""The solved sums: of one-digit numbers, of one and two digits with a carry, and of two-digit numbers."""

SHOWN = frozenset({(2, 3), (7, 14), (12, 30)})
"""The unordered pairs inside `SHOTS`: their answers can be copied, so they are no prompts."""


def arithmetic_prompts() -> list[Prompt]:
    """Every ordered pair of numbers as a prompt, with columns `answer` (text) and `pair` (`a,b` with a <= b).

    `a + b` and `b + a` have one `pair`: split by it, so that no held-out sum was trained on the other way round.
    """
    return [
        Prompt(
            id=f"arithmetic:{a}+{b}",
            content=f"{SHOTS}{a} + {b} =",
            columns={"answer": str(a + b), "pair": f"{min(a, b)},{max(a, b)}"},
        )
        for a in range(LIMIT)
        for b in range(LIMIT)
        if (min(a, b), max(a, b)) not in SHOWN
    ]


def film_prompts() -> list[Prompt]:
    """The openings of `films.txt` as prompts, in a fixed order: `films:<n>` is the n-th of them, counted from 1."""
    lines = (resources.files("tunesmith.collect.data") / "films.txt").read_text(encoding="utf-8").splitlines()
    openings = [line for line in lines if line and not line.startswith("#")]
    return [Prompt(id=f"{FILMS}:{number}", content=opening) for number, opening in enumerate(openings, start=1)]


def load_prompts(
    source: str | Path | Sequence[PromptLike], section: PromptsSection | None = None, bad: BadRows | None = None
) -> list[Prompt]:
    """The prompts of `source`, in its order.

    `source` is `films` or `arithmetic`, anything that `data.sources` reads, a list of texts, of message lists or of
    rows, or a table (`tables.as_rows`). The column that `section.text_column` names becomes the content; without a
    `prompt` column a conversation in `messages` does, up to its last reply. The other columns are kept for reward
    functions. Ids are `file:line`, `films:n` from 1, or `prompts[index]`. Bad rows and errors as in
    `sources.parse_rows`. Lengths in tokens are checked by `collate.measure_prompts`, prefixes cut by
    `collate.prefix_prompts`.
    """
    column = (section or PromptsSection()).text_column
    if isinstance(source, str) and source == "":
        raise DataError(
            f"no prompts are given; name a JSONL file with a `{column}` column, or `{FILMS}`, the built-in openings"
        )
    if isinstance(source, str) and source in (FILMS, ARITHMETIC):
        prompts = film_prompts() if source == FILMS else arithmetic_prompts()
        if bad is not None:
            bad.opened(str(source), len(prompts))
        return prompts
    if not isinstance(source, str | Path):
        rows = as_rows(source, "prompts")
        source = [item if isinstance(item, Mapping | Prompt) else {column: item} for item in rows]
    return parse_rows(source, lambda row: _as_prompt(row, column), label="prompts", bad=bad, records=(Prompt,))


def _as_prompt(row: Row, column: str) -> Prompt:
    if column not in row.columns and column == "prompt" and MESSAGES in row.columns:
        column = MESSAGES
    content = content_of(row, column)
    reserved = RESERVED_COLUMNS.intersection(row.columns)
    if reserved:
        raise RowError(
            f"column `{min(reserved)}` has a name that reward functions receive from the trainer; rename it",
            "bad value",
        )
    return prompt_record(row, content, {}, column)


def content_of(row: Row, column: str) -> Text:
    """The prompt in `column`; of `messages` without a reply at the end. Raises RowError if there is none."""
    if column not in row.columns:
        raise missing_column(column, row)
    content = as_content(row.columns[column], column)
    return _without_reply(content) if column == MESSAGES else content


def prompt_record(row: Row, content: Text, completions: Mapping[str, Text], *used: str | None) -> Prompt:
    """The prompt of `row`, whose completions are `completions`, with the columns that are not `used`."""
    columns = with_template_columns(row.columns, (content, *completions.values()))
    others = {name: value for name, value in columns.items() if name not in used and name not in completions}
    return Prompt(id=row.where, content=content, columns=others)


def _without_reply(content: Text) -> Text:
    """A conversation without the assistant's turn at its end, which a new completion replaces."""
    if isinstance(content, str) or content[-1]["role"] != "assistant":
        return content
    if len(content) == 1:
        raise RowError(f"`{MESSAGES}` holds one reply and nothing that it answers", "empty")
    return content[:-1]


def prompt_column(row: Row) -> str | None:
    """The column with the prompt of a completion: `prompt`, else `messages`; None if both are missing or null."""
    return next((name for name in ("prompt", MESSAGES) if name in row.columns), None)


def missing_column(column: str, row: Row) -> RowError:
    """The error of a row without `column`: what it has instead, and the closest name."""
    if column in row.nulls:
        return RowError(f"`{column}` is null; the row has {_listed(row)}", "missing column")
    close = difflib.get_close_matches(column, list(row.columns), n=1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    if row.columns.keys() >= {"role", "content"}:
        hint = "; a conversation is a list of messages, so that several are a list of lists"
    return RowError(f"no column `{column}`; the row has {_listed(row)}{hint}", "missing column")


def _listed(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.columns) or "none"
