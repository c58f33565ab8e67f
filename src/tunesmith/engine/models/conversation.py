"""Conversations as the text that a chat template writes: a prompt, an answer after it, and where each turn begins.

An answer is the text behind the prompt as an engine sees it: the template's text of the whole conversation, where that
begins with the prompt, else the answer as given (a template whose generation prompt opens `<think>` writes no such
opening into a conversation). It ends with the first special token that the template closes a turn with.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tunesmith.base.core.errors import DataError, ModelError
from tunesmith.base.schema.records import Message, Prompt, Text

_PROBE = "tunesmith-probe"
"""A content that no template changes, to find out what it writes around a content."""

_QUESTIONS: tuple[tuple[Message, ...], ...] = (({"role": "user", "content": "a"},), ())


@dataclass(frozen=True, slots=True)
class TurnText:
    """An answer as text, after the text of its prompt.

    `is_verbatim`: the template writes the answer as it was given, so that it neither trims it nor leaves anything out.
    """

    prompt: str
    answer: str
    is_verbatim: bool = True


@dataclass(frozen=True, slots=True)
class Closing:
    """The text that a template writes after the last answer of a conversation: `text`, of which a turn keeps `kept`, up
    to its first special token `token_id`; None if there is none, or if the template refuses to say (not `is_known`).
    """

    text: str
    kept: str
    token_id: int | None
    is_known: bool = True

    def cut(self, text: str) -> str:
        """`text` without what follows the token that closes its last turn."""
        return text.removesuffix(self.text) + self.kept if text.endswith(self.text) else text


def is_continued(messages: Sequence[Message]) -> bool:
    """True for a prompt that ends in the assistant's turn, which an answer goes on with."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message], *, continues: bool
) -> str:
    """The template's text of a prompt's `messages`, with the opening of the assistant's turn, or with `continues` up to
    the end of the last message's content.

    `prompt` is named in errors. Raises DataError if the template refuses the messages, ModelError without a template.
    """
    if continues:
        return _rendered(tokenizer, prompt, messages, continue_final_message=True)
    return _rendered(tokenizer, prompt, messages, add_generation_prompt=True)


def whole_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: Sequence[Message]) -> str:
    """The template's text of a prompt's messages and an `answer`, with all that it writes behind the last turn."""
    messages = () if isinstance(prompt.content, str) else prompt.content
    return _rendered(tokenizer, prompt, joined(messages, answer, is_continued(messages)))


def turn_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    messages: Sequence[Message],
    answer: Sequence[Message],
    *,
    continues: bool,
) -> TurnText:
    """`answer`, which ends with the assistant, after the prompt's `messages`, whose last it `continues` or not.

    Without messages all of the template's text is the answer. Raises DataError as in `prompt_text`; if the template
    leaves nothing of the answer; or if it writes several messages, or fields other than the content, otherwise than
    behind this prompt.
    """
    before = prompt_text(tokenizer, prompt, messages, continues=continues) if messages else ""
    messages = _as_shown(messages, before, answer) if continues else messages
    closing = closing_of(tokenizer)
    whole = _rendered(tokenizer, prompt, joined(messages, answer, continues))
    content = answer[-1]["content"]
    if not whole.startswith(before):
        if len(answer) > 1 or any(name not in ("role", "content", "name") for name in answer[0]):
            raise DataError(
                "the chat template renders the prompt otherwise when such an answer follows, so that the answer cannot "
                "be told from it; give an answer of one message with `role` and `content`, or change the template"
            )
        around = _around_probe(tokenizer, prompt, messages[:-1] if continues else messages)
        opening = "" if continues else _opening(before, around[0])
        return TurnText(before, _without(opening, content) + _closing_in(tokenizer, around[1]).kept)
    text = closing.cut(whole[len(before) :])
    if content.strip() and not text.removesuffix(closing.kept).strip():
        raise DataError("the chat template leaves nothing of the answer; change the answer or the template")
    return TurnText(before, text, is_verbatim=content in text)


def turns_text(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message], answer: Sequence[Message]
) -> tuple[str, list[range]]:
    """The template's text of a prompt's `messages` and an `answer` of several, and the characters in it of each turn of
    the assistant in the answer.

    A turn begins where the text of a prompt ends, and ends with the token that closes it.

    Raises:
        DataError: the template writes a turn, or the text before it, otherwise once more messages follow.
    """
    closing, continues = closing_of(tokenizer), is_continued(messages)
    if continues:
        messages = _as_shown(messages, prompt_text(tokenizer, prompt, messages, continues=True), answer)
    whole = closing.cut(_rendered(tokenizer, prompt, joined(messages, answer, continues)))
    spans: list[range] = []
    for place, message in enumerate(answer):
        if message["role"] != "assistant":
            continue
        earlier = joined(messages, answer[:place], continues)
        opened = prompt_text(tokenizer, prompt, earlier, continues=continues and not place) if earlier else ""
        ended = closing.cut(_rendered(tokenizer, prompt, joined(messages, answer[: place + 1], continues)))
        where = (len(messages) + place, len(messages) + len(answer))
        if not whole.startswith(opened):
            raise DataError(_unstable("what comes before", *where))
        if not whole.startswith(ended) or len(ended) <= len(opened):
            raise DataError(_unstable("the", *where))
        spans.append(range(len(opened), len(ended)))
    return whole, spans


