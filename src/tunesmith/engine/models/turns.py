"""A conversation of several turns as one sequence of token ids, in which what was sampled stays as it was sampled.

Of later turns only new messages (results of tools, turns of the user) become tokens: the text that the chat template
writes for the whole conversation, less that which it writes up to the end of the sampled turn. Sampled ids are never
rendered again: their text has other tokens, other spaces inside of a call, and other white space than the template's.
A template that leaves out what was there before (earlier reasoning, as a rule) begins another sequence.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models.call_formats import (
    Call,
    MalformedCallError,
    Tool,
    checked_call,
    numbered,
    parse_gemma,
    parse_harmony,
    parse_llama,
    settled,
)
from tunesmith.engine.models.conversation import (
    closing_of,
    is_continued,
    joined,
    named_tokens,
    prompt_text,
    whole_text,
)
from tunesmith.engine.models.tokenizer import continuation, decode_marked, encode_rendered
from tunesmith.engine.models.tool_messages import TemplateTraits, Turn, as_template_takes, traits_of

_PROBE = "tunesmithprobe"
"""A text that no template changes."""

_CALL_ENDS = ((parse_harmony, "<|call|>"), (parse_llama, "<|eom_id|>"), (parse_gemma, "<|tool_response>"))


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled turn: as a `message` for the chat template, and the `calls` of tools in it, in order.

    `malformed`: what is wrong with a call, to be told to the model in a turn of the user; None if nothing is. There are
    no calls then, and the message has what was sampled as its content.
    """

    message: Mapping[str, Any]
    calls: tuple[Call, ...] = ()
    malformed: str | None = None


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampled turn as text: `body`, and `end`, the token that ended it with white space behind; the ids of both.

    `end` is empty for a turn that was cut.
    """

    body: str
    end: str
    body_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    @property
    def behind(self) -> str:
        """The white space that was sampled behind the token that ended the turn."""
        return self.end[len(self.end.rstrip()) :]


@dataclass(frozen=True, slots=True)
class _Texts:
    """The template's texts: for the prompt of a turn, with its answer as the last message, and up to the prompt of the
    `next` turn.
    """

    prompt: str
    answered: str
    next: str


def next_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    messages: Sequence[Turn],
    answer: Turn,
    sampled_ids: Sequence[int],
    new_messages: Sequence[Turn],
    *,
    stop_ids: Collection[int] = (),
) -> tuple[int, ...] | None:
    """The ids to append to `sampled_ids` so that the model answers `new_messages`; None if the template writes what was
    before the new messages otherwise now, so that a new sequence begins with the prompt of the whole conversation.

    They close the turn, as far as what was sampled has not: the token that ends it is there once, followed by what the
    template writes behind it, and it is added to a turn that the length limit or a stop string cut. Then come the new
    messages and the opening of the next turn. A call that the template would only space otherwise is no difference.

    `messages` are all before the answer, those of the prompt included; `prompt` has the arguments of the template.
    `answer` is the message of `parse_answer`. All are rendered as of `as_template_takes`. `stop_ids` are ids that end a
    turn beside the template's, the end-of-sequence token and `call_ends`: what generation stopped at.

    Raises:
        DataError: the template refuses the messages.
        ModelError: there is no chat template.
    """
    conversation = joined(messages, (answer,), is_continued(messages))
    texts = _texts(tokenizer, prompt, messages, conversation, new_messages)
    sampled = _cut(tokenizer, sampled_ids, stop_ids)
    ends = _end_ids(tokenizer, stop_ids)
    if not texts.next.startswith(texts.prompt):
        return None
    traits = traits_of(tokenizer)
    suffix = _where_written(texts, sampled)
    if suffix is None and _keeps_reasoning(traits, texts, sampled):
        suffix = _behind_answered(tokenizer, texts, sampled, ends)
    if suffix is None and not _has_reasoning(traits, texts, sampled):
        suffix = _behind_probe(tokenizer, prompt, conversation, new_messages, texts, sampled, ends)
    return None if suffix is None else _encoded(tokenizer, sampled, suffix)


def reply_ranges(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    conversation: Sequence[Turn],
    new_messages: Sequence[Turn],
    ids: Sequence[int],
) -> tuple[range, ...]:
    """The ranges of `ids`, which `next_turn` gave for the `new_messages` behind the `conversation`, that hold contents
    of these messages and nothing of the template; without white space at their ends.

    A content's place is that of a probe in the same text, so that a template may write it as JSON. There are none if
    the template leaves messages out, and none for an empty content.
    """

    def written(messages: Sequence[Turn]) -> str:
        return prompt_text(tokenizer, prompt, as_template_takes(tokenizer, messages), continues=False)

    probes = [{**message, "content": f"{_PROBE}{place}."} for place, message in enumerate(new_messages)]
    parts = re.split(rf"{_PROBE}\d+\.", written((*conversation, *probes)))
    before, *behind = (_without_spaces(part) for part in parts)
    whole = _without_spaces(written((*conversation, *new_messages)))
    lengths = _lengths(tokenizer, ids)
    first = len(whole) - lengths[-1]
    if len(behind) != len(new_messages) or not whole.startswith(before):
        return ()
    ranges: list[range] = []
    place, last = len(before), len(whole) - len(behind[-1])
    for number, (message, following) in enumerate(zip(new_messages, behind, strict=True), start=1):
        content = _without_spaces(str(message["content"]))
        end = last if number == len(behind) else whole.find(following, place)
        if number < len(behind) and whole.startswith(content + following, place):
            end = place + len(content)
        ranges.append(_within(lengths, place - first, end - first))
        place = end + len(following)
    return tuple(part for part in ranges if part)


def _without_spaces(text: str) -> str:
    """`text` without white space, of which decoders show more or less than was encoded."""
    return "".join(text.split())


def _lengths(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The characters, without white space, of the first 0, 1, 2, ... of `ids`: whole ones, for ids within a character
    are shown as other ones.
    """
    shown = (decode_marked(tokenizer, ids[:num]).rstrip("\ufffd") for num in range(len(ids) + 1))
    return list(accumulate(map(len, map(_without_spaces, shown)), max))


