"""Checks of single rows, for every format, and the count of bad ones. No row is dropped without being counted."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar, cast

from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Demonstration, Judgement, Message, Pair, Prompt, Ranking, Text
from tunesmith.engine.models.call_formats import MalformedCallError, checked_call

_log = get_logger(__name__)

Item = Prompt | Pair | Ranking | Judgement | Demonstration
"""A row as a record."""

ItemT = TypeVar("ItemT", bound=Item)
T = TypeVar("T")

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


class BadRows:
    """The bad rows of one source, collected over all stages that look at its rows, from the parser to the tokenizer.

    Strict, as by default, each stage ends with an error that lists them. With `skip` they are dropped and counted.
    `can_skip` is False where there is no key `skip_bad` that an error could name. Messages show the first `num_shown`.
    """

    def __init__(self, *, skip: bool = False, can_skip: bool = True, num_shown: int = 10) -> None:
        self.skip = skip
        self._num_shown = num_shown
        self._num_bad = 0
        self._advice = "\nskip_bad: true (--skip-bad) drops bad rows and counts them" if can_skip and not skip else ""
        self.source = "the list of rows"
        self.num_rows = 0
        self._num_before = 0  # rows of the sources that were opened earlier
        self._problems: list[str] = []
        self._kinds: Counter[str] = Counter()

    def opened(self, source: str, num_rows: int = 0) -> None:
        """Set the name of the source in messages, and the number of its rows as far as it is known."""
        self.source = source
        self._num_before = self.num_rows
        self.num_rows += num_rows

    def opened_all(self, source: str) -> None:
        """Set the name of all sources that were opened together, for the stages that look at the rows of all."""
        self.source = source
        self._num_before = 0

    def add(self, where: str, error: RowError) -> None:
        """Note that the row at `where` (`pairs.jsonl:7`) cannot be used."""
        self._num_bad += 1
        if len(self._problems) < self._num_shown:  # of a file of bad rows the others would fill the memory
            self._problems.append(f"{where}: {error}")
        self._kinds[error.kind] += 1

    def check(self) -> None:
        """End a stage. Raises DataError naming and counting the bad rows, unless they are skipped and others are
        left.
        """
        num_bad = self._num_bad
        if num_bad and (not self.skip or num_bad >= self.num_rows):
            noun = "row" if num_bad == 1 else "rows"
            tail = "; none is left to use" if self.skip else ""
            num_rows = self.num_rows - (0 if self.skip else self._num_before)
            raise DataError(
                f"{num_bad} bad {noun} of {num_rows} in {self.source}{tail}; correct or remove:\n  {self.shown()}"
                + self._advice
            )

    def finish(self) -> Tally:
        """The tally after the last stage; what was dropped is also logged as a warning."""
        kinds = sorted(self._kinds.items(), key=lambda item: (-item[1], item[0]))
        tally = Tally(self.num_rows, self.num_rows - self._num_bad, dict(kinds))
        if self._problems:
            _log.warning("%s: %s\n  %s", self.source, tally, self.shown())
        return tally

    def shown(self) -> str:
        """The first bad rows, one on each line, and how many more there are."""
        shown = "\n  ".join(self._problems)
        num_more = self._num_bad - len(self._problems)
        return shown + (f"\n  and {num_more} more" if num_more > 0 else "")


def place_of(item: Item) -> str:
    """The place that an item was read from (`pairs.jsonl:7`), which is the id of its prompt."""
    return item.id if isinstance(item, Prompt) else item.prompt.id


def usable(items: Sequence[ItemT], encode: Callable[[ItemT], T], bad: BadRows | None, label: str) -> list[T]:
    """`encode(item)` of every item that can be used, in order.

    `encode` raises RowError for one that cannot; any other DataError comes from the chat template. Bad items go to
    `bad`, for its owner to check; without it they are a DataError that names and counts them. `label` names the list.
    """
    found = bad or BadRows()
    if bad is None:
        found.opened(f"the list of {label}", len(items))
    encoded: list[T] = []
    for item in items:
        try:
            encoded.append(encode(item))
        except RowError as error:
            found.add(place_of(item), error)
        except DataError as error:
            found.add(place_of(item), RowError(str(error), "refused by the chat template"))
    if bad is None:
        found.check()
    return encoded


@dataclass(frozen=True, slots=True)
class Refused:
    """Placeholder in a parsed row for what JSON does not allow, so that the parser still finds the end of the row."""

    reason: str


def check_value(value: object) -> None:
    """Raise RowError if a text anywhere inside `value` holds a lone surrogate or a NUL, which no tokenizer or file can
    carry, or if the parser left a `Refused` there.
    """
    if isinstance(value, str):
        if "\x00" in value:
            raise RowError("a text holds a NUL character; remove it", "bad character")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = f"U+{ord(value[error.start]):04X}"
            raise RowError(
                f"a text holds a lone surrogate ({code}), which is no character; remove it", "bad character"
            ) from error
    elif isinstance(value, Refused):
        raise RowError(value.reason, "not parsed")
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[object, object], value).items():
            check_value(key)
            check_value(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[object], value):
            check_value(item)


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


HELDOUT = "heldout"
"""Column that marks a row as held out: it is evaluated on and never trained on."""

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False}


def number_shown(value: object) -> object:
    """A number that is no finite one as messages show it; of anything else, its kind."""
    if isinstance(value, float):
        return value
    return "an integer of too many digits" if type(value) is int else kind_of(value)


def heldout_mark(value: object, name: str = HELDOUT) -> bool:
    """True or false as a file writes it: true, 1, or a text such as "true" or "yes"; false where there is none.

    Raises RowError for anything else: a mark that is not understood would let a row be trained on.
    """
    if value is None:
        return False
    mark = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else None
    if isinstance(value, bool | int | float) and value in (0, 1):
        mark = bool(value)
    if mark is None:
        found = repr(value) if isinstance(value, str | int | float) else kind_of(value)
        raise RowError(
            f"`{name}` is {found[:40]}; give true or false, or another name to a column that means something else",
            "wrong type",
        )
    return mark


def is_heldout(item: Item) -> bool:
    """True for an item whose row is marked as held out."""
    return (item if isinstance(item, Prompt) else item.prompt).columns.get(HELDOUT) is True


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that chat templates know."""

