"""Demonstrations in TRL's columns: `prompt` and `completion`, a conversation in `messages`, or plain `text`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tunesmith.base.config.sections import DemonstrationsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Demonstration, Text
from tunesmith.collect.data.prompts import MESSAGES, content_of, missing_column, prompt_column, prompt_record
from tunesmith.collect.data.rows import BadRows, Row, RowError, as_completion, as_content, usable, without_prompt
from tunesmith.collect.data.sources import parse_rows
from tunesmith.collect.data.tables import as_rows
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, encode_demonstration

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
    `messages`, of which what follows the last turn of the assistant is left out; or `text`. A turn of `weight` 0 is not
    learnt. A completion in text answers a conversation as the assistant. Other columns are kept in `prompt.columns`.
    Bad rows and errors as in `sources.parse_rows`.
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
    if "completion" in columns:
        source = prompt_column(row)
        if source is None:
            raise RowError(f"`completion` without the `prompt` that it answers; name it `{TEXT}`", "missing column")
        prompt, answers = without_prompt(
            content_of(row, source),
            {"completion": as_completion(columns["completion"], "completion", has_weights=True)},
        )
        completion = answers["completion"]
        if isinstance(prompt, str) and not isinstance(completion, str):
            raise RowError(
                f"`{source}` is text but `completion` is a list of messages; give all columns in one form", "wrong type"
            )
    elif MESSAGES in columns:
        completion = _up_to_the_last_answer(as_content(columns[MESSAGES], MESSAGES, has_weights=True))
        if not _begins_with(columns.get("prompt"), completion):
            raise RowError(
                f"`prompt` is no part of `{MESSAGES}`, which holds whole conversations; remove one of them, or give "
                "the answer alone in `completion`"
            )
    elif TEXT in columns:
        completion = as_content(columns[TEXT], TEXT)
        if not isinstance(completion, str):
            raise RowError(f"`{TEXT}` is a list of messages; name the column `{MESSAGES}`", "wrong type")
    else:
        raise missing_column("completion", row)
    return Demonstration(prompt_record(row, prompt, {"completion": completion}, *_COLUMNS), completion)


def _begins_with(prompt: object, messages: Text) -> bool:
    """True if `messages` begin with the prompt, or if there is none."""
    if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
        return True
    return without_prompt(as_content(prompt, "prompt"), {MESSAGES: messages})[1][MESSAGES] != messages


def _up_to_the_last_answer(content: Text) -> Text:
    if isinstance(content, str):
        raise RowError(f"`{MESSAGES}` is text; give a list of messages, or name the column `{TEXT}`", "wrong type")
    answers = [index for index, message in enumerate(content) if message["role"] == "assistant"]
    if not answers:
        raise RowError(f"`{MESSAGES}` has no turn of the assistant, so there is nothing to learn", "empty")
    return as_completion(content[: answers[-1] + 1], MESSAGES, has_weights=True)