def _within(lengths: Sequence[int], start: int, stop: int) -> range:
    """The ids that lie in the characters `start` to `stop`; the first and the last are more than white space."""
    begins, ends = ((bisect_left(lengths, at), bisect_right(lengths, at) - 1) for at in (start, stop))
    return range(max(begins), min(ends))


def parse_answer(
    tokenizer: PreTrainedTokenizerBase,
    before: str | Sequence[int],
    sampled_ids: Sequence[int],
    tools: Sequence[Tool] = (),
    *,
    stop_ids: Collection[int] = (),
) -> Answer:
    """The turn `sampled_ids` behind the text or ids of the conversation `before`, as a message and calls.

    It is read by the tokenizer's own `response_template` where it has one, else in the format that the chat template
    writes, and in Hermes' for a template that knows no calls. `tools` say which types arguments have, in formats that
    do not. `stop_ids` as in `next_turn`.

    Raises:
        ModelError: there is no chat template.
    """
    traits = traits_of(tokenizer)
    sampled = _cut(tokenizer, sampled_ids, stop_ids)
    prompt = before if isinstance(before, str) else decode_marked(tokenizer, before)
    own = _parsed(traits, prompt, sampled.body, tools)
    # A call that was cut is a whole one to the library, or one without arguments.
    return own if own.malformed else _by_response_template(tokenizer, prompt, sampled, tools) or own


