"""Prompts with a text that a teacher reads and the student does not: a hint, a reason, a better answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from tunesmith.base.config.algorithms.distill import PRIVILEGED
from tunesmith.base.config.templates import filled, names_in
from tunesmith.base.schema.records import Prompt, Text, plain_text
from tunesmith.collect.data.rows import BadRows, RowError, as_content, kind_of, usable
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, encode_prompt


@dataclass(frozen=True, slots=True)
class Context:
    """The `column` of a row with the text, and the `template` that puts it together with the prompt and other columns.

    Example: `Context("reason", "({reason}) {prompt}")` makes `(too long) The film` of the prompt `The film` of a row
    with the reason `too long`.
    """

    column: str
    template: str

    def added(self, prompt: Prompt) -> Prompt:
        """What the teacher reads in place of `prompt`: the template with its text, or in its last turn of the user.

        Raises RowError if the row has no text in the column, or in one that the template names.
        """
        columns = dict(prompt.columns)
        texts = {PRIVILEGED: _text(columns, self.column)}
        texts |= {name: _text(columns, name) for name in names_in(self.template) if name not in ("prompt", PRIVILEGED)}
        return replace(prompt, content=with_context(prompt.content, self.template, texts), token_ids=None)

    def usable(
        self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_length: int | None, bad: BadRows
    ) -> list[Prompt]:
        """The `prompts` that have a context with which they have at most `max_length` tokens; others are bad, see
        `rows.usable`.
        """

        def checked(prompt: Prompt) -> Prompt:
            length = len(encode_prompt(tokenizer, self.added(prompt)))
            if max_length is not None and length > max_length:
                raise RowError(
                    f"too long: {length} tokens with `{self.column}`, and the model's context leaves {max_length}; "
                    "shorten it",
                    "too long",
                )
            return prompt

        return usable(prompts, checked, bad, "prompts")


def with_context(content: Text, template: str, texts: dict[str, str]) -> Text:
    """`template` with `texts` and the prompt `content`; of a conversation, in place of what its user said last.

    Raises RowError for a conversation in which the user says nothing.
    """
    if isinstance(content, str):
        return filled(template, {**texts, "prompt": content})
    places = [place for place, message in enumerate(content) if message["role"] == "user"]
    if not places:
        raise RowError("no turn of the conversation is the user's, so there is none to add a context to")
    last = content[places[-1]]
    said = {**last, "content": filled(template, {**texts, "prompt": last["content"]})}
    return (*content[: places[-1]], said, *content[places[-1] + 1 :])


def _text(columns: dict[str, Any], name: str) -> str:
    """The text of a column; of messages their contents, and of a number its digits."""
    value = columns.get(name)
    if value is None:
        listed = ", ".join(f"`{one}`" for one, given in columns.items() if given is not None) or "none"
        raise RowError(f"no column `{name}`, which teachers read; the row's others are {listed}", "missing column")
    if isinstance(value, bool):
        raise RowError(f"`{name}` is {kind_of(value)}; teachers read text", "wrong type")
    if isinstance(value, int | float):
        return str(value)
    return plain_text(as_content(cast(object, value), name))
