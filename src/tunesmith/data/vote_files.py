"""Votes from files and into files: JSONL, Parquet, folders of the datasets library, Argilla's records.

All but Argilla's have TRL's columns (`prompt`, `chosen`, `rejected`), so every trainer reads them. Argilla's are one
JSON object each: `id`, `fields`, `metadata`, `suggestions`, `responses`, `vectors`. Written: fields `prompt`,
`response_1`, `response_2` and one label question `preference`, with one response for each rater. Read: also records of
others, whose answers are any two text fields and whose question is a label (the name of a field, or `tie`) or a ranking
(a list of `value` and `rank`).
"""

import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from tunesmith.core.errors import DataError, InputError
from tunesmith.core.log import get_logger
from tunesmith.core.system import name_file
from tunesmith.data.pairs import load_preferences
from tunesmith.data.readers import library
from tunesmith.data.rows import Row, RowError, as_content
from tunesmith.data.sources import parse_rows, source_rows
from tunesmith.schema.records import Pair, Ranking, Text, plain_text
from tunesmith.store.records import (
    Candidate,
    ExportRow,
    GivenVote,
    NewItem,
    PreferenceName,
    StoredDemonstration,
    StoredRanking,
)
from tunesmith.store.vote_reader import as_answer

_log = get_logger(__name__)

VoteFormat = Literal["jsonl", "parquet", "datasets", "argilla"]

UNKNOWN_RATER = "import"
"""Who is said to have given a preference whose row names nobody."""

_MUCH = 2.0
_NAMES: tuple[PreferenceName, ...] = ("much_better", "better", "tie", "both_bad")


def read_items(source: str | Path, *, gold: bool = False, heldout: bool = False) -> list[NewItem]:
    """The pairs and rankings of `source`, to be judged by raters; what the file says of their order is dropped.

    With `gold` the chosen answer is taken for known to be the best, which makes a silent check of raters; ties are left
    out then. Rows whose answers are the same cannot be judged and are left out. Raises DataError as `load_preferences`.
    """
    if _is_argilla(source):
        votes = _argilla_votes(source, with_unjudged=True)
        known = ("much_better", "better") if gold else ()
        return [
            replace(
                vote.item,
                gold=vote.better if vote.verdict in known else None,
                heldout=heldout or vote.item.heldout,
            )
            for vote in votes
        ]
    found: list[NewItem] = []
    rows = load_preferences(source)
    for row in rows:
        item = _item(row)
        texts = [candidate.text for candidate in item.candidates]
        place = _known_best(row) if gold else None
        if len(set(texts)) == len(texts) and (place is not None or not gold):
            found.append(replace(item, gold=place, heldout=heldout or item.heldout))
    _say_left_out(len(rows) - len(found), str(source))
    return found


def read_given_votes(source: str | Path) -> list[GivenVote]:
    """The pairs of `source` as votes, by the rater that the row names, else by `import`.

    Columns of an export (`rater`, `verdict`, `created_at`, `dwell_ms`, `reason`, `heldout`) are honoured; otherwise a
    margin of 2 or more means much better. Rankings count as every two of their answers. Raises DataError.
    """
    if _is_argilla(source):
        return _argilla_votes(source)
    found: list[GivenVote] = []
    num_rows = 0
    for row in load_preferences(source):
        pairs = row.pairs() if isinstance(row, Ranking) else [row]
        num_rows += len(pairs)
        found += [_given(pair) for pair in pairs if pair.chosen != pair.rejected]
    _say_left_out(num_rows - len(found), str(source))
    return found


def write_votes(dest: str | Path, rows: Iterable[ExportRow], form: VoteFormat) -> int:
    """Number of votes written to `dest`, a file, or a folder for `datasets`. It appears when it is whole.

    Raises InputError if `dest` exists, DataError if there is nothing to write or the format cannot hold it,
    MissingDependencyError without pyarrow or datasets.
    """
    if form == "argilla":
        votes = list(rows)
        write_rows(dest, _argilla_records(votes), "jsonl")
        return len(votes)
    return write_rows(dest, (vote_columns(row) for row in rows), form)


def write_rows(dest: str | Path, rows: Iterable[Mapping[str, object]], form: VoteFormat) -> int:
    """Number of rows written, as `write_votes` does."""
    path = Path(dest).expanduser()
    if path.exists():
        raise InputError(f"{path} exists; give a name that is free")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as aside:
            part = Path(aside) / "part"
            num_rows = _write_jsonl(part, rows) if form == "jsonl" else _write_table(part, list(rows), form)
            if num_rows:
                name_file(part, path)
    except FileExistsError as error:
        raise InputError(f"{path} exists; give a name that is free") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    if not num_rows:
        raise DataError("there is nothing to export yet")
    return num_rows