def call_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids with which a turn of this model can end at a call, beside those that end other turns: generation is to stop
    there too.
    """
    if not tokenizer.chat_template:
        return ()
    named = _named(tokenizer)
    parser = traits_of(tokenizer).parser
    return tuple(named[name][0] for known, name in _CALL_ENDS if known is parser and name in named)


class ContentStream:
    """The content of a sampled turn behind the ids `before`, while it is drawn: as far as it can be neither a call nor
    reasoning, whatever follows.

    From where a call may begin, and from the first special token on, text is held back until the turn has ended. So is
    all of it where calls have no beginning of their own (gpt-oss), or where the tokenizer describes its format itself.
    Reasoning is what a message has under `reasoning_content`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> None:
        self._thinking = ""
        self._tokenizer = tokenizer
        self._traits = traits_of(tokenizer)
        self._opening = _opening(self._traits, decode_marked(tokenizer, before))
        closing = closing_of(tokenizer)
        self._closing = closing.text.strip() if closing.token_id is None else ""  # a text that may end the turn
        self._specials = {index for index, is_special in _named(tokenizer).values() if is_special}
        self._text = ""  # with special tokens by their names
        self._special_places: list[int] = []
        self._ids: list[int] = []
        self._num_early = 0  # characters of `_text` that are still to come
        self._start = 0
        self._sent = ""
        # An opening that is part of the content would be missing in a turn whose call is malformed.
        is_unknown = self._opening and self._traits.reasoning_field is None
        self._is_held = bool(is_unknown) or getattr(tokenizer, "response_template", None) is not None

    def push(self, text: str, token_ids: Sequence[int]) -> tuple[str, str]:
        """The content that is settled now, by new tokens and the `text` of them without special tokens; and before it
        the reasoning, which comes with the first piece.
        """
        self._is_held |= bool(text) and not token_ids  # an engine that does not tell tokens may leave out special ones
        self._text, self._num_early = self._text + text[self._num_early :], max(0, self._num_early - len(text))
        for index in () if self._is_held else token_ids:
            if index in self._specials:
                self._note_special(index)
            self._ids.append(index)
        if self._is_held:
            return "", ""
        content, reasoning = self._settled()
        piece, is_first = content[len(self._sent) :], not self._sent
        if piece and is_first and self._traits.reasoning_field == "reasoning_content":
            self._thinking = _thought(reasoning)
        self._sent += piece
        return self._thinking if is_first else "", piece

    def finish(self, text: str, plain: str, answer: Answer | None) -> tuple[Mapping[str, Any], str, str]:
        """The message of the ended turn, and its reasoning and content behind what was given. The last piece is `text`,
        the whole one without special tokens `plain`, and `answer` that of `parse_answer`, None if it failed.

        Reasoning that begins nowhere but is closed in the middle of the text is content: it was given before.
        """
        whole = {"role": "assistant", "content": plain}
        found = [whole if answer is None or answer.malformed is not None else answer.message]
        found += [answer.message] if answer else []
        thinking = {"reasoning_content": self._thinking} if self._thinking else {}
        calls = {"tool_calls": answer.message["tool_calls"]} if answer and answer.message.get("tool_calls") else {}
        content = self._sent if calls else self._text[self._start :] + text[self._num_early :]
        found.append({"role": "assistant", **thinking, "content": content, **calls})
        message = next(one for one in found if self._goes_on(one))
        return message, "" if self._sent else _thinking_in(message), message["content"][len(self._sent) :]

    def _note_special(self, index: int) -> None:
        """Take a special token behind the text before it, some of which may come later (bytes of a character)."""
        before = _text(self._tokenizer, self._ids)
        if before.startswith(self._text):
            self._num_early += len(before) - len(self._text)
            self._text = before
        self._special_places.append(len(self._text))
        self._text += decode_marked(self._tokenizer, (index,))

    def _goes_on(self, message: Mapping[str, Any]) -> bool:
        """True if `message` is one whose beginning was given."""
        is_same = message["content"].startswith(self._sent) and _thinking_in(message) == self._thinking
        return not self._sent or is_same

    def _settled(self) -> tuple[str, str]:
        """The content that is settled, and the reasoning before it."""
        traits, text = self._traits, self._text
        opens, begun = traits.opens.rstrip(), text.lstrip()
        has_field, is_open = traits.reasoning_field is not None, bool(self._opening) or begun.startswith(opens)
        if has_field and not is_open and opens.startswith(begun):
            return "", ""
        reasoning, said = _without_reasoning(traits, text, is_open=True) if is_open else ("", text)
        content = settled(traits.parser, said, [mark for mark in (traits.closes, self._closing) if mark])
        self._start = len(text) - len(said)
        if not has_field:
            content, self._start = text[: self._start] + content, 0
        elif reasoning:
            self._start += len(content) - len(content.lstrip("\n"))
            content = content.lstrip("\n")
        end = next((place for place in self._special_places if place >= self._start), len(text))
        return content[: end - self._start], reasoning


