"""Checks of single values that hold for every format: characters that no tokenizer or file can carry, and names of
types for messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tunesmith.data.tally import RowError


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands in a parsed row where the parser found what JSON does not allow, so that the row's end is still found."""

    reason: str


def check_value(value: object) -> None:
    """Raise RowError if a text anywhere inside `value` holds a lone surrogate or a NUL, which no tokenizer or file can
    carry, or if the parser left a `Refused` there.
    """
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, Refused):
        raise RowError(value.reason, "not parsed")
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[object, object], value).items():
            check_value(key)
            check_value(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[object], value):
            check_value(item)


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise RowError("a text holds a NUL character; remove it", "bad character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RowError(
            f"a text holds a lone surrogate (U+{code:04X}), which is no character; remove it", "bad character"
        ) from error


def checked_columns(value: object, form: str) -> Mapping[str, object]:
    """`value` as the columns of a row. Raises RowError, which says what `form` a row has, if it is no object or holds
    a bad character.
    """
    if not isinstance(value, Mapping):
        if isinstance(value, Refused):
            raise RowError(value.reason, "not parsed")
        raise RowError(f"{kind_of(value)}, not an object; expected {form}", "wrong type")
    columns = cast(Mapping[object, object], value)
    for key in columns:
        if not isinstance(key, str):
            raise RowError(f"column name {key!r} is no text", "wrong type")
    try:
        check_value(columns)
    except RecursionError as error:
        raise RowError("nested too deeply", "not parsed") from error
    return cast(Mapping[str, object], columns)


def kind_of(value: object) -> str:
    """A value's type in a reader's words, for messages: `text`, `a list`, `a number`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for types, name in ((str, "text"), ((int, float), "a number"), (Mapping, "an object"), ((list, tuple), "a list")):
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"
