"""Votes from files and into files: JSONL, Parquet, folders of the datasets library, Argilla's records.

All but Argilla's have TRL's columns (`prompt`, `chosen`, `rejected`), so every trainer reads them.
"""

import importlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

from tunesmith.core.errors import DataError, InputError, MissingDependencyError
from tunesmith.core.log import get_logger
from tunesmith.data.argilla import argilla_records, argilla_votes, is_argilla
from tunesmith.data.pairs import load_preferences
from tunesmith.data.sources import source_rows
from tunesmith.schema.records import Pair, Ranking, Text
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
        preferences: Sequence[GivenVote] = argilla_votes(source, with_unjudged=True)
        return [_of_vote(vote, gold=gold, heldout=heldout) for vote in preferences]
    found: list[NewItem] = []
    rows = load_preferences(source)
    for row in rows:
        item = _ranking_item(row, heldout) if isinstance(row, Ranking) else _pair_item(row, heldout)
        texts = [candidate.text for candidate in item.candidates]
        place = _known_best(row) if gold else None
        if len(set(texts)) == len(texts) and (place is not None or not gold):
            found.append(NewItem(item.prompt, item.candidates, item.kind, gold=place, heldout=item.heldout))
    _say_left_out(len(rows) - len(found), str(source))
    return found


def read_given_votes(source: str | Path) -> list[GivenVote]:
    """The pairs of `source` as votes, by the rater that the row names, else by `import`.

    Columns of an export (`rater`, `verdict`, `created_at`, `dwell_ms`, `reason`, `heldout`) are honoured; otherwise a
    margin of 2 or more means much better. Rankings count as every two of their answers. Raises DataError.
    """
    if _is_argilla(source):
        return argilla_votes(source)
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
        write_rows(dest, argilla_records(votes), "jsonl")
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
                os.replace(part, path)
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
        "rater": ranking.rater,
        "heldout": ranking.heldout,
        "created_at": ranking.created_at,
    }


def demonstration_columns(demonstration: StoredDemonstration) -> dict[str, object]:
    """A written answer as columns that `load_demonstrations` reads."""
    return {
        "prompt": _plain(demonstration.prompt),
        "completion": _plain(as_answer(demonstration.prompt, demonstration.text)),
        "rater": demonstration.rater,
        "heldout": demonstration.heldout,
        "created_at": demonstration.created_at,
    }


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
        table = _library("pyarrow").Table.from_pylist([dict(row) for row in rows])
        _library("pyarrow.parquet").write_table(table, path)
    else:
        _library("datasets").Dataset.from_list([dict(row) for row in rows]).save_to_disk(str(path))
    return len(rows)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"this format needs the package {name.partition('.')[0]}; run `pip install tunesmith[data]`, or take JSONL"
        ) from error


def _is_argilla(source: str | Path) -> bool:
    if not Path(source).expanduser().is_file():
        return False
    first = next(iter(source_rows(str(source))), None)
    if first is None:
        return False
    try:
        return is_argilla(first[1]())
    except DataError:
        # The reader of the rows says what is wrong with them.
        return False


def _pair_item(pair: Pair, heldout: bool) -> NewItem:
    answers = (("chosen", pair.chosen), ("rejected", pair.rejected))
    return NewItem(
        prompt=_prompt(pair.prompt.content, pair.chosen),
        candidates=tuple(_candidate(pair, name, content) for name, content in answers),
        heldout=heldout or pair.prompt.columns.get("heldout") is True,
    )


def _ranking_item(ranking: Ranking, heldout: bool) -> NewItem:
    where = ranking.prompt.id
    texts = [_answer_text(content, where) for content in ranking.completions]
    candidates = tuple(Candidate(text, source_id=f"{where}/{place}") for place, text in enumerate(texts))
    kind = "pair" if len(candidates) == 2 else "ranking"
    return NewItem(_prompt(ranking.prompt.content, ranking.completions[0]), candidates, kind, heldout=heldout)


def _known_best(row: Pair | Ranking) -> int | None:
    if isinstance(row, Pair):
        return None if row.tie else 0
    return row.ranks.index(1) if row.ranks.count(1) == 1 else None


def _of_vote(vote: GivenVote, *, gold: bool, heldout: bool) -> NewItem:
    is_known = gold and vote.verdict in ("much_better", "better")
    return NewItem(vote.item.prompt, vote.item.candidates, gold=vote.better if is_known else None, heldout=heldout)


def _given(pair: Pair) -> GivenVote:
    columns = pair.prompt.columns
    named = columns.get("verdict")
    verdict: PreferenceName = "much_better" if (pair.margin or 0.0) >= _MUCH else "better"
    if pair.tie:
        verdict = "both_bad" if named == "both_bad" else "tie"
    elif named in _NAMES[:2]:
        verdict = cast(PreferenceName, named)
    time, dwell_ms, reason = columns.get("created_at"), columns.get("dwell_ms"), columns.get("reason")
    rater = columns.get("rater")
    return GivenVote(
        item=_pair_item(pair, heldout=False),
        verdict=verdict,
        better=0,
        rater=rater.strip() if isinstance(rater, str) and rater.strip() else UNKNOWN_RATER,
        created_at=float(time) if isinstance(time, int | float) and not isinstance(time, bool) else None,
        dwell_ms=dwell_ms if isinstance(dwell_ms, int) and not isinstance(dwell_ms, bool) else None,
        reason=reason if isinstance(reason, str) else "",
    )


def _candidate(pair: Pair, name: str, content: Text) -> Candidate:
    version = pair.prompt.columns.get(f"{name}_version")
    return Candidate(
        text=_answer_text(content, pair.prompt.id),
        weight_version=version if isinstance(version, int) and not isinstance(version, bool) else None,
        source_id=f"{pair.prompt.id}/{name}",
    )


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