def _thinking_in(message: Mapping[str, Any]) -> str:
    return message.get("reasoning_content") or ""


def _texts(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    messages: Sequence[Turn],
    conversation: Sequence[Turn],
    new_messages: Sequence[Turn],
) -> _Texts:
    before = as_template_takes(tokenizer, messages)
    after = as_template_takes(tokenizer, (*conversation, *new_messages))
    return _Texts(
        prompt_text(tokenizer, prompt, before, continues=is_continued(before)) if before else "",
        whole_text(tokenizer, replace(prompt, content=()), as_template_takes(tokenizer, conversation)),
        prompt_text(tokenizer, prompt, after, continues=False),
    )


def _where_written(texts: _Texts, sampled: _Sampled) -> str | None:
    """The text behind the sampled turn where the template writes it as it was sampled."""
    written = texts.prompt + sampled.body + sampled.end
    if texts.next.startswith(written):
        return texts.next[len(written) :]
    trimmed = texts.prompt + sampled.body.rstrip()
    if not sampled.end and sampled.body.strip() and texts.next.startswith(trimmed):
        return texts.next[len(trimmed) :]  # cut behind white space, which the template takes away
    return None


def _keeps_reasoning(traits: TemplateTraits, texts: _Texts, sampled: _Sampled) -> bool:
    """False if the template leaves sampled reasoning out of the answer even while that is the last message."""
    if not _has_reasoning(traits, texts, sampled):
        return True
    opens, body, written = traits.opens.rstrip(), sampled.body, texts.answered[len(texts.prompt) :]
    reasoning = body.partition(opens)[2] if opens in body else body
    marks = (opens,) if traits.parser is parse_harmony else (opens, traits.closes)
    return (
        all(mark in written for mark in marks if mark in body)
        and reasoning.partition(traits.closes)[0].strip() in written
    )


def _has_reasoning(traits: TemplateTraits, texts: _Texts, sampled: _Sampled) -> bool:
    """True if reasoning was sampled, closed or cut, be it empty."""
    if traits.opens.rstrip() in sampled.body or _opening(traits, texts.prompt):
        return True
    return traits.parser is not parse_harmony and traits.closes in sampled.body


def _behind_answered(
    tokenizer: PreTrainedTokenizerBase, texts: _Texts, sampled: _Sampled, ends: Collection[int]
) -> str | None:
    """The text behind the sampled turn where the template writes the answer the same with and without new messages."""
    kept, token = _kept(tokenizer, texts.answered, ends)
    if not kept.startswith(texts.prompt) or not texts.next.startswith(kept):
        return None
    return _closed(sampled, token, texts.next[len(kept) :])


def _behind_probe(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    conversation: Sequence[Turn],
    new_messages: Sequence[Turn],
    texts: _Texts,
    sampled: _Sampled,
    ends: Collection[int],
) -> str | None:
    """The text behind the sampled turn where the template writes an answer that is the last message otherwise than
    others, and nothing can have been left out (Qwen 3 puts an empty `<think>` before an answer without reasoning).

    It is what follows another answer, which is found in the text.
    """
    try:
        answered, following = _probed(tokenizer, prompt, conversation, new_messages)
    except DataError:
        return None
    kept, token = _kept(tokenizer, answered.rpartition(_PROBE)[2], ends)
    behind = following.rpartition(_PROBE)[2]
    if _PROBE not in answered or _PROBE not in following or not behind.startswith(kept):
        return None
    rest = behind[len(kept) :]
    return _closed(sampled, token, rest) if texts.next.endswith(token + rest) else None


