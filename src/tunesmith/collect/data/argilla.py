"""Argilla's records, one JSON object each: `id`, `fields`, `metadata`, `suggestions`, `responses`, `vectors`.

Written: fields `prompt`, `response_1`, `response_2` and one label question `preference`, with one response for each
rater. Read: also records of others. What comes before the answers is in fields of known names, which together are the
prompt; the answers are the two other text fields. The question that tells the better answer is a label (the name of a
field, `tie` or `both_bad`) or a ranking (the names, best first, or a list of `value` and `rank`).
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Message, Text, plain_text
from tunesmith.collect.data.rows import BadRows, Row, RowError, as_content, heldout_mark, kind_of
from tunesmith.collect.data.sources import parse_rows, source_rows
from tunesmith.collect.data.vote_values import mapping_of, rater_of
from tunesmith.collect.store.records import Candidate, ExportRow, GivenVote, NewItem, PreferenceName

_log = get_logger(__name__)

T = TypeVar("T")

_QUESTION = "preference"
_PROMPT_FIELDS = ("system", "prompt", "instruction", "input", "question", "context", "chat")
_COUNTED = (None, "submitted")
"""Status of a response that its rater has handed in; exports of one's own code may leave it out."""

_RATER_SPACE = uuid.UUID("5f0c9a5e-6c2b-5c1e-9d4b-2b1f6f3f7a10")
"""Argilla knows users by UUID: a name's is made from this one, so that it is the same in every export."""


def is_argilla(source: str | Path) -> bool:
    """True if the first row of a file is a record of Argilla; what is wrong with a row is said by its reader."""
    if not Path(source).expanduser().is_file():
        return False
    for _, read in source_rows(str(source)):
        with suppress(DataError):
            columns = read()
            return isinstance(columns.get("fields"), Mapping) and "responses" in columns
        break
    return False