_USERS, _ASSISTANTS = ("human", "prompter"), ("gpt", "bot", "model", "ai")
"""Other names of two roles, in lower case."""


def as_content(value: object, column: str, *, has_weights: bool = False) -> Text:
    """The text itself, or the messages as a tuple. With `has_weights` turns of the assistant may have `weight`: 0 or 1,
    as in OpenAI's format; 1 is left out. Raises RowError if it is neither, or is empty.
    """
    if isinstance(value, str):
        if not value.strip():
            raise RowError(f"`{column}` is empty", "empty")
        return value
    if not isinstance(value, list | tuple):
        raise RowError(f"`{column}` is {kind_of(value)}; give text or a list of messages", "wrong type")
    messages = cast(Sequence[object], value)
    if not messages:
        raise RowError(f"`{column}` is an empty list; give at least one message", "empty")
    return tuple(
        _as_message(message, f"{column}[{index}]", has_weights=has_weights) for index, message in enumerate(messages)
    )


def as_completion(value: object, column: str, *, has_weights: bool = False) -> Text:
    """A completion: text, or messages that end with the assistant, and whose last message says something; `has_weights`
    as of `as_content`.
    """
    content = as_content(value, column, has_weights=has_weights)
    if isinstance(content, str):
        return content
    if content[-1]["role"] != "assistant":
        raise RowError(f"`{column}` ends with role {content[-1]['role']!r}; a completion ends with the assistant")
    if not content[-1]["content"].strip() and not content[-1].get("tool_calls"):
        raise RowError(f"`{column}` is empty: its last message says nothing", "empty")
    return content