def _probed(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, conversation: Sequence[Turn], new_messages: Sequence[Turn]
) -> tuple[str, str]:
    """The texts of `_texts` behind the prompt, for an answer that ends in the probe."""
    answer = dict(conversation[-1])
    calls = [dict(call) for call in cast(Sequence[Turn], answer.get("tool_calls") or ())]
    if calls:
        calls[-1]["function"] = {**calls[-1]["function"], "arguments": {"probe": _PROBE}}
        answer["tool_calls"] = calls
    else:
        answer["content"] = _PROBE
    texts = _texts(tokenizer, prompt, (), (*conversation[:-1], answer), new_messages)
    return texts.answered, texts.next


def _closed(sampled: _Sampled, token: str, rest: str) -> str:
    """`rest`, which follows the `token` that closes a turn, behind what was sampled."""
    if not sampled.end:
        return token + rest
    if rest.startswith(sampled.end):  # a template that closes no turn itself: the next one begins with that token
        return rest[len(sampled.end) :]
    return rest[len(sampled.behind) :] if rest.startswith(sampled.behind) else rest


def _kept(tokenizer: PreTrainedTokenizerBase, text: str, ends: Collection[int]) -> tuple[str, str]:
    """`text` up to the token that closes its last turn, and that token; up to what closes it, and nothing, if it is no
    token.
    """
    stripped = text.rstrip()
    named = _named(tokenizer)
    found = [name for name, (index, _) in named.items() if index in ends and stripped.endswith(name)]
    if found:
        return stripped, max(found, key=len)
    return text.removesuffix(closing_of(tokenizer).text), ""


def _encoded(tokenizer: PreTrainedTokenizerBase, sampled: _Sampled, suffix: str) -> tuple[int, ...]:
    """The ids of `suffix` behind what was sampled, those of the template's text where it is cut at a named token."""
    if sampled.end_ids:
        return continuation(tokenizer, sampled.end_ids, encode_rendered(tokenizer, sampled.end + suffix), suffix)
    if suffix.startswith(tuple(_named(tokenizer))):
        return encode_rendered(tokenizer, suffix)
    anchor_id, anchor = _anchor(tokenizer)
    before = (*anchor_id, *sampled.body_ids)
    whole = encode_rendered(tokenizer, anchor + sampled.body + sampled.end + suffix)
    return continuation(tokenizer, before, whole, suffix)


def _cut(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_ids: Collection[int]) -> _Sampled:
    """A sampled turn, and the token that ended it."""
    ids, ends = tuple(ids), _end_ids(tokenizer, stop_ids)
    end = len(ids)
    while end and ids[end - 1] not in ends and not decode_marked(tokenizer, ids[end - 1 : end]).strip():
        end -= 1
    if not end or ids[end - 1] not in ends:
        return _cut_at_text(tokenizer, ids)
    body_ids, end_ids = ids[: end - 1], ids[end - 1 :]
    return _Sampled(_text(tokenizer, body_ids), decode_marked(tokenizer, end_ids), body_ids, end_ids)


