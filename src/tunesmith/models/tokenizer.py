"""Text and messages to token ids and back. Every id that a model sees comes from here or from a rollout engine.

A complete sequence ends with its end-of-sequence token, as in a rollout. Anything that a chat template writes after it
(ChatML: a newline) is dropped, so that a reward model sees the same ids in training and in PPO.

The assistant's turns in a rendered conversation are located without template support: a turn begins where the
template's text for the messages before it (with the generation prompt) ends, and ends where the text for the messages
up to it ends. Both must be prefixes of the whole text, which is checked.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.batch.targets import LearntSequence
from tunesmith.core.errors import DataError, ModelError
from tunesmith.schema.records import Demonstration, Message, Prompt, Text

LossOn = Literal["assistant", "last", "all"]
"""The learnt tokens of a demonstration."""


Render = Callable[[Sequence[Message], bool], str]
"""The template's text for some messages, with the opening of the assistant's next turn if the second argument is true.
"""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt, to be continued by a completion.

    Token ids of the prompt are kept. Text is encoded as is, with a leading special token only if the tokenizer adds
    one; empty text becomes the begin-of-sequence token. Messages are rendered with the generation prompt; if the last
    message is the assistant's, it is continued.

    Raises:
        DataError: the prompt has no tokens.
        ModelError: there is no chat template.
    """
    bos_id = _special_id(tokenizer.bos_token_id)
    ids = _encode_content(tokenizer, prompt)
    if not ids and bos_id is not None:
        ids = (bos_id,)
    if not ids:
        raise DataError(
            f"prompt {prompt.id} is empty and the tokenizer has no begin-of-sequence token; give it some text"
        )
    return ids


def encode_pair_side(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text) -> tuple[int, ...]:
    """Token ids of a prompt and its completion, ending with an end-of-sequence token.

    A text completion of a conversational prompt is the assistant's message. With an empty text prompt the completion
    may be a whole conversation.

    Raises:
        DataError: messages follow a text prompt.
        ModelError: there is no chat template.
    """
    if isinstance(prompt.content, str) and isinstance(completion, str):
        head = _encode_content(tokenizer, prompt)
        tail = tuple(tokenizer(completion, add_special_tokens=not head)["input_ids"])
        return _ended(tokenizer, head + tail)
    if isinstance(prompt.content, str) and prompt.content:
        raise DataError(
            f"prompt {prompt.id} is text but its completion is a list of messages; give both as text or as messages"
        )
    return _closed(tokenizer, _apply_template(tokenizer, prompt, _messages(prompt, completion)))


def encode_demonstration(
    tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration, loss_on: LossOn
) -> LearntSequence:
    """Token ids of a prompt and its completion as in `encode_pair_side`, and the learnt tokens.

    `loss_on` is `assistant` (the completion; of messages every assistant turn in it), `last` (the last such turn) or
    `all`. A turn includes the token that closes it. The first token of a sequence has no context and is never learnt.

    Raises:
        DataError: the template refuses the messages, or the turns cannot be located in its text.
        ModelError: there is no chat template.
    """
    prompt, completion = demonstration.prompt, demonstration.completion
    if isinstance(prompt.content, str) and isinstance(completion, str):
        num_prompt = len(_encode_content(tokenizer, prompt))
        ids = encode_pair_side(tokenizer, prompt, completion)
        return LearntSequence(prompt.id, ids, (range(1 if loss_on == "all" else max(1, num_prompt), len(ids)),))
    messages = _messages(prompt, completion)
    first = 0 if isinstance(prompt.content, str) else len(prompt.content)

    def render(some: Sequence[Message], opens_turn: bool) -> str:
        return str(_templated(tokenizer, prompt, some, tokenize=False, add_generation_prompt=opens_turn))

    found = tokens_of(tokenizer, render(messages, False))
    ids = _closed(tokenizer, found.ids)
    if loss_on == "all":
        return LearntSequence(prompt.id, ids, (range(1, len(ids)),))
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
    characters = assistant_spans(render, messages, turns[-1:] if loss_on == "last" else turns, _closing(tokenizer))
    spans = found.spans(characters)
    if turns[-1:] == [len(messages) - 1] and len(ids) > len(found.ids):
        spans[-1] = range(spans[-1].start, len(ids))  # with the end-of-sequence token, which no template wrote
    return LearntSequence(prompt.id, ids, tuple(span for span in spans if span))


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, without special tokens and with all spaces as sampled."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sequence ids: of the model's generation config (often several), else the tokenizer's."""
    generation_config = getattr(model, "generation_config", None)
    ids = generation_config.eos_token_id if generation_config else None
    ids = _special_id(tokenizer.eos_token_id) if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(int(index) for index in ids)


