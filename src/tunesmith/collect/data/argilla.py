"""Argilla's records, one JSON object each: `id`, `fields`, `metadata`, `suggestions`, `responses`, `vectors`.

Written: fields `prompt`, `response_1`, `response_2` and one label question `preference`, with one response for each
rater. Read: also records of others. What comes before the answers is in fields of known names, which together are the
prompt; the answers are the two other text fields. The question that tells the better answer is a label (the name of a
field, `tie` or `both_bad`) or a ranking (the names, best first, or a list of `value` and `rank`).
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, cast

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Message, Text, plain_text
from tunesmith.collect.data.foreign_values import PROMPT_FIELDS, Facts, Found
from tunesmith.collect.data.rows import Row, RowError, as_content, heldout_mark, kind_of
from tunesmith.collect.data.vote_values import mapping_of, rater_of
from tunesmith.collect.store.content import encode_json
from tunesmith.collect.store.records import Candidate, ExportRow, GivenVote, NewItem, PreferenceName

_QUESTION = "preference"
_RESPONSES = ".responses"
_COUNTED = (None, "submitted")
"""Status of a response that its rater has handed in; exports of one's own code may leave it out."""

_RATER_SPACE = uuid.UUID("5f0c9a5e-6c2b-5c1e-9d4b-2b1f6f3f7a10")
"""Argilla knows users by UUID: a name's is made from this one, so that it is the same in every export."""


def is_argilla(columns: Facts) -> bool:
    """True for a record, as `to_json` writes it, or flat, as `to_datasets` does."""
    is_record = isinstance(columns.get("fields"), Mapping) and "responses" in columns
    return is_record or any(name.endswith(_RESPONSES) for name in columns)


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


def scan_argilla(row: Row, found: Found) -> None:
    """Note which questions the record answers, with its place."""
    record = _record(row)
    for name in record.responses:
        if record.of(name):
            found.questions.setdefault(name, row.where)


def read_argilla(row: Row, found: Found) -> list[GivenVote]:
    """The votes in a record, one for each response that was handed in to the question that was named, or the one
    that there is.
    """
    record, asked = _record(row), found.question or next(iter(found.questions), _QUESTION)
    found.num_open += sum(response.status not in _COUNTED for response in record.of(asked))
    return record.votes(asked)


def check_question(source: str, found: Found) -> None:
    """Raise DataError if it is not known which question tells the better answer."""
    listed = ", ".join(f"`{name}` ({where})" for name, where in found.questions.items())
    if found.question is not None and found.question not in found.questions:
        raise DataError(f"{source} has no response to a question {found.question!r}; it has {listed or 'none at all'}")
    if found.question is None and len(found.questions) > 1:
        raise DataError(
            f"{source} has responses to {len(found.questions)} questions: {listed}; name the one that tells the better "
            "answer (--question NAME)"
        )


def argilla_items(row: Row, found: Found, gold: bool) -> list[NewItem]:
    """The pair of a record, whatever was said of it; with `gold` once for each response that calls one better."""
    if not gold:
        return [_record(row).item]
    votes = read_argilla(row, found)
    return [replace(vote.item, gold=vote.better) for vote in votes if vote.verdict in ("much_better", "better")]


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
    columns = row.columns if "fields" in row.columns else _nested(row.columns)
    fields, responses, metadata = (mapping_of(columns.get(name), name) for name in ("fields", "responses", "metadata"))
    given = {name: value for name, value in fields.items() if value is not None and value != ""}
    names = tuple(name for name in given if name not in PROMPT_FIELDS)
    odd = [name for name in names if not isinstance(given[name], str)]
    if odd:
        raise RowError(f"`fields.{odd[0]}` is {kind_of(given[odd[0]])}; an answer is text, remove the field")
    if len(names) != 2:
        raise RowError(
            f"`fields` has {len(names)} answers ({', '.join(names)}); give two, beside those of the prompt "
            f"({', '.join(PROMPT_FIELDS)})"
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


def _nested(columns: Facts) -> Facts:
    """A flat record as a nested one. Fields and metadata stand side by side in it: if more than two texts might be
    answers, those are that a response names, or whose name differs from such a one in its last character.
    """
    questions = [name.removesuffix(_RESPONSES) for name in columns if name.endswith(_RESPONSES)]
    responses: dict[str, list[Facts]] = {}
    for question in questions:
        name = f"{question}{_RESPONSES}"
        values, users, states = (_listed(columns, f"{name}{part}") for part in ("", ".users", ".status"))
        rows = zip_longest(values, users, states)
        responses[question] = [{"value": value, "user_id": user, "status": state} for value, user, state in rows]
    known = ("id", "status", "_server_id", "heldout", "prompt_id")
    plain = {name: one for name, one in columns.items() if "." not in name and name not in known and one is not None}
    texts = [name for name in plain if isinstance(plain[name], str) and name not in PROMPT_FIELDS]
    if len(texts) > 2:
        named = encode_json(list(responses.values()))
        # `response_1` and `response_2`: a rater who always prefers one never names the other.
        begins = {name[:-1] for name in texts if f'"{name}"' in named or f'"{name}_much"' in named}
        texts = [name for name in texts if name[:-1] in begins]
    fields = {name: one for name, one in plain.items() if name in PROMPT_FIELDS or name in texts}
    return {"fields": fields, "responses": responses, "metadata": columns}


def _listed(columns: Facts, name: str) -> Sequence[object]:
    value = columns.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise RowError(f"`{name}` is {kind_of(value)}; give a list", "wrong type")
    return cast(Sequence[object], value or ())


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
