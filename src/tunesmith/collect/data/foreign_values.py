"""Shared parts of the readers of foreign formats: the table's entry, answers that other rows need, checked values."""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from tunesmith.base.runs.listing import number as finite_number
from tunesmith.base.schema.records import Message, Text
from tunesmith.collect.data.rows import Row, RowError, as_content, kind_of, number_shown
from tunesmith.collect.data.vote_values import mapping_of, rater_of, time_of
from tunesmith.collect.store.content import MAX_NAME, encode_json
from tunesmith.collect.store.records import (
    EDITED,
    MODEL_SOURCE,
    Candidate,
    Given,
    GivenFeedback,
    GivenVote,
    NewItem,
    PreferenceName,
)

Facts = Mapping[str, object]

PROMPT_FIELDS = ("system", "prompt", "instruction", "input", "question", "context", "chat")
"""Names of fields that hold a prompt, where the names of the others are free."""


@dataclass(slots=True)
class Found:
    """Facts that other rows need: answers by their id, on disk, so that memory does not grow with them; and for
    Argilla's records the questions with their places. What a warning counts: columns without a place, open responses,
    and rows whose answers are the same or are no check.
    """

    question: str | None = None
    questions: dict[str, str] = field(default_factory=dict[str, str])
    unknown: dict[str, None] = field(default_factory=dict[str, None])
    num_open: int = 0
    num_same: int = 0
    _kept: sqlite3.Connection = field(default_factory=lambda: sqlite3.connect(""))  # a file without a name

    def __post_init__(self) -> None:
        self._kept.execute("CREATE TABLE kept (id TEXT PRIMARY KEY, facts TEXT) WITHOUT ROWID")

    def keep(self, id_: str, facts: object) -> None:
        """Remember `facts` under an id."""
        self._kept.execute("REPLACE INTO kept VALUES (?, ?)", (id_, json.dumps(facts)))

    def get(self, id_: str) -> Facts | None:
        """The facts that were kept under an id."""
        row = self._kept.execute("SELECT facts FROM kept WHERE id = ?", (id_,)).fetchone()
        return None if row is None else json.loads(row[0])


@dataclass(frozen=True, slots=True)
class Format:
    """A format: `looks_like` tells its rows, `read` makes votes and feedback of one, and `scan`, which sees all rows
    before that, keeps what others need. `items` makes what raters are asked instead of votes, with True only what has a
    known best answer; without it those are the items of the votes.
    """

    name: str
    title: str
    looks_like: Callable[[Facts], bool]
    read: Callable[[Row, Found], Iterable[Given]]
    scan: Callable[[Row, Found], None] | None = None
    items: Callable[[Row, Found, bool], Iterable[NewItem]] | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of a tool to a prompt, and who said when what of it."""

    tool: str
    id: str
    prompt: tuple[Message, ...]
    answer: str
    rater: str
    model: str = ""
    at: float | None = None

    def label(self, id_: str, value: bool | float, metric: str = "thumbs", reason: str = "") -> GivenFeedback:
        """A thumb, or a number; with a reason, shortened to what a tag can hold."""
        tags = {"reason": reason[:MAX_NAME]} if reason else {}
        return self._feedback(id_, metric, value, tags)

    def comments(self, id_: str, text: str) -> list[GivenFeedback]:
        """A comment, none without a text."""
        return [self._feedback(f"{id_} comment", "comment", text)] if text.strip() else []

    def corrected(self, id_: str, text: str) -> list[Given]:
        """A demonstration, and the vote that it is better than the answer, unless it is the same."""
        given: list[Given] = [self._feedback(f"{id_} demonstration", "demonstration", text)]
        if text != self.answer:
            sides = (Candidate(text, source_id=EDITED), candidate(self.answer, self.model, self.tool))
            given.append(GivenVote(NewItem(self.prompt, sides), "better", 0, self.rater, self.at))
        return given

    def _feedback(
        self, id_: str, metric: str, value: bool | float | str, tags: Mapping[str, str] | None = None
    ) -> GivenFeedback:
        return GivenFeedback(
            id=id_,
            application=self.tool,
            answer_id=self.id,
            prompt=self.prompt,
            answer=self.answer,
            metric=metric,
            value=value,
            rater=self.rater,
            model=self.model,
            tags=tags or {},
            created_at=self.at,
        )


def candidate(text: str, model: str, tool: str) -> Candidate:
    """An answer whose source is its model, else the tool."""
    return Candidate(text, source_id=(f"{MODEL_SOURCE}{model}" if model else tool)[:MAX_NAME])


def rater_at(tool: str, user: object) -> str:
    """The name of a tool's user, which is no login of ours."""
    name = rater_of(user)
    return f"{tool}:{name}"[:MAX_NAME]


