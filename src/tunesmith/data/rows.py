"""Checks of single rows, for every format, and the count of bad ones. No row is dropped without being counted."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from tunesmith.core.errors import DataError
from tunesmith.core.log import get_logger
from tunesmith.schema.records import Message, Text

_log = get_logger(__name__)

Kind = Literal[
    "blank line",
    "not parsed",
    "cut off",
    "not UTF-8",
    "bad character",
    "wrong type",
    "missing column",
    "bad value",
    "empty",
    "same completions",
    "repeated id",
    "too long",
    "too short",
    "refused by the chat template",
]
"""Reason why a row cannot be used, by which a tally counts; the error's message has the details."""

_NUM_SHOWN = 10


class RowError(DataError):
    """The reason why one row cannot be used. Readers collect these; the caller sees all of them in one `DataError`."""

    def __init__(self, reason: str, kind: Kind = "bad value") -> None:
        super().__init__(reason)
        self.kind: Kind = kind


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows of a source, rows that were used, and why the others were not, by reason.

    Example: `Tally(num_rows=5, num_used=3, reasons={"blank line": 1, "empty": 1})`.
    """

    num_rows: int
    num_used: int
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def num_dropped(self) -> int:
        """Rows that were not used."""
        return self.num_rows - self.num_used

    def __str__(self) -> str:
        listed = ", ".join(f"{kind} {count}" for kind, count in self.reasons.items())
        return f"{self.num_used} of {self.num_rows} rows used" + (f"; dropped: {listed}" if listed else "")

    def to_json(self) -> dict[str, object]:
        """The figures as JSON types."""
        return {"num_rows": self.num_rows, "num_used": self.num_used, "reasons": dict(self.reasons)}


class BadRows:
    """The bad rows of one source, collected over all stages that look at its rows, from the parser to the tokenizer.

    Strict, as by default, each stage ends with an error that lists them. With `skip` they are dropped and counted.
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip = skip
        self.source = "the list of rows"
        self.num_rows = 0
        self._problems: list[str] = []
        self._kinds: Counter[str] = Counter()

    def opened(self, source: str) -> None:
        """Say what the source is called in messages."""
        self.source = source

    def saw(self, num_rows: int) -> None:
        """Count rows of the source, good or bad. Each is counted once, by the stage that reads it."""
        self.num_rows += num_rows

    def add(self, where: str, error: RowError) -> None:
        """Note that the row at `where` (`pairs.jsonl:7`) cannot be used."""
        self._problems.append(f"{where}: {error}")
        self._kinds[error.kind] += 1

    def check(self) -> None:
        """End a stage. Raises DataError naming and counting the bad rows, unless they are skipped and others are
        left.
        """
        num_bad = len(self._problems)
        if num_bad and (not self.skip or num_bad >= self.num_rows):
            verb, tail = ("row" if num_bad == 1 else "rows"), ""
            if self.skip:
                tail = "; none is left to use"
            raise DataError(
                f"{num_bad} bad {verb} of {self.num_rows} in {self.source}{tail}; correct or remove:\n  {self._shown()}"
                + ("" if self.skip else "\nskip_bad: true drops bad rows and counts them")
            )

    def finish(self) -> Tally:
        """The tally after the last stage; what was dropped is also logged as a warning."""
        kinds = dict(sorted(self._kinds.items(), key=lambda item: (-item[1], item[0])))
        tally = Tally(self.num_rows, self.num_rows - len(self._problems), kinds)
        if self._problems:
            _log.warning("%s: %s\n  %s", self.source, tally, self._shown())
        return tally

    def _shown(self) -> str:
        shown = "\n  ".join(self._problems[:_NUM_SHOWN])
        num_more = len(self._problems) - _NUM_SHOWN
        return shown + (f"\n  and {num_more} more" if num_more > 0 else "")


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
    """Name of a value's type for messages: `text`, `a list`, `a number`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for types, name in ((str, "text"), ((int, float), "a number"), (Mapping, "an object"), ((list, tuple), "a list")):
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"


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


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place (`prompts.jsonl:3`, `prompts[2]`) and its columns."""

    where: str
    columns: Mapping[str, object]


Candidate = tuple[str, Callable[[], Mapping[str, object]]]