def vote_columns(row: ExportRow) -> dict[str, object]:
    """A vote as columns; texts stay as they are, conversations become lists of messages."""
    columns = {field.name: getattr(row, field.name) for field in fields(row)}
    return columns | {name: _plain(columns[name]) for name in ("prompt", "chosen", "rejected")}


def ranking_columns(ranking: StoredRanking) -> dict[str, object]:
    """A ranking as columns that `load_preferences` reads."""
    return {
        "prompt": _plain(ranking.prompt),
        "completions": [_plain(as_answer(ranking.prompt, answer.text)) for answer in ranking.candidates],
        "ranks": list(ranking.ranks),
        **_judged_by(ranking),
    }


def demonstration_columns(demonstration: StoredDemonstration) -> dict[str, object]:
    """A written answer as columns that `load_demonstrations` reads."""
    return {
        "prompt": _plain(demonstration.prompt),
        "completion": _plain(as_answer(demonstration.prompt, demonstration.text)),
        **_judged_by(demonstration),
    }


def _judged_by(row: StoredRanking | StoredDemonstration) -> dict[str, object]:
    return {"rater": row.rater, "heldout": row.heldout, "created_at": row.created_at}


def format_of(dest: str | Path) -> VoteFormat:
    """The format that a name asks for: `.jsonl` and `.json`, `.parquet`, else a folder of the datasets library."""
    suffix = Path(dest).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix == ".parquet":
        return "parquet"
    if suffix:
        raise InputError(f"{dest}: {suffix} is no format of votes; name it .jsonl, .parquet or, for a folder, without")
    return "datasets"


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            num_rows += 1
        file.flush()
        os.fsync(file.fileno())
    return num_rows


def _write_table(path: Path, rows: Sequence[Mapping[str, object]], form: VoteFormat) -> int:
    if not rows:
        return 0
    if len({isinstance(row.get("prompt"), str) for row in rows}) > 1:
        raise DataError(f"some prompts are text and others conversations, which {form} cannot hold; export JSONL")
    if form == "parquet":
        table = library("pyarrow", "this is Parquet").Table.from_pylist([dict(row) for row in rows])
        library("pyarrow.parquet", "this is Parquet").write_table(table, path)
    else:
        datasets = library("datasets", "this is a folder of the datasets library")
        datasets.Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))
    return len(rows)


def _is_argilla(source: str | Path) -> bool:
    """True if the first row of a file is a record of Argilla; what is wrong with a row is said by its reader."""
    if not Path(source).expanduser().is_file():
        return False
    for _, read in source_rows(str(source)):
        with suppress(DataError):
            columns = read()
            return isinstance(columns.get("fields"), Mapping) and "responses" in columns
        break
    return False


def _item(row: Pair | Ranking) -> NewItem:
    where, columns = row.prompt.id, row.prompt.columns
    is_pair = isinstance(row, Pair)
    answers = {"chosen": row.chosen, "rejected": row.rejected} if is_pair else dict(enumerate(row.completions))
    candidates = tuple(
        Candidate(
            text=_answer_text(content, where),
            weight_version=_integer(columns.get(f"{name}_version")) if is_pair else None,
            source_id=f"{where}/{name}",
        )
        for name, content in answers.items()
    )
    prompt = _prompt(row.prompt.content, next(iter(answers.values())))
    kind = "pair" if len(candidates) == 2 else "ranking"
    return NewItem(prompt, candidates, kind, heldout=columns.get("heldout") is True)


def _known_best(row: Pair | Ranking) -> int | None:
    if isinstance(row, Pair):
        return None if row.tie else 0
    return row.ranks.index(1) if row.ranks.count(1) == 1 else None