def _as_shown(messages: Sequence[Message], prompt: str, answer: Sequence[Message]) -> Sequence[Message]:
    """`messages`, whose last one the `answer` continues; without the white space at its end if the `prompt`'s text
    lacks that and the answer begins with its own. If the answer has none, it stands between them, as the answer's.
    """
    content = messages[-1]["content"]
    if answer and not answer[0]["content"][:1].isspace():
        return messages
    shown = content.rstrip()
    is_whole = prompt.endswith(content[len(shown) :])
    return messages if is_whole else (*messages[:-1], {**messages[-1], "content": shown})


def joined(messages: Sequence[Message], answer: Sequence[Message], continues: bool) -> tuple[Message, ...]:
    """The conversation of both. An answer that `continues` the last message is one message with it."""
    if not continues or not answer or answer[0]["role"] != "assistant":
        return (*messages, *answer)
    content = messages[-1]["content"] + answer[0]["content"]
    return (*messages[:-1], {**messages[-1], **answer[0], "content": content}, *answer[1:])


def closing_of(tokenizer: PreTrainedTokenizerBase) -> Closing:
    """The end of a turn as the template writes it; empty without a template, or if it refuses the shortest prompts."""
    return _closing_of(tokenizer, str(tokenizer.chat_template)) if tokenizer.chat_template else Closing("", "", None)


@lru_cache(maxsize=16)
def _closing_of(tokenizer: PreTrainedTokenizerBase, _template: str) -> Closing:
    for question in _QUESTIONS:
        try:
            around = _around_probe(tokenizer, Prompt("probe", question), question)
        except DataError:
            continue
        return _closing_in(tokenizer, around[1])
    return Closing("", "", None, is_known=False)


def _closing_in(tokenizer: PreTrainedTokenizerBase, text: str) -> Closing:
    named = named_tokens(tokenizer)
    found = [
        (not is_special, text.index(token), -len(token), token)
        for token, (_, is_special) in named.items()
        if token in text
    ]
    if not found:
        return Closing(text, text, None)
    _, start, _, token = min(found)
    return Closing(text, text[: start + len(token)], named[token][0])


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, tuple[int, bool]]:
    """The tokens that a template can write by name: (id, whether it is special). Special and added ones, but for the
    unknown, and for added ones that are white space, such as a line break.
    """
    added = {str(token): (index, bool(token.special)) for index, token in tokenizer.added_tokens_decoder.items()}
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    both = {**added, **{str(token): (index, True) for token, index in special}}
    unknown = None if tokenizer.unk_token == tokenizer.eos_token else tokenizer.unk_token
    return {token: found for token, found in both.items() if token != unknown and (found[1] or token.strip())}


def _opening(prompt: str, header: str) -> str:
    """The opening of the assistant's turn in a prompt beyond the `header` of one in a talk, such as `<think>`."""
    return prompt[len(header) :] if prompt.startswith(header) else ""


def _without(opening: str, content: str) -> str:
    """`content` without the `opening` that its prompt ends with."""
    name = opening.strip()
    if not name or not content.lstrip().startswith(name):
        return content
    rest = content.lstrip()[len(name) :]
    return rest[1:] if opening.endswith("\n") and rest.startswith("\n") else rest


def _around_probe(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message]) -> tuple[str, str]:
    """The texts that the template writes before and after the content of an answer to `messages`."""
    text = _rendered(tokenizer, prompt, (*messages, {"role": "assistant", "content": _PROBE}))
    header, found, closing = text.rpartition(_PROBE)
    if not found:
        raise DataError("the chat template does not write what the assistant says; change the template")
    return header, closing


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message], **options: bool) -> str:
    """The template's text for `messages`, with the arguments that the row of `prompt` has for it."""
    if not tokenizer.chat_template:
        raise ModelError(
            f"prompt {prompt.id} is a conversation, but the tokenizer has no chat template; give the prompts as text, "
            "or take an instruction-tuned model"
        )
    arguments: Any = prompt.template_arguments
    template = str(tokenizer.chat_template)  # of several by name, all of them
    unread = next((name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", template)), None)
    if unread is not None:
        raise DataError(
            f"prompt {prompt.id} has `{unread}` for the chat template, which does not read it; remove it from the row, "
            "or take a model whose template has it"
        )
    try:
        chat = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **arguments, **options))  # type: ignore[arg-type]
    except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise DataError(f"the chat template refuses prompt {prompt.id} ({error}); change its messages") from error


def messages_of(content: Text) -> tuple[Message, ...]:
    """A completion as messages: a text is what the assistant says."""
    return ({"role": "assistant", "content": content},) if isinstance(content, str) else content


def _unstable(what: str, turn: int, num_messages: int) -> str:
    return (
        f"the chat template writes {what} turn {turn} of {num_messages} otherwise alone than inside of the "
        "conversation (some templates leave out earlier reasoning), so the assistant's tokens cannot be told apart; "
        "give the turns before the last one as the prompt, of a demonstration learn the last turn alone (loss_on: "
        "last) or everything (loss_on: all), or take another template"
    )
