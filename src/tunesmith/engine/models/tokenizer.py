"""Text and messages to token ids and back. Every id that a model sees comes from here or from a rollout engine.

One rule for everything that is sampled, scored or trained: the ids of a prompt are those that an engine is given, and
the ids of a completion continue them. They are the ids of the whole text where it splits at the end of the prompt, else
(a token would cross that place) those of the completion as a continuation. A completion ends with the token that closes
it, as in a rollout. Back again, the text of a completion is that of prompt and completion less that of the prompt.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Literal, cast

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Demonstration, Message, Prompt, Text
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.models.conversation import (
    closing_of,
    is_continued,
    messages_of,
    named_tokens,
    prompt_text,
    turn_text,
    turns_text,
    whole_text,
)
from tunesmith.engine.models.tool_messages import as_template_takes, with_tools

LossOn = Literal["assistant", "last", "all"]
"""The learnt tokens of a demonstration."""

_ANCHORS = "\n.aAxz0"
"""Texts that a continuation is encoded behind, where its tokenizer encodes the beginning of a text otherwise."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A prompt and a completion as token ids: `prompt_ids` as an engine is given them, then those of the completion up
    to the token that closes it.

    `is_verbatim`: the chat template writes the completion as it was given. `between`: the ranges of `completion_ids`
    that are no turn of the assistant, such as results of tools.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    is_verbatim: bool = True
    between: tuple[range, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Both."""
        return self.prompt_ids + self.completion_ids


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt, to be continued by a completion.

    Token ids of the prompt are kept. Text is encoded as is, with a leading special token only if the tokenizer adds
    one and the text does not begin with it; empty text becomes the begin-of-sequence token. Messages are rendered with
    the generation prompt; if the last message is the assistant's, it is continued.

    Raises:
        DataError: the prompt has no tokens.
        ModelError: there is no chat template.
    """
    ids = _prompt_ids(tokenizer, prompt)
    if not ids:
        raise DataError(
            f"prompt {prompt.id} is empty and the tokenizer has no begin-of-sequence token; give it some text"
        )
    return ids


def encode_completed(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text) -> Completed:
    """Token ids of a prompt, as of `encode_prompt`, and of a completion of it.

    A text completion of a conversational prompt is what the assistant says; it goes on with the prompt's last message,
    if that is the assistant's. Without a prompt the begin-of-sequence token is the prompt.

    Raises:
        DataError: messages follow a text prompt, the chat template refuses them or leaves nothing of the completion, or
            there is neither a prompt nor a begin-of-sequence token.
        ModelError: there is no chat template.
    """
    if isinstance(prompt.content, str):
        prompt_ids, ids = encode_prompt(tokenizer, prompt), _ids_without_template(tokenizer, prompt, completion)
        if not prompt.content and ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + ids
        return Completed(prompt_ids, ids[len(prompt_ids) :])
    prompt, before, answer = _with_tools(tokenizer, prompt, prompt.content, messages_of(completion))
    if len(answer) > 1:
        return _several_turns(tokenizer, prompt, before, answer)
    return _completed(tokenizer, prompt, before, answer, continues=is_continued(before))


def encode_pair_side(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text) -> tuple[int, ...]:
    """Token ids of a prompt and its completion as in `encode_completed`, as one sequence; of a text or conversation
    without a prompt, those of itself. Several messages that a template writes otherwise than behind this prompt are the
    prompt of the last of them.

    Raises:
        DataError: as in `encode_completed`.
        ModelError: there is no chat template.
    """
    if isinstance(prompt.content, str):
        return _ids_without_template(tokenizer, prompt, completion)
    try:
        return encode_completed(tokenizer, prompt, completion).ids
    except DataError:
        if len(messages_of(completion)) == 1:
            raise
        return _last_turn(tokenizer, prompt, prompt.content, messages_of(completion)).ids


def encode_as_others(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text, *, ends_text: bool
) -> tuple[int, ...]:
    """Token ids of a prompt and its completion as other tools give them to a classifier: a conversation with all that
    the chat template writes behind its last turn, and a text with the end-of-sequence token only if `ends_text`.

    Raises:
        DataError: messages follow a text prompt, or the chat template refuses them.
        ModelError: there is no chat template.
    """
    if isinstance(prompt.content, str) and (prompt.content or isinstance(completion, str)):
        ids = encode_pair_side(tokenizer, prompt, completion)
        is_added = ids[-1:] == (tokenizer.eos_token_id,) and not str(completion).endswith(str(tokenizer.eos_token))
        return ids[:-1] if is_added and not ends_text else ids
    before = () if isinstance(prompt.content, str) else prompt.content
    prompt, before, answer = _with_tools(tokenizer, prompt, before, messages_of(completion))
    return encode_rendered(tokenizer, whole_text(tokenizer, replace(prompt, content=before), answer))


def ending_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, tuple[int, ...]]:
    """The special token with which the chat template closes the last turn, if any, and what it writes behind that
    (ChatML: a newline).
    """
    closing = closing_of(tokenizer)
    tail = closing.text if closing.token_id is None else closing.text[len(closing.kept) :]
    return closing.token_id, encode_rendered(tokenizer, tail)