def _as_message(value: object, place: str, *, has_weights: bool) -> Message:
    if not isinstance(value, Mapping):
        found = f"`{place}` is {kind_of(value)}"
        raise RowError(f'{found}; a message is {{"role": "user", "content": "..."}}', "wrong type")
    fields = cast(Mapping[str, object], value)
    calls = _tool_calls(fields.get("tool_calls"), place)
    if calls and fields.get("content") is None:
        fields = {**fields, "content": ""}  # as OpenAI's services write a turn of calls alone
    for name in ("role", "content"):
        if not isinstance(fields.get(name), str):
            found = kind_of(fields[name]) if name in fields else "missing"
            hint = ", such as the text of its parts; pictures are not trained on" if found == "a list" else ""
            raise RowError(f"`{place}`: `{name}` is {found}; it must be text{hint}", "wrong type")
    role = _role(str(fields["role"]), place)
    message: dict[str, object] = {}
    for name, item in fields.items():
        if isinstance(item, str):
            message[name] = item
        elif name == "tool_calls" and calls:
            message[name] = calls
        elif name == "tool_calls" and item == []:
            continue
        elif name == "weight" and has_weights and item is not None:
            if role != "assistant" or item not in (0, 1):
                raise RowError(f"`{place}`: `weight` is {item!r}; turns of the assistant have 0 (not learnt) or 1")
            message |= {} if item else {name: 0}
        elif item is not None:  # exports write null for fields that a message does not use
            raise RowError(f"`{place}`: `{name}` is {kind_of(item)}; only text fields are supported", "wrong type")
    return message


def _role(role: str, place: str) -> str:
    """`role`, if it is one. Raises RowError."""
    if role in ROLES:
        return role
    close = difflib.get_close_matches(role, ROLES, n=1)
    guess = close[0] if close else None
    guess = "user" if role.lower() in _USERS else "assistant" if role.lower() in _ASSISTANTS else guess
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise RowError(f"`{place}`: role {role!r} is unknown, allowed are {', '.join(ROLES)}{hint}")


def _tool_calls(value: object, place: str) -> list[dict[str, object]]:
    """The calls of a message, their arguments as objects. Raises RowError for what is no call."""
    calls: list[dict[str, object]] = []
    for index, given in enumerate(cast(Sequence[object], value) if isinstance(value, list | tuple) else ()):
        where = f"`{place}`: `tool_calls[{index}]`"
        fields = cast(Mapping[str, object], given) if isinstance(given, Mapping) else {}
        function = fields.get("function", fields)
        if isinstance(function, Mapping) and function.get("arguments") == "":  # as some write a call without any
            function = {**cast(Mapping[str, object], function), "arguments": {}}
        try:
            name, arguments, _ = checked_call(function)
        except MalformedCallError as error:
            form = '{"function": {"name": "...", "arguments": {...}}}'
            raise RowError(f"{where} is no call ({error}); a call is {form}", "wrong type") from error
        own = {"id": fields["id"]} if isinstance(fields.get("id"), str) else {}
        known = {key: item for key, item in arguments.items() if item is not None}
        calls.append({**own, "type": "function", "function": {"name": name, "arguments": known}})
    return calls


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place (`prompts.jsonl:3`, `prompts[2]`), its columns, and the names of those that are null.

    A column that is null is none: formats with a schema, such as Parquet, give every row all columns of a file.
    """

    where: str
    columns: Mapping[str, object]
    nulls: frozenset[str] = frozenset()

    @classmethod
    def of(cls, where: str, given: Mapping[str, object]) -> "Row":
        """The row with the columns of `given` that are not null; ShareGPT's and Alpaca's columns become TRL's."""
        columns = {name: value for name, value in given.items() if value is not None}
        nulls = frozenset(given.keys() - columns.keys())
        return cls(where, _from_alpaca(_from_sharegpt(columns)), nulls)


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def _from_sharegpt(columns: Mapping[str, object]) -> Mapping[str, object]:
    """`columns` with `conversations` of `from` and `value`, as ShareGPT has them and other trainers read them, as
    `messages`; beside `chosen` and `rejected` they are the `prompt`. A `system` column is their first message.
    """
    turns = columns.get("conversations")
    if not isinstance(turns, list | tuple) or columns.keys() & {"messages", "prompt"}:
        return columns
    others = {name: value for name, value in columns.items() if name not in ("conversations", "system")}
    messages = [_sharegpt_message(turn) for turn in cast(Sequence[object], turns)]
    if "system" in columns:
        messages.insert(0, {"role": "system", "content": columns["system"]})
    sides = {
        name: [_sharegpt_message(others[name])] for name in ("chosen", "rejected") if _is_sharegpt(others.get(name))
    }
    return {**others, **sides, "prompt" if sides else "messages": messages}