def _given(pair: Pair) -> GivenVote:
    columns = pair.prompt.columns
    named = columns.get("verdict")
    verdict: PreferenceName = "much_better" if (pair.margin or 0.0) >= _MUCH else "better"
    if pair.tie:
        verdict = "both_bad" if named == "both_bad" else "tie"
    elif named in _NAMES[:2]:
        verdict = cast(PreferenceName, named)
    time, reason, rater = columns.get("created_at"), columns.get("reason"), columns.get("rater")
    return GivenVote(
        item=_item(pair),
        verdict=verdict,
        better=0,
        rater=rater.strip() if isinstance(rater, str) and rater.strip() else UNKNOWN_RATER,
        created_at=float(time) if isinstance(time, int | float) and not isinstance(time, bool) else None,
        dwell_ms=_integer(columns.get("dwell_ms")),
        reason=reason if isinstance(reason, str) else "",
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _prompt(content: Text, answer: Text) -> Text:
    """The prompt, which is conversational whenever the answers are."""
    return () if not content and not isinstance(answer, str) else content


def _answer_text(content: Text, where: str) -> str:
    if isinstance(content, str):
        return content
    if len(content) != 1 or set(content[0]) != {"role", "content"}:
        raise DataError(
            f"{where}: an answer of several turns, or with tool calls, cannot be put to raters; cut it to one message"
        )
    return content[0]["content"]


def _plain(content: Text) -> object:
    return content if isinstance(content, str) else [dict(message) for message in content]


def _say_left_out(num_rows: int, source: str) -> None:
    if num_rows:
        _log.warning("%s: %d rows left out, because their answers are the same or are no check", source, num_rows)


_QUESTION = "preference"
_PROMPT_FIELDS = ("prompt", "instruction", "input", "question", "context", "chat")
_RATER_SPACE = uuid.UUID("5f0c9a5e-6c2b-5c1e-9d4b-2b1f6f3f7a10")
"""Argilla knows users by UUID: a name's is made from this one, so that it is the same in every export."""


def _argilla_records(rows: Iterable[ExportRow]) -> list[dict[str, Any]]:
    """One record for each prompt with its two answers, with all votes on them, in the order of the first vote."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        chosen = plain_text(row.chosen)
        first, second = sorted((chosen, plain_text(row.rejected)))
        record = records.setdefault(
            (row.prompt_id, first, second),
            {
                "id": str(row.vote_id),
                "fields": {"prompt": _plain(row.prompt), "response_1": first, "response_2": second},
                "metadata": {"prompt_id": row.prompt_id, "heldout": str(row.heldout).lower()},
                "suggestions": {},
                "responses": {_QUESTION: []},
                "vectors": {},
            },
        )
        better = "response_1" if chosen == first else "response_2"
        label = {"much_better": f"{better}_much", "better": better}.get(row.verdict, row.verdict)
        user = str(uuid.uuid5(_RATER_SPACE, row.rater))
        record["responses"][_QUESTION].append({"value": label, "user_id": user})
        record["metadata"][f"rater-{user}"] = row.rater
    return list(records.values())


def _argilla_votes(source: str | Path, *, with_unjudged: bool = False) -> list[GivenVote]:
    """The votes in a file of records, one for each response. Responses that say nothing about two answers are passed
    over; with `with_unjudged`, a record without a response gives one tie, for its answers' sake.

    Raises DataError that names bad records.
    """
    return list(chain.from_iterable(parse_rows(source, lambda row: _votes_of(row, with_unjudged))))


def _votes_of(row: Row, with_unjudged: bool) -> list[GivenVote]:
    fields, responses, metadata = (
        _mapping(row.columns.get(name), name) for name in ("fields", "responses", "metadata")
    )
    names = [name for name, value in fields.items() if isinstance(value, str) and name not in _PROMPT_FIELDS]
    if len(names) != 2:
        raise RowError(f"`fields` has {len(names)} answers ({', '.join(names)}); give a prompt and two", "bad value")
    prompt_field = next((name for name in _PROMPT_FIELDS if fields.get(name)), None)
    prompt = "" if prompt_field is None else as_content(fields[prompt_field], prompt_field)
    candidates = tuple(Candidate(str(fields[name]), source_id=f"{row.where}/{name}") for name in names)
    item = NewItem(prompt, candidates, heldout=metadata.get("heldout") == "true")
    if item.candidates[0].text == item.candidates[1].text:
        raise RowError("the two answers are the same; remove the record", "same completions")
    votes: list[GivenVote] = []
    for given in responses.values():
        for response in cast(Sequence[object], given) if isinstance(given, list) else ():
            facts = _mapping(response, "responses")
            found = _label(facts.get("value"), names)
            if found is not None:
                user = str(facts.get("user_id"))
                rater = metadata.get(f"rater-{user}")
                votes.append(GivenVote(item, *found, rater=rater if isinstance(rater, str) else user))
    if not votes and with_unjudged:
        votes.append(GivenVote(item, "tie", 0, rater=UNKNOWN_RATER))
    return votes


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