def encode_demonstration(
    tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration, loss_on: LossOn
) -> LearntSequence:
    """Token ids of a prompt and its completion as in `encode_pair_side`, and the learnt tokens.

    `loss_on` is `assistant` (the completion; of messages every assistant turn in it), `last` (the last such turn) or
    `all`. A turn includes the token that closes it. The first token of a sequence has no context and is never learnt.
    Turns of `weight` 0 are not learnt. Tools of the row, calls and results that the chat template does not know are
    said in plain turns (`tool_messages`).

    Raises:
        DataError: the template refuses the messages, or the turns cannot be located in its text; or a turn has weight
            0, but `loss_on` is `all`.
        ModelError: there is no chat template.
    """
    prompt, completion = demonstration.prompt, demonstration.completion
    if isinstance(prompt.content, str) and isinstance(completion, str):
        num_prompt = len(_prompt_ids(tokenizer, prompt)) if prompt.content else 0
        ids = encode_pair_side(tokenizer, prompt, completion)
        return LearntSequence(prompt.id, ids, (range(1 if loss_on == "all" else max(1, num_prompt), len(ids)),))
    before, answer = (() if isinstance(prompt.content, str) else prompt.content), messages_of(completion)
    has_weight = [message.get("weight") != 0 for message in answer if message["role"] == "assistant"]
    answer = tuple({name: field for name, field in message.items() if name != "weight"} for message in answer)
    prompt, before, answer = _with_tools(tokenizer, prompt, before, answer)
    if loss_on == "assistant" and len(has_weight) > 1:
        text, spans = turns_text(tokenizer, prompt, before, answer)
        ids, learnt = _encode_parts(tokenizer, text, spans)
        learnt = [span for span, is_learnt in zip(learnt, has_weight, strict=True) if is_learnt]
    else:
        found = _last_turn(tokenizer, prompt, before, answer)
        ids, learnt = found.ids, [range(len(found.prompt_ids), len(found.ids))] * has_weight[-1]
    if loss_on == "all":
        if not all(has_weight):
            raise DataError("a message has weight 0, but loss_on is all; learn the assistant (loss_on: assistant)")
        learnt = [range(len(ids))]
    spans = [range(max(1, span.start), span.stop) for span in learnt]
    return LearntSequence(prompt.id, ids, tuple(span for span in spans if span))


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, without special tokens and with all spaces as sampled.

    Of ids that follow others, use `decode_after`: a tokenizer writes the beginning of a text otherwise.
    """
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def decode_marked(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids` with special tokens."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def skipped_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The special tokens, which `decode` leaves out, as texts."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset((*map(str, tokenizer.all_special_tokens), *added))


def decode_after(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text of `token_ids` behind the ids `before`: that of both less that of `before`."""
    return text_after(decode(tokenizer, before), decode(tokenizer, [*before, *token_ids]))


def text_after(before: str, whole: str) -> str:
    """The rest of `whole` behind `before`, or behind what they have in common if ids of `before` ended within a
    character.
    """
    if whole.startswith(before):
        return whole[len(before) :]
    return whole[sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(before, whole, strict=False))) :]


def open_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of tokens whose text the tokens after them may change, however many of these there are.

    They stand for one byte each (SentencePiece's byte fallback). Such a decoder takes neighbouring ones together, also
    across tokens that are no text: one that is no UTF-8 changes the text of those before it.
    """

    def known(names: Sequence[str]) -> list[int]:
        pairs = ((tokenizer.convert_tokens_to_ids(name), name) for name in names)
        ids = [(index, name) for index, name in pairs if isinstance(index, int)]
        return [index for index, name in ids if tokenizer.convert_ids_to_tokens(index) == name]

    if not known(["<0x0A>"]):
        return frozenset()
    return frozenset(known([f"<0x{byte:02X}>" for byte in range(256)])) | special_token_ids(tokenizer)


@lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes:
    """The bytes that a token stands for within a text; of a special token, those of its name."""
    name = str(tokenizer.convert_ids_to_tokens(token_id))
    if token_id in special_token_ids(tokenizer):
        return name.encode()
    if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    known = _byte_of_character()
    if _is_byte_level(tokenizer) and all(character in known for character in name):
        return bytes(known[character] for character in name)
    return name.replace("\u2581", " ").encode()


@lru_cache(maxsize=8)
def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and b"ByteLevel" in decoder.__getstate__()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable ones stand for themselves, the others, in order,
    are those from 256 on (GPT-2, Radford et al. 2019).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of tokens that are no text."""
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*added, *tokenizer.all_special_ids))


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sequence ids: of the model's generation config (often several), else the tokenizer's."""
    return configured_stop_ids(getattr(model, "generation_config", None), tokenizer)


def configured_stop_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-sequence ids of a generation config, else the tokenizer's."""
    ids: int | Sequence[int] | None = config.eos_token_id if config else None
    ids = _special_id(tokenizer.eos_token_id) if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(int(index) for index in ids)