def id_of(row: Facts, *names: str) -> str:
    """The first of the ids that a row has; without one its content, which is the same at every import."""
    given = next((row[name] for name in names if isinstance(row.get(name), str | int)), None)
    return hashlib.sha256(encode_json(row).encode()).hexdigest() if given is None else str(given)


def moment(value: object, name: str) -> float | None:
    """Seconds since the epoch; a time without a zone is UTC, as servers write it."""
    if isinstance(value, Mapping):
        value = cast(Facts, value).get("$date")  # of MongoDB
    is_bare = isinstance(value, str) and ":" in value and not value.endswith("Z") and "+" not in value
    return time_of(f"{value}Z" if is_bare else value, name)


def loaded(value: object) -> object:
    """The value that a text holds as JSON; a text that is none stays."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def objects(value: object, name: str) -> list[Facts]:
    """A list of objects, also as JSON in a text; empty where there is none."""
    given = loaded(value)
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise RowError(f"`{name}` is {kind_of(given)}; give a list", "wrong type")
    return [mapping_of(one, name) for one in cast(Sequence[object], given)]


def _parts(value: object, name: str) -> object:
    """The text of a content that is a list of parts; any other content as it is."""
    if not isinstance(value, list | tuple):
        return value
    texts: list[str] = []
    for part in cast(Sequence[object], value):
        facts = mapping_of(part, name)
        kind, text = facts.get("type", "text"), facts.get("text", facts.get("value"))
        if isinstance(text, Mapping):
            text = cast(Facts, text).get("value")
        if kind == "think":
            continue
        if not isinstance(text, str):
            raise RowError(f"`{name}` has a part of the kind {kind!r}; only texts can be judged", "wrong type")
        texts.append(text)
    return "\n".join(texts)


_ASKED = ("messages", "input", "inputs", "prompt", "question", "query", "request")
_ANSWERED = ("choices", "message", "content", "text", "output", "outputs", "answer", "response", "generated_text")


def prompt_of(value: object, name: str) -> tuple[Message, ...]:
    """A conversation: messages, an object or a text of JSON that has them, or a text, which a user said."""
    given = loaded(value)
    if isinstance(given, Mapping):
        facts = cast(Facts, given)
        key = next((key for key in _ASKED if facts.get(key) is not None), None)
        if key is None:
            raise RowError(f"`{name}` has no messages; it has {', '.join(facts) or 'nothing'}", "missing column")
        system = facts.get("system")
        begin = ({"role": "system", "content": system},) if isinstance(system, str) and system else ()
        return (*begin, *prompt_of(facts[key], f"{name}.{key}"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | tuple):
        raise RowError(f"`{name}` is {kind_of(given)}; give messages, or a text", "wrong type")
    messages = [_message(one, name) for one in cast(Sequence[object], given)]
    return cast(tuple[Message, ...], as_content(messages, name))


def _message(given: object, name: str) -> Facts:
    facts = mapping_of(given, name)
    if facts.get("tool_calls") or facts.get("function_call") or facts.get("role") == "tool":
        raise RowError(f"`{name}` has calls of tools, which cannot be put to raters; cut the conversation before them")
    return {"role": facts.get("role"), "content": _parts(facts.get("content"), f"{name}.content")}


def answer_of(value: object, name: str) -> str:
    """An answer: a text, the last message, or an object or a text of JSON that has one of them."""
    given = loaded(value)
    if isinstance(given, list | tuple) and given:
        items = cast(Sequence[object], given)
        last = mapping_of(items[-1], name)
        given = last if "role" in last or "message" in last else _parts(items, name)
    if isinstance(given, Mapping):
        facts = cast(Facts, given)
        if facts.get("role", "assistant") != "assistant":
            raise RowError(f"`{name}` ends with role {facts['role']!r}; an answer is the assistant's")
        if facts.get("tool_calls"):
            raise RowError(f"`{name}` has calls of tools, which cannot be put to raters")
        key = next((key for key in _ANSWERED if facts.get(key) is not None), None)
        if key is not None:
            return answer_of(facts[key], f"{name}.{key}")
        given = value  # a text that is itself JSON
    if not isinstance(given, str):
        raise RowError(f"`{name}` is {kind_of(given)}; give the text of an answer", "wrong type")
    if not given.strip():
        raise RowError(f"`{name}` is empty", "empty")
    return given


def number_of(value: object, name: str) -> bool | float:
    """A thumb or a finite number, also as a text, as in CSV."""
    words = {"true": True, "false": False, "yes": True, "no": False, "up": True, "down": False}
    if isinstance(value, str):
        word = value.strip().lower()
        if word in words:
            return words[word]
        try:
            value = float(word)
        except ValueError:
            raise RowError(f"`{name}` is {value[:40]!r}; give true, false or a number") from None
    if not isinstance(value, bool) and finite_number(value) is None:
        raise RowError(f"`{name}` is {number_shown(value)}; give true, false or a finite number", "wrong type")
    return cast(bool | float, value)


def compared(
    tool: str,
    prompt: Text,
    answers: Sequence[tuple[str, str]],
    verdict: tuple[PreferenceName, int],
    rater: str,
    at: float | None = None,
    *,
    reason: str = "",
    left: int | None = None,
) -> GivenVote:
    """A vote between two `answers`, each a text and its model; `verdict` has the index of the better one."""
    if answers[0][0] == answers[1][0]:
        raise RowError("the two answers are the same; nobody could tell them apart", "same completions")
    item = NewItem(prompt, tuple(candidate(text, model, tool) for text, model in answers))
    return GivenVote(item, verdict[0], verdict[1], rater, at, reason=reason, left=left)


def last_turns(
    sides: Sequence[tuple[Message, ...]],
) -> tuple[tuple[Message, ...], tuple[str, str]]:
    """The prompt that two conversations share, and the answers with which they end."""
    first, second = sides
    for side in sides:
        if len(side) < 2 or side[-1]["role"] != "assistant":
            raise RowError("a conversation does not end with an answer", "empty")
        if not side[-1]["content"].strip():
            raise RowError("an answer is empty", "empty")
    if first[:-1] != second[:-1]:
        raise RowError(
            f"the conversations of {len(first) // 2} turns differ before the last answer; a vote on several turns is "
            "none on a pair of answers"
        )
    return first[:-1], (first[-1]["content"], second[-1]["content"])


def walked(
    get: Callable[[str], Facts | None],
    begin: object,
    parent: str,
    turn: Callable[[Facts], tuple[object, object]],
) -> tuple[Message, ...]:
    """The conversation that ends with the message `begin`, followed from each message to the one before."""
    turns: list[Facts] = []
    seen: set[object] = set()
    while isinstance(begin, str) and (node := get(begin)) is not None:
        if begin in seen:
            raise RowError(f"the message {begin[:60]!r} comes before itself")
        seen.add(begin)
        role, content = turn(node)
        turns.insert(0, {"role": role, "content": content})
        begin = node.get(parent)
    if not turns:
        raise RowError("the answer has no message before it", "empty")
    return prompt_of(turns, "messages")
