"""Argilla's records, one JSON object each: `id`, `fields`, `metadata`, `suggestions`, `responses`, `vectors`.

Written: fields `prompt`, `response_1`, `response_2` and one label question `preference`, with one response for each
rater. Read: also records of others, whose answers are any two text fields and whose question is a label (the name of a
field, or `tie`) or a ranking (a list of `value` and `rank`).
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from tunesmith.data.rows import Row, RowError, as_content
from tunesmith.data.sources import parse_rows
from tunesmith.schema.records import Text, plain_text
from tunesmith.store.records import Candidate, ExportRow, GivenVote, NewItem, PreferenceName

QUESTION = "preference"

_PROMPT_FIELDS = ("prompt", "instruction", "input", "question", "context", "chat")
_ANSWERS = ("response_1", "response_2")
_RATER_SPACE = uuid.UUID("5f0c9a5e-6c2b-5c1e-9d4b-2b1f6f3f7a10")
"""Argilla knows users by UUID: a name's is made from this one, so that it is the same in every export."""


def is_argilla(columns: Mapping[str, object]) -> bool:
    """True if a row is a record of Argilla."""
    return isinstance(columns.get("fields"), Mapping) and "responses" in columns


def argilla_records(rows: Iterable[ExportRow]) -> list[dict[str, object]]:
    """One record for each prompt with its two answers, with all votes on them, in the order of the first vote."""
    found: dict[tuple[object, ...], dict[str, object]] = {}
    for row in rows:
        answers = tuple(plain_text(content) for content in (row.chosen, row.rejected))
        key = (row.prompt_id, *sorted(answers))
        record = found.setdefault(key, _new_record(row, sorted(answers)))
        _add_response(record, row, answers[0])
    return list(found.values())


def argilla_votes(source: str | Path, *, with_unjudged: bool = False) -> list[GivenVote]:
    """The votes in a file of records, one for each response. Responses that say nothing about two answers are passed
    over; with `with_unjudged`, a record without a response gives one tie, for its answers' sake.

    Raises DataError that names bad records.
    """
    found = parse_rows(source, lambda row: _votes_of(row, with_unjudged), label="records")
    return [vote for votes in found for vote in votes]


def _new_record(row: ExportRow, answers: Sequence[str]) -> dict[str, object]:
    prompt = row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt]
    return {
        "id": str(row.vote_id),
        "fields": {"prompt": prompt, **dict(zip(_ANSWERS, answers, strict=True))},
        "metadata": {"prompt_id": row.prompt_id, "heldout": str(row.heldout).lower()},
        "suggestions": {},
        "responses": {QUESTION: []},
        "vectors": {},
    }


def _add_response(record: dict[str, object], row: ExportRow, chosen: str) -> None:
    fields = cast(Mapping[str, object], record["fields"])
    place = next(name for name in _ANSWERS if fields[name] == chosen)
    labels: dict[PreferenceName, str] = {"much_better": f"{place}_much", "better": place}
    user = str(uuid.uuid5(_RATER_SPACE, row.rater))
    responses = cast(dict[str, list[object]], record["responses"])
    responses[QUESTION].append({"value": labels.get(row.verdict, row.verdict), "user_id": user})
    metadata = cast(dict[str, object], record["metadata"])
    metadata[f"rater-{user}"] = row.rater


def _votes_of(row: Row, with_unjudged: bool) -> list[GivenVote]:
    fields, responses, metadata = (
        _mapping(row.columns.get(name), name) for name in ("fields", "responses", "metadata")
    )
    names = [name for name, value in fields.items() if isinstance(value, str) and name not in _PROMPT_FIELDS]
    if len(names) != 2:
        raise RowError(f"`fields` has {len(names)} answers ({', '.join(names)}); give a prompt and two", "bad value")
    item = NewItem(
        _prompt(fields), tuple(Candidate(str(fields[name]), source_id=f"{row.where}/{name}") for name in names)
    )
    if item.candidates[0].text == item.candidates[1].text:
        raise RowError("the two answers are the same; remove the record", "same completions")
    votes: list[GivenVote] = []
    for given in responses.values():
        for response in cast(Sequence[object], given) if isinstance(given, list) else ():
            vote = _vote(item, names, response, metadata)
            votes += [] if vote is None else [vote]
    if not votes and with_unjudged:
        votes.append(GivenVote(item, "tie", 0, rater="import"))
    return votes


def _prompt(fields: Mapping[str, object]) -> Text:
    name = next((name for name in _PROMPT_FIELDS if fields.get(name)), None)
    return "" if name is None else as_content(fields[name], name)


def _vote(item: NewItem, names: Sequence[str], response: object, metadata: Mapping[str, object]) -> GivenVote | None:
    facts = _mapping(response, "responses")
    said = _label(facts.get("value"), names)
    if said is None:
        return None
    user = str(facts.get("user_id"))
    rater = metadata.get(f"rater-{user}")
    return GivenVote(item, said[0], said[1], rater=rater if isinstance(rater, str) else user)


def _label(value: object, names: Sequence[str]) -> tuple[PreferenceName, int] | None:
    """The verdict of a response, and the index of the better answer; None if it has none."""
    if isinstance(value, list):
        ranks = {str(one.get("value")): one.get("rank") for one in cast(Sequence[Mapping[str, object]], value)}
        first, second = (ranks.get(name) for name in names)
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        return ("tie", 0) if first == second else ("better", int(second < first))
    if value in ("tie", "both_bad"):
        return cast(PreferenceName, value), 0
    for place, name in enumerate(names):
        if value in (name, f"{name}_much"):
            return ("better" if value == name else "much_better"), place
    return None


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"`{name}` is no object", "wrong type")
    return cast(Mapping[str, object], value)