def end_token_id(tokenizer: PreTrainedTokenizerBase, *, is_conversational: bool) -> int | None:
    """The token with which a trained completion ends: in a conversation that with which the chat template closes a
    turn, else the end-of-sequence token; None if there is none.
    """
    closing = closing_of(tokenizer).token_id if is_conversational else None
    return _special_id(tokenizer.eos_token_id) if closing is None else closing


def stop_at_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have generation stop at the tokens with which trained completions end, of text and of conversations.

    They join the end-of-sequence ids of the model's generation config, with which the model is exported.
    """
    known = stop_token_ids(model, tokenizer)
    ends = (end_token_id(tokenizer, is_conversational=is_conversational) for is_conversational in (False, True))
    missing = [index for index in dict.fromkeys(ends) if index is not None and index not in known]
    if missing and model.generation_config is not None:
        model.generation_config.eos_token_id = [*known, *missing]


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


def _special_id(token_id: object) -> int | None:
    return token_id if isinstance(token_id, int) else None


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """As `encode_prompt`, empty for an empty text if there is no begin-of-sequence token."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    content = prompt.content
    if not isinstance(content, str):
        if prompt.columns.get("tools") and tokenizer.chat_template:
            prompt = with_tools(tokenizer, prompt)
            content = cast(tuple[Message, ...], prompt.content)
        text = prompt_text(tokenizer, prompt, content, continues=is_continued(content))
        return encode_rendered(tokenizer, text)
    bos_id = _special_id(tokenizer.bos_token_id)
    ids = _encode_text(tokenizer, content) if content else ()
    return ids or (() if bos_id is None else (bos_id,))


def _ids_without_template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text) -> tuple[int, ...]:
    """The ids of a text prompt and its text completion; of a conversation, if there is no prompt."""
    content = prompt.content
    assert isinstance(content, str), "the caller has asked"
    if not isinstance(completion, str):
        if content:
            raise DataError(
                f"prompt {prompt.id} is text but its completion is a list of messages; give both as text or as messages"
            )
        return _last_turn(tokenizer, prompt, (), completion).ids
    whole = _encode_text(tokenizer, content + completion)
    if not content:
        return _ended(tokenizer, whole)
    prompt_ids = _prompt_ids(tokenizer, prompt)
    return _ended(tokenizer, prompt_ids + continuation(tokenizer, prompt_ids, whole, completion))


def _with_tools(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: tuple[Message, ...], answer: tuple[Message, ...]
) -> tuple[Prompt, tuple[Message, ...], tuple[Message, ...]]:
    """Prompt, the messages before an answer, and the answer, as the chat template takes those with tools."""
    has_tools = "tools" in prompt.columns or any(m["role"] == "tool" or "tool_calls" in m for m in (*before, *answer))
    if not has_tools or not tokenizer.chat_template:
        return prompt, before, answer
    if before:
        given = with_tools(tokenizer, replace(prompt, content=before))
        return given, cast(tuple[Message, ...], given.content), as_template_takes(tokenizer, answer)
    given = with_tools(tokenizer, replace(prompt, content=answer))
    return replace(given, content=prompt.content), (), cast(tuple[Message, ...], given.content)


def _last_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: Sequence[Message], answer: Sequence[Message]
) -> Completed:
    """The last turn of the assistant, as the completion of all that is before it."""
    prompt, before, answer = _with_tools(tokenizer, prompt, tuple(before), tuple(answer))
    roles = [message["role"] for message in answer]
    last = len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else 0
    continues = is_continued(before) and not last
    return _completed(tokenizer, prompt, (*before, *answer[:last]), answer[last:], continues=continues)


def _completed(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    messages: Sequence[Message],
    answer: Sequence[Message],
    *,
    continues: bool,
) -> Completed:
    turn = turn_text(tokenizer, prompt, messages, answer, continues=continues)
    prompt_ids = encode_rendered(tokenizer, turn.prompt)
    whole = encode_rendered(tokenizer, turn.prompt + turn.answer)
    ids = prompt_ids + continuation(tokenizer, prompt_ids, whole, turn.answer)
    return Completed(prompt_ids, _closed(tokenizer, ids)[len(prompt_ids) :], turn.is_verbatim)