def _is_sharegpt(turn: object) -> bool:
    """True for a turn as ShareGPT has it: `{"from": ..., "value": ...}`."""
    return isinstance(turn, Mapping) and {"from", "value"} <= cast(Mapping[str, object], turn).keys()


def _sharegpt_message(turn: object) -> object:
    """The turn as a message. What is no such turn stays as it is, and is refused or taken as a message later."""
    if not _is_sharegpt(turn):
        return turn
    named = cast(Mapping[str, object], turn)
    role = named["from"]
    return {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": named["value"]}


def _from_alpaca(columns: Mapping[str, object]) -> Mapping[str, object]:
    """`columns` with Alpaca's `instruction`, `input`, `output` and `system` as a conversation: `prompt`, and what is
    there of `completion`, `chosen` and `rejected`. The input stands below the instruction, as other trainers have it.
    """
    instruction = columns.get("instruction")
    answers = {"completion": "output", "chosen": "chosen", "rejected": "rejected"}
    given = {name: columns[old] for name, old in answers.items() if isinstance(columns.get(old), str)}
    if (
        not isinstance(instruction, str)
        or not given
        or columns.keys() & {"prompt", "messages", "completion", "history"}
    ):
        return columns
    parts = [part for part in (instruction, columns.get("input")) if isinstance(part, str) and part]
    messages = [{"role": "user", "content": "\n".join(parts)}]
    if isinstance(columns.get("system"), str) and columns["system"]:
        messages.insert(0, {"role": "system", "content": cast(str, columns["system"])})
    used = {"instruction", "input", "system", *answers.values()}
    others = {name: value for name, value in columns.items() if name not in used}
    completions = {name: [{"role": "assistant", "content": text}] for name, text in given.items()}
    return {**others, "prompt": messages, **completions}


def without_prompt(prompt: Text, answers: Mapping[str, Text]) -> tuple[Text, dict[str, Text]]:
    """(The prompt, the answers), where `answers`, by column, may be whole conversations that begin with the prompt.

    The prompt is also recognised behind a system message that it lacks, and as the text of a user's turn. Raises
    RowError where a conversation repeats the prompt in another way: it would be in the model's input twice.
    """
    conversations = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
    if not prompt or not conversations:
        return prompt, dict(answers)
    ends = {name: _end_of_prompt(prompt, answer) for name, answer in conversations.items()}
    wholes = [answer[: ends[name]] for name, answer in conversations.items()]
    if all(wholes) and len(wholes) == len(answers) and all(whole == wholes[0] for whole in wholes):
        rests: dict[str, Text] = {name: answer[ends[name] :] for name, answer in conversations.items()}
        if empty := next((name for name, rest in rests.items() if not rest), None):
            raise RowError(f"`{empty}` is empty: it holds the prompt and no answer", "empty")
        return wholes[0], rests
    if isinstance(prompt, str):
        return prompt, dict(answers)  # which is refused as one of text and messages
    for name, answer in conversations.items():
        if ends[name] or _opens_again(prompt, answer):
            raise RowError(
                f"`{name}` begins with a turn of the {answer[0]['role']} after the prompt, which it seems to repeat; "
                "give the answers alone, or whole conversations without `prompt`"
            )
    return prompt, dict(answers)


def _end_of_prompt(prompt: Text, answer: tuple[Message, ...]) -> int:
    """Number of messages of `answer` up to the end of the prompt that it begins with; 0 if it does not."""
    if isinstance(prompt, str):
        text = prompt.strip()
        same = [i for i, turn in enumerate(answer) if turn["role"] == "user" and turn["content"].strip() == text]
        return same[-1] + 1 if same else 0
    lead = next((i for i, turn in enumerate(answer) if turn["role"] not in ("system", "developer")), 0)
    for start in {0, lead}:
        if answer[start : start + len(prompt)] == prompt:
            return start + len(prompt)
    return 0


def _opens_again(prompt: tuple[Message, ...], answer: tuple[Message, ...]) -> bool:
    """True if `answer` can be no continuation of `prompt`: it begins a conversation."""
    role, last = answer[0]["role"], prompt[-1]["role"]
    is_first = role in ("system", "developer") or answer[0] == prompt[0]
    return is_first or (role == "user" and last == "user")


_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_OWN_OPTIONS = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    }
)
"""Arguments of `apply_chat_template` that a row cannot set."""