def same_vocabulary(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """True if both map the same tokens to the same ids, so that their models can share sequences."""
    return first is second or first.get_vocab() == second.get_vocab()


def spare_pad_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A padding token that never ends a sequence, or None if the vocabulary has none.

    The library's classifiers pool the last token that is not padding: with pad equal to eos they pool one too early.
    """
    taken = {_special_id(tokenizer.eos_token_id), _special_id(tokenizer.bos_token_id), None}
    if _special_id(tokenizer.pad_token_id) not in taken:
        return str(tokenizer.pad_token)
    added = tokenizer.added_tokens_decoder
    spare = {index: str(token) for index, token in sorted(added.items()) if token.special and index not in taken}
    for word in ("pad", "endoftext", "unk", "reserved"):
        for text in spare.values():
            if word in text.lower():
                return text
    return None


def _messages(prompt: Prompt, completion: Text) -> tuple[Message, ...]:
    """The whole conversation; a text prompt is empty here."""
    before: tuple[Message, ...] = () if isinstance(prompt.content, str) else prompt.content
    if isinstance(completion, str):
        return (*before, {"role": "assistant", "content": completion})
    return (*before, *completion)


def _special_id(token_id: object) -> int | None:
    return token_id if isinstance(token_id, int) else None


def _encode_content(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    if not isinstance(prompt.content, str):
        return _apply_template(tokenizer, prompt, prompt.content, opens_turn=True)
    ids = tuple(tokenizer(prompt.content)["input_ids"]) if prompt.content else ()
    adds_eos = bool(ids) and ids[-1] == tokenizer.eos_token_id and not prompt.content.endswith(str(tokenizer.eos_token))
    return ids[:-1] if adds_eos else ids


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message], *, opens_turn: bool = False
) -> tuple[int, ...]:
    continues = opens_turn and bool(messages) and messages[-1]["role"] == "assistant"
    ids = _templated(
        tokenizer,
        prompt,
        messages,
        add_generation_prompt=opens_turn and not continues,
        continue_final_message=continues,
        return_dict=False,
    )
    return tuple(ids)  # type: ignore[arg-type]


def _templated(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Message], **options: bool
) -> object:
    """The template's text or ids for `messages`, with the arguments that the row of `prompt` has for it."""
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
        return tokenizer.apply_chat_template([dict(message) for message in messages], **arguments, **options)  # type: ignore[arg-type]
    except (TemplateError, ValueError) as error:
        raise DataError(f"the chat template refuses prompt {prompt.id} ({error}); change its messages") from error


def _closed(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    """A rendered conversation up to the token that closes its last turn, or with eos if none does."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    end = len(ids)
    while end and ids[end - 1] not in special and not decode(tokenizer, ids[end - 1 : end]).strip():
        end -= 1
    return ids[:end] if end and ids[end - 1] in special else _ended(tokenizer, ids)


def _closing(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens, any of which may close a turn."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values())
    return tuple(dict.fromkeys((*map(str, tokenizer.all_special_tokens), *added)))


def _ended(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    eos_id = _special_id(tokenizer.eos_token_id)
    return ids if eos_id is None or ids[-1:] == (eos_id,) else (*ids, eos_id)


def assistant_spans(
    render: Render, messages: Sequence[Message], turns: Sequence[int], closing: Sequence[str]
) -> list[range]:
    """Character ranges in `render(messages, False)` of the assistant's `turns` (indices of messages).

    A range includes the token of `closing` that ends the turn, without white space after it.

    Raises:
        DataError: the template renders a turn, or the text before it, differently once more messages follow.
    """
    whole = render(messages, False)
    spans: list[range] = []
    for turn in turns:
        before = render(messages[:turn], True) if turn else ""
        after = whole if turn + 1 == len(messages) else render(messages[: turn + 1], False)
        if not whole.startswith(before):
            raise DataError(_unstable("what comes before", turn, len(messages)))
        if not whole.startswith(after) or len(after) <= len(before):
            raise DataError(_unstable("the", turn, len(messages)))
        spans.append(range(len(before), _end(after, closing)))
    return spans


def _end(text: str, closing: Sequence[str]) -> int:
    """End of a turn that is last in `text`."""
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tuple(closing)) else len(text)


def _unstable(what: str, turn: int, num_messages: int) -> str:
    return (
        f"the chat template writes {what} turn {turn} of {num_messages} otherwise alone than inside of the "
        "conversation (some templates leave out earlier reasoning), so the assistant's tokens cannot be told apart; "
        "learn the last turn alone (loss_on: last), everything (loss_on: all), or take another template"
    )


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Token ids of a text, and the character range of each: `starts[i]` to `ends[i]`."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def spans(self, characters: Sequence[range]) -> list[range]:
        """For each range of characters, the range of tokens that begin in it.

        A token that begins before the range is left out: in generation no token crosses the start of a turn.
        """
        return [range(self._first_from(span.start), self._first_from(span.stop)) for span in characters]

    def _first_from(self, character: int) -> int:
        # Byte-level tokenizers exclude leading white space from a token's range, so a token begins where the previous
        # one ends. Tokens that share one multi-byte character all begin with it.
        ends = (0, *self.ends)
        begins = (min(start, end) for start, end in zip(self.starts, ends, strict=False))
        return next((index for index, begin in enumerate(begins) if begin >= character), len(self.ids))


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> PlacedTokens:
    """The tokens of a rendered conversation. Raises ModelError for a tokenizer without character offsets."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"{type(tokenizer).__name__} does not say which characters a token was made from; give the model a "
            "tokenizer.json, or the demonstrations as text"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return PlacedTokens(
        tuple(encoded["input_ids"]), tuple(start for start, _ in offsets), tuple(end for _, end in offsets)
    )