def _several_turns(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, before: Sequence[Message], answer: Sequence[Message]
) -> Completed:
    """As `_completed`, of an answer of several messages."""
    text, turns = turns_text(tokenizer, prompt, before, answer)
    opened = prompt_text(tokenizer, prompt, before, continues=is_continued(before)) if before else ""
    if not text.startswith(opened):
        raise DataError("the chat template renders the prompt otherwise when such an answer follows; give it otherwise")
    ids, (front, *said) = _encode_parts(tokenizer, text, [range(len(opened), len(opened)), *turns])
    starts, stops = [0, *(part.stop - front.stop for part in said)], [part.start - front.stop for part in said]
    between = tuple(range(start, stop) for start, stop in zip(starts, stops, strict=False) if start < stop)
    return Completed(ids[: front.stop], ids[front.stop :], between=between)


def _encode_parts(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[range]
) -> tuple[tuple[int, ...], list[range]]:
    """The ids of a rendered conversation, in which no token crosses the beginning or end of one of `spans`, ranges of
    its characters; and the same ranges of ids.
    """
    ids: tuple[int, ...] = ()
    learnt: list[range] = []
    place = 0
    for span in spans:
        for end in (span.start, span.stop):
            num_before, whole = len(ids), encode_rendered(tokenizer, text[:end])
            ids += continuation(tokenizer, ids, whole, text[place:end])
            place = end
        learnt.append(range(num_before, len(ids)))
    ids += continuation(tokenizer, ids, encode_rendered(tokenizer, text), text[place:])
    closed = _closed(tokenizer, ids)
    if place == len(text) and len(closed) > len(ids):
        learnt[-1] = range(learnt[-1].start, len(closed))  # with the end-of-sequence token, which no template wrote
    return closed, learnt


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of a text as the tokenizer begins it, without an end-of-sequence token that it appends."""
    ids = encode_marked(tokenizer, text)
    adds_eos = bool(ids) and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token))
    return ids[:-1] if adds_eos else ids


def encode_marked(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of a text with the special tokens that the tokenizer puts around it, but for a token at its beginning or
    end that the text has there already: what a chat template wrote begins with its own begin-of-sequence token.
    """
    ids = tuple(tokenizer(text)["input_ids"])
    first = [str(token) for token in (tokenizer.bos_token, tokenizer.cls_token) if token]
    last = [str(token) for token in (tokenizer.eos_token, tokenizer.sep_token) if token]
    if not text.startswith(tuple(first)) and not text.endswith(tuple(last)):
        return ids
    own = encode_rendered(tokenizer, text)
    start = next((at for at in range(len(ids) - len(own) + 1) if ids[at : at + len(own)] == own), None)
    if start is None:
        return ids
    before, after = ids[:start], ids[start + len(own) :]
    before = () if own[: len(before)] == before else before
    after = () if after and own[-len(after) :] == after else after
    return before + own + after


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of what a chat template wrote, which has its own special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def continuation(
    tokenizer: PreTrainedTokenizerBase, before: tuple[int, ...], whole: tuple[int, ...], text: str
) -> tuple[int, ...]:
    """The ids of `text` behind `before`, of which `whole` are the ids as one text.

    Where a token of `whole` crosses the end of `before`, they are ids of `text` by itself that give the same text
    behind `before`. If there are none (a normalizer changes the text), the ids of `text` as a text of its own.
    """
    if whole[: len(before)] == before:
        return whole[len(before) :]

    expected = decode_marked(tokenizer, whole)
    ways = _by_itself(tokenizer, text)
    own = next(ways)
    return next((ids for ids in (own, *ways) if decode_marked(tokenizer, before + ids) == expected), own)


def _by_itself(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[tuple[int, ...]]:
    """The ids of `text` alone, then behind short texts, as far as these keep their own ids: there the tokenizer does
    not encode it as the beginning of a text, with a space that it puts first.
    """
    yield encode_rendered(tokenizer, text)
    for anchor in _ANCHORS:
        first, both = encode_rendered(tokenizer, anchor), encode_rendered(tokenizer, anchor + text)
        if both[: len(first)] == first:
            yield both[len(first) :]


def _closed(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    """A rendered conversation up to the token that closes its last turn, or with eos if none does."""
    closing, eos_id = closing_of(tokenizer), _special_id(tokenizer.eos_token_id)
    special = {index for index, is_special in named_tokens(tokenizer).values() if is_special}
    if closing.is_known:  # a template that closes with no token leaves an answer open that ends with one of its own
        special = {eos_id} if closing.token_id is None else special | {closing.token_id}
    end = len(ids)
    while end and ids[end - 1] not in special and not decode(tokenizer, ids[end - 1 : end]).strip():
        end -= 1
    return ids[:end] if end and ids[end - 1] in special else _ended(tokenizer, ids)


def _ended(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    eos_id = _special_id(tokenizer.eos_token_id)
    return ids if eos_id is None or ids[-1:] == (eos_id,) else (*ids, eos_id)