def with_template_columns(columns: Mapping[str, object], contents: Iterable[Text]) -> Mapping[str, object]:
    """`columns`, with those that go to the chat template in the form that it takes: `tools` as a list, also of JSON
    text, and `chat_template_kwargs`, neither with nulls inside. `contents` are the texts and messages of the row.

    Raises RowError for what cannot reach the model: pictures and sound; tools of a row without messages; a system
    prompt in a column of its own.
    """
    given = [name for name in ("tools", "chat_template_kwargs", "system", *_MEDIA) if name in columns]
    if not given:
        return columns
    media = next((name for name in _MEDIA if name in columns), None)
    if media is not None:
        raise RowError(
            f"`{media}` is for models that see or hear, which are not trained here; remove the column, or rename it if "
            "it is for a reward function"
        )
    conversations = [content for content in contents if content and not isinstance(content, str)]
    if "system" in given:
        given.remove("system")
        roles = {content[0]["role"] for content in conversations}
        if roles and not roles & {"system", "developer"} and isinstance(columns["system"], str):
            raise RowError("`system` is no column of its own here; make it the first message, or rename it")
    if given and not conversations:
        raise RowError(
            f"`{given[0]}` is for the chat template, which text does not go through; give messages, or rename it"
        )
    return {**columns, **{name: _TEMPLATE_COLUMNS[name](columns[name]) for name in given}}


def _tools(value: object) -> list[object]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(
                f"`tools` is text that is no JSON ({error}); give a list of schemas", "wrong type"
            ) from error
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in cast(list[object], value)):
        raise RowError(f"`tools` is {kind_of(value)}; give a list of schemas, each an object", "wrong type")
    return cast(list[object], _without_nulls(value))


def _template_kwargs(value: object) -> object:
    if not isinstance(value, Mapping):
        raise RowError(f"`chat_template_kwargs` is {kind_of(value)}; give an object of names and values", "wrong type")
    taken = sorted(_OWN_OPTIONS.intersection(cast(Mapping[str, object], value)))
    if taken:
        raise RowError(f"`chat_template_kwargs` sets `{taken[0]}`, which the trainer sets itself; remove it")
    return _without_nulls(value)


_TEMPLATE_COLUMNS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {"tools": _tools, "chat_template_kwargs": _template_kwargs}
)


def _without_nulls(value: object) -> object:
    """`value` without the null fields that a schema of columns fills in."""
    if isinstance(value, Mapping):
        fields = cast(Mapping[object, object], value).items()
        return {key: _without_nulls(item) for key, item in fields if item is not None}
    return (
        [_without_nulls(item) for item in cast(Sequence[object], value)] if isinstance(value, list | tuple) else value
    )


Candidate = tuple[str, Callable[[], Mapping[str, object]]]