def argilla_records(rows: Iterable[ExportRow]) -> list[dict[str, Any]]:
    """One record for each prompt with its two answers, with all votes on them, in the order of the first vote."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        chosen = plain_text(row.chosen)
        first, second = sorted((chosen, plain_text(row.rejected)))
        record = records.setdefault(
            (row.prompt_id, first, second),
            {
                "id": str(row.vote_id),
                "fields": {"prompt": plain_content(row.prompt), "response_1": first, "response_2": second},
                "metadata": {"prompt_id": row.prompt_id, "heldout": str(row.heldout).lower()},
                "suggestions": {},
                "responses": {_QUESTION: []},
                "vectors": {},
            },
        )
        better, other = ("response_1", "response_2") if chosen == first else ("response_2", "response_1")
        label = {"much_better": f"{better}_much", "better": better}.get(row.verdict, row.verdict)
        user = str(uuid.uuid5(_RATER_SPACE, row.rater))
        record["responses"][_QUESTION].append({"value": label, "user_id": user})
        record["metadata"][f"rater-{user}"] = row.rater
        if row.chosen_side is not None:
            record["metadata"][f"left-{user}"] = better if row.chosen_side == "left" else other
    return list(records.values())


def plain_content(content: Text) -> object:
    """`content` as JSON has it: text, or a list of messages."""
    return content if isinstance(content, str) else [dict(message) for message in content]


def argilla_items(source: str | Path) -> list[NewItem]:
    """The pairs of a file of records, whatever was said of them. Raises DataError that names bad records."""
    return [record.item for record in _parsed(source, _record)]


def argilla_votes(source: str | Path, question: str | None = None) -> list[GivenVote]:
    """The votes in a file of records, one for each response to `question`; if there is one question, to that.

    Raises DataError that names bad records, and if there are several questions but none is named.
    """
    records = _parsed(source, _record)
    asked = _question(str(source), records, question)
    votes = _parsed(source, lambda row: _record(row).votes(asked))
    num_open = sum(response.status not in _COUNTED for record in records for response in record.of(asked))
    if num_open:
        _log.warning("%s: %d responses left out, because they are drafts or were discarded", source, num_open)
    return [vote for of_record in votes for vote in of_record]


def _parsed(source: str | Path, parse: Callable[[Row], T]) -> list[T]:
    return parse_rows(source, parse, bad=BadRows(can_skip=False))


@dataclass(frozen=True, slots=True)
class _Response:
    """The answer of one user to one question."""

    value: object
    user: object
    status: object


@dataclass(frozen=True, slots=True)
class _Record:
    """A record: its pair, the names of the two answers, the responses to each question, and its metadata."""

    where: str
    item: NewItem
    names: tuple[str, ...]
    responses: Mapping[str, Sequence[_Response]]
    metadata: Mapping[str, object]

    def of(self, question: str) -> Sequence[_Response]:
        """The responses to a question that have a value."""
        return [response for response in self.responses.get(question, ()) if response.value is not None]

    def votes(self, question: str) -> list[GivenVote]:
        """The votes that the submitted responses to `question` are."""
        found: list[GivenVote] = []
        for response in self.of(question):
            if response.status not in _COUNTED:
                continue
            verdict, better = _label(response.value, self.names, question)
            user = rater_of(response.user, "user_id")
            rater = rater_of(self.metadata.get(f"rater-{user}", user), f"metadata.rater-{user}")
            left = self.metadata.get(f"left-{user}")
            if left is not None and left not in self.names:
                raise RowError(f"`metadata.left-{user}` names no answer; give {' or '.join(self.names)}")
            place = None if left is None else self.names.index(str(left))
            found.append(GivenVote(self.item, verdict, better, rater=rater, left=place))
        return found


def _record(row: Row) -> _Record:
    fields, responses, metadata = (
        mapping_of(row.columns.get(name), name) for name in ("fields", "responses", "metadata")
    )
    given = {name: value for name, value in fields.items() if value is not None and value != ""}
    names = tuple(name for name in given if name not in _PROMPT_FIELDS)
    odd = [name for name in names if not isinstance(given[name], str)]
    if odd:
        raise RowError(f"`fields.{odd[0]}` is {kind_of(given[odd[0]])}; an answer is text, remove the field")
    if len(names) != 2:
        raise RowError(
            f"`fields` has {len(names)} answers ({', '.join(names)}); give two, beside those of the prompt "
            f"({', '.join(_PROMPT_FIELDS)})"
        )
    texts = [str(given[name]) for name in names]
    if texts[0] == texts[1]:
        raise RowError("the two answers are the same; remove the record", "same completions")
    prompt = _prompt({name: as_content(given[name], f"fields.{name}") for name in given if name not in names})
    item = NewItem(
        prompt,
        tuple(Candidate(text, source_id=f"{row.where}/{name}") for name, text in zip(names, texts, strict=True)),
        heldout=heldout_mark(metadata.get("heldout"), "metadata.heldout"),
    )
    answered = {question: _responses(question, given) for question, given in responses.items()}
    return _Record(row.where, item, names, answered, metadata)


def _prompt(parts: Mapping[str, Text]) -> Text:
    """All fields of the prompt in the order of the record, with an empty line between; a conversation stays alone."""
    texts = [part for part in parts.values() if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n\n".join(texts)
    system: tuple[Message, ...] = ()
    if "system" in parts:
        system = ({"role": "system", "content": str(parts["system"])},)
    others = [part for name, part in parts.items() if name != "system"]
    if len(others) != 1 or isinstance(others[0], str):
        raise RowError(
            f"the prompt is a conversation beside other fields ({', '.join(parts)}), and where these belong is not "
            "known; write one field"
        )
    return (*system, *others[0])


def _responses(question: str, given: object) -> list[_Response]:
    name = f"responses.{question}"
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise RowError(f"`{name}` is {kind_of(given)}; give a list of responses", "wrong type")
    facts = [mapping_of(one, name) for one in cast(Sequence[object], given)]
    return [_Response(one.get("value"), one.get("user_id"), one.get("status")) for one in facts]


def _question(source: str, records: Sequence[_Record], wanted: str | None) -> str:
    """The question that tells the better answer. Raises DataError if it is not known which one."""
    first = {name: record.where for record in reversed(records) for name in record.responses if record.of(name)}
    listed = ", ".join(f"`{name}` ({where})" for name, where in first.items())
    if wanted is not None and wanted not in first:
        raise DataError(f"{source} has no response to a question {wanted!r}; it has {listed or 'none at all'}")
    if wanted is None and len(first) > 1:
        raise DataError(
            f"{source} has responses to {len(first)} questions: {listed}; name the one that tells the better answer "
            "(--question NAME)"
        )
    return wanted or next(iter(first), _QUESTION)


def _label(value: object, names: Sequence[str], question: str) -> tuple[PreferenceName, int]:
    """The verdict of a response, and the index of the better answer."""
    if isinstance(value, list | tuple):
        ranks = _ranks(cast(Sequence[object], value), question)
        if set(ranks) != set(names):
            raise RowError(f"`{question}` ranks {', '.join(ranks) or 'nothing'}; it must rank {' and '.join(names)}")
        first, second = (ranks[name] for name in names)
        return ("tie", 0) if first == second else ("better", int(second < first))
    if value in ("tie", "both_bad"):
        return cast(PreferenceName, value), 0
    for place, name in enumerate(names):
        if value in (name, f"{name}_much"):
            return ("better" if value == name else "much_better"), place
    shown = repr(value[:40]) if isinstance(value, str) else kind_of(value)
    raise RowError(
        f"`{question}` is {shown}, which names none of the answers; give {', '.join(names)}, the same with _much, tie, "
        "both_bad, or a ranking"
    )


def _ranks(value: Sequence[object], question: str) -> dict[str, int]:
    """The rank of each name in a ranking: names from the best to the worst, or objects of `value` and `rank`."""
    if all(isinstance(one, str) for one in value):
        ranks = {str(name): place for place, name in enumerate(value)}
    else:
        ranks: dict[str, int] = {}
        for one in value:
            facts = mapping_of(one, question)
            rank = facts.get("rank")
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise RowError(f"`{question}` has the rank {rank!r}; give whole numbers", "wrong type")
            ranks[str(facts.get("value"))] = rank
    if len(ranks) != len(value):
        raise RowError(f"`{question}` ranks an answer twice", "bad value")
    return ranks
