"""Preference rows whose sides hold the whole exchange: where the prompt ends and the two answers begin.

Conversations share their leading messages. Texts of the HH-RLHF kind (Bai et al. 2022, arXiv 2204.05862) write a
dialogue as "\\n\\nHuman: ... \\n\\nAssistant: ...".
"""

import re
from dataclasses import dataclass

from tunesmith.schema.records import Message, Text

_MARK = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, empty where the two sides share nothing, and what each side answers."""

    prompt: Text
    chosen: Text
    rejected: Text


def is_dialogue(text: Text) -> bool:
    """True for a text that begins with a human's turn and has one of an assistant."""
    return isinstance(text, str) and text.startswith("\n\nHuman:") and "\n\nAssistant:" in text


def as_messages(dialogue: str) -> tuple[Message, ...]:
    """The turns of a dialogue as messages, without the white space around each."""
    parts = _MARK.split(dialogue)
    return tuple(
        {"role": _ROLES[name], "content": content.strip()}
        for name, content in zip(parts[1::2], parts[2::2], strict=True)
    )


def split_messages(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Exchange:
    """The leading messages that both have in common, and the messages that follow; each side keeps at least one."""
    common = _num_common(chosen, rejected)
    return Exchange(chosen[:common] or "", chosen[common:], rejected[common:])


def split_text(chosen: str, rejected: str) -> Exchange:
    """Two dialogues as text: the turns in common with the opening of the next one, and what follows it.

    Example: `"\\n\\nHuman: Hi\\n\\nAssistant: Yo"` against `"... No"` has the prompt
    `"\\n\\nHuman: Hi\\n\\nAssistant:"` and the answers `" Yo"` and `" No"`.
    """
    first, second = _turns(chosen), _turns(rejected)
    common = _num_common(first, second)
    length = sum(map(len, first[:common]))
    marks = [_MARK.match(turns[common]) for turns in (first, second)]
    if marks[0] and marks[1] and marks[0].group() == marks[1].group() and common:
        length += marks[0].end()
    return Exchange(chosen[:length], chosen[length:], rejected[length:])


def _turns(dialogue: str) -> list[str]:
    starts = [match.start() for match in _MARK.finditer(dialogue)]
    return [dialogue[start:end] for start, end in zip(starts, [*starts[1:], len(dialogue)], strict=True)]


def _num_common(first: tuple[object, ...] | list[str], second: tuple[object, ...] | list[str]) -> int:
    limit = min(len(first), len(second)) - 1
    return next((i for i in range(limit) if first[i] != second[i]), limit)
