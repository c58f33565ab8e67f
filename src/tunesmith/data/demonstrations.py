"""Demonstrations in TRL's columns: `prompt` and `completion`, a conversation in `messages`, or plain `text`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.batch.targets import LearntSequence
from tunesmith.config.sections import DemonstrationsSection
from tunesmith.core.errors import DataError
from tunesmith.data.prompts import MESSAGES, missing_column, prompt_column
from tunesmith.data.rows import BadRows, Row, RowError, as_completion, as_content, usable
from tunesmith.data.sources import parse_rows
from tunesmith.data.tables import as_rows
from tunesmith.models.tokenizer import PreTrainedTokenizerBase, encode_demonstration
from tunesmith.schema.records import Demonstration, Prompt, Text

DemonstrationLike = Mapping[str, object] | str | Demonstration
"""A demonstration as given in Python: a row, a text of which every token is learnt, or a record."""

TEXT = "text"
"""Column of texts without a prompt."""

_COLUMNS = ("prompt", "completion", MESSAGES, TEXT)


def load_demonstrations(
    source: str | Path | Sequence[DemonstrationLike], bad: BadRows | None = None
) -> list[Demonstration]:
    """The demonstrations of `source`, in its order.

    `source` is anything that `data.sources` reads, a list of rows, texts or records, or a table (`tables.as_rows`). A
    row has `completion` (text, or messages that end with the assistant) with the `prompt` that it answers; or
    `messages`, of which what follows the last turn of the assistant is left out; or `text`. A completion in text
    answers a conversation as the assistant. Other columns are kept in `prompt.columns`. Bad rows and errors as in
    `sources.parse_rows`.
    """
    if isinstance(source, str) and source == "":
        raise DataError(
            "no demonstrations are given; name a file with `prompt` and `completion`, `messages` or `text` in "
            "`demonstrations.source`"
        )
    if not isinstance(source, str | Path):
        rows = as_rows(source, "demonstrations")
        source = [{TEXT: item} if isinstance(item, str) else item for item in rows]
    return parse_rows(source, _as_demonstration, label="demonstrations", bad=bad, records=(Demonstration,))


def encode_demonstrations(
    items: Sequence[Demonstration],
    tokenizer: PreTrainedTokenizerBase,
    section: DemonstrationsSection,
    max_tokens: int,
    bad: BadRows,
) -> list[LearntSequence]:
    """The items as token ids with what is learnt of them, in order.

    Those of more than `max_tokens` tokens are cut if `section.truncate` says so. Else they go to `bad`, as do those
    without a learnt token; see `rows.usable`. Raises ModelError for messages without a chat template.
    """

    def encode(item: Demonstration) -> LearntSequence:
        sequence = encode_demonstration(tokenizer, item, section.loss_on)
        if not sequence.spans:
            raise RowError("nothing is learnt of it: it has no token that follows another", "empty")
        length = len(sequence.ids)
        if length <= max_tokens:
            return sequence
        bound = f"{max_tokens} (`demonstrations.max_tokens`, or the model's context if that is less)"
        limit = f"{length} tokens, the limit is {bound}"
        if section.truncate == "none":
            raise RowError(f"too long: {limit}; shorten the row, or set `demonstrations.truncate: right`", "too long")
        cut = sequence.cut(max_tokens)
        if not cut.spans:
            raise RowError(f"too long: {limit}, and what is learnt begins after it; shorten the prompt", "too long")
        return cut

    return usable(items, encode, bad, "demonstrations")


def _as_demonstration(row: Row) -> Demonstration:
    columns = row.columns
    prompt: Text = ""
    if columns.get("completion") is not None:
        source = prompt_column(columns)
        if source is None:
            raise RowError(f"`completion` without the `prompt` that it answers; name it `{TEXT}`", "missing column")
        prompt, completion = as_content(columns[source], source), as_completion(columns["completion"], "completion")
        if isinstance(prompt, str) and not isinstance(completion, str):
            raise RowError(
                f"`{source}` is text but `completion` is a list of messages; give all columns in one form", "wrong type"
            )
    elif columns.get(MESSAGES) is not None:
        completion = _up_to_the_last_answer(as_content(columns[MESSAGES], MESSAGES))
    elif columns.get(TEXT) is not None:
        completion = as_content(columns[TEXT], TEXT)
        if not isinstance(completion, str):
            raise RowError(f"`{TEXT}` is a list of messages; name the column `{MESSAGES}`", "wrong type")
    else:
        raise RowError(missing_column("completion", columns), "missing column")
    others = {name: value for name, value in columns.items() if name not in _COLUMNS}
    return Demonstration(Prompt(id=row.where, content=prompt, columns=others), completion)


def _up_to_the_last_answer(content: Text) -> Text:
    if isinstance(content, str):
        raise RowError(f"`{MESSAGES}` is text; give a list of messages, or name the column `{TEXT}`", "wrong type")
    answers = [index for index, message in enumerate(content) if message["role"] == "assistant"]
    if not answers:
        raise RowError(f"`{MESSAGES}` has no turn of the assistant, so there is nothing to learn", "empty")
    return as_completion(content[: answers[-1] + 1], MESSAGES)