def _cut_at_text(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> _Sampled:
    """A sampled turn that no token ended. If the template closes with a text that is no token, that can be its end."""
    text, closing = _text(tokenizer, ids), closing_of(tokenizer)
    mark = closing.text.strip() if closing.token_id is None else ""
    if not mark or not text.rstrip().endswith(mark):
        return _Sampled(text, "", ids, ())
    place = text.rindex(mark)
    return _Sampled(text[:place], text[place:], ids, ())


def _named(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, tuple[int, bool]]:
    """As `named_tokens`, which takes a tenth of a second where a vocabulary has thousands of them (Gemma's)."""
    return _named_once(tokenizer, len(tokenizer), str(tokenizer.eos_token), str(tokenizer.bos_token))


@lru_cache(maxsize=16)
def _named_once(tokenizer: PreTrainedTokenizerBase, _size: int, _eos: str, _bos: str) -> Mapping[str, tuple[int, bool]]:
    return named_tokens(tokenizer)


def _end_ids(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> frozenset[int]:
    own = (closing_of(tokenizer).token_id, tokenizer.eos_token_id)
    return frozenset((*stop_ids, *call_ends(tokenizer), *(index for index in own if isinstance(index, int))))


def _anchor(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], str]:
    """A special token, behind which a tokenizer writes text as in the middle of one; none if there is none."""
    index = next((index for index, is_special in _named(tokenizer).values() if is_special), None)
    return ((), "") if index is None else ((index,), decode_marked(tokenizer, (index,)))


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of sampled ids, with a space at its beginning, which some decoders drop from that of a text."""
    anchor_id, anchor = _anchor(tokenizer)
    return decode_marked(tokenizer, (*anchor_id, *ids)).removeprefix(anchor)


def _parsed(traits: TemplateTraits, prompt: str, text: str, tools: Sequence[Tool]) -> Answer:
    opening = _opening(traits, prompt)
    reasoning, said = _without_reasoning(traits, text, is_open=bool(opening))
    parsed = traits.parser(said, tools)
    thinking = parsed.thinking or _thought(reasoning)
    is_written = traits.reads_calls and (traits.takes_several_calls or len(parsed.calls) < 2)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content if is_written else said}
    if traits.parser is parse_harmony:
        # One call ends a turn there. The template writes no content beside it, and refuses it beside the thinking.
        message["content"] = "" if parsed.calls else parsed.content
    if traits.reasoning_field is None:
        whole = text.removesuffix(said)
        message["content"] = opening + whole + message["content"]
    else:
        message["content"] = message["content"].lstrip("\n") if reasoning else message["content"]
        message |= {traits.reasoning_field: thinking} if thinking else {}
    if parsed.calls and is_written:
        message["tool_calls"] = _tool_calls(parsed.calls)
    return Answer(message, parsed.calls, parsed.malformed)


def _opening(traits: TemplateTraits, prompt: str) -> str:
    """The end of a prompt that opens the reasoning: `<think>` and white space; empty if it does not."""
    if traits.parser is parse_harmony or not prompt.rstrip().endswith(traits.opens.rstrip()):
        return ""
    return prompt[prompt.rindex(traits.opens.rstrip()) :]


def _without_reasoning(traits: TemplateTraits, text: str, *, is_open: bool) -> tuple[str, str]:
    """The reasoning that a turn begins with, and the rest. Reasoning that was cut has no rest."""
    opens = traits.opens.rstrip()
    rest = text
    if traits.parser is parse_harmony:  # whose parser has all channels
        return "", text
    if text.lstrip().startswith(opens):
        rest, is_open = text.lstrip()[len(opens) :], True
    if not is_open and traits.closes not in text:
        return "", text
    reasoning, _, said = rest.partition(traits.closes)
    return reasoning, said


def _thought(reasoning: str) -> str:
    return reasoning.removeprefix("\n").removesuffix("\n")


def _tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as the field `tool_calls` of a message."""
    return [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
    ]


def _by_response_template(
    tokenizer: PreTrainedTokenizerBase, prompt: str, sampled: _Sampled, tools: Sequence[Tool]
) -> Answer | None:
    """The turn as the tokenizer's own description of its format reads it; None if there is none, or if it fails."""
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        parsed: Any = tokenizer.parse_response(sampled.body + sampled.end, prefix=prompt, tools=[*tools] or None)  # type: ignore[arg-type]
        given = [call["function"] for call in parsed.get("tool_calls") or ()]
        calls = numbered([checked_call(function) for function in given])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, MalformedCallError):
        return None
    message = {**parsed, "role": "assistant", "content": parsed.get("content") or ""}
    message |= {"tool_calls": _tool_calls(calls)} if calls else {}
    return Answer(message, calls)
