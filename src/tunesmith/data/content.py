"""Checks that a column is text or a conversation, and turns it into the frozen form of `schema.records`."""

import difflib
from collections.abc import Mapping, Sequence
from typing import cast

from tunesmith.data.tally import RowError
from tunesmith.data.values import kind_of
from tunesmith.schema.records import Message, Text

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that chat templates know."""

_OTHER_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}


def as_content(value: object, column: str) -> Text:
    """The text itself, or the messages as a tuple. Raises RowError if it is neither, or is empty."""
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"`{column}` is empty", "empty")
        return value
    if not isinstance(value, list | tuple):
        raise RowError(f"`{column}` is {kind_of(value)}; give text or a list of messages", "wrong type")
    messages = cast(Sequence[object], value)
    if not messages:
        raise RowError(f"`{column}` is an empty list; give at least one message", "empty")
    return tuple(_as_message(message, f"{column}[{index}]") for index, message in enumerate(messages))


def as_completion(value: object, column: str) -> Text:
    """A completion: text, or messages that end with the assistant, and whose last message says something."""
    content = as_content(value, column)
    if isinstance(content, str):
        return content
    if content[-1]["role"] != "assistant":
        raise RowError(f"`{column}` ends with role {content[-1]['role']!r}; a completion ends with the assistant")
    if not content[-1]["content"].strip():
        raise RowError(f"`{column}` is empty: its last message says nothing", "empty")
    return content


def _as_message(value: object, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(
            f'`{place}` is {kind_of(value)}; a message is {{"role": "user", "content": "..."}}', "wrong type"
        )
    fields = cast(Mapping[str, object], value)
    for name in ("role", "content"):
        if not isinstance(fields.get(name), str):
            found = kind_of(fields[name]) if name in fields else "missing"
            raise RowError(f"`{place}`: `{name}` is {found}; it must be text", "wrong type")
    role = str(fields["role"])
    if role not in ROLES:
        close = difflib.get_close_matches(role, ROLES, n=1)
        guess = _OTHER_NAMES.get(role.lower()) or (close[0] if close else None)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise RowError(f"`{place}`: role {role!r} is unknown, allowed are {', '.join(ROLES)}{hint}")
    message: dict[str, str] = {}
    for name, item in fields.items():
        if isinstance(item, str):
            message[name] = item
        elif item is not None:  # exports write null for fields that a message does not use
            raise RowError(f"`{place}`: `{name}` is {kind_of(item)}; only text fields are supported", "wrong type")
    return message
