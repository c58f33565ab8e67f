"""Votes from files and into files: JSONL, CSV, Parquet, folders of the datasets library, Argilla's records.

All but Argilla's have TRL's columns (`prompt`, `chosen`, `rejected`), so every trainer reads them.
"""

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, TypeVar

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.system import name_file
from tunesmith.base.schema.records import Pair, Ranking, Text
from tunesmith.collect.data.argilla import argilla_items, argilla_records, argilla_votes, is_argilla, plain_content
from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.data.readers import library, messages_in
from tunesmith.collect.data.rows import BadRows, RowError, is_heldout, usable
from tunesmith.collect.data.vote_values import (
    duration_of,
    rater_of,
    side_of,
    text_of,
    time_of,
    verdict_of,
    whole_number,
)
from tunesmith.collect.store.content import as_answer
from tunesmith.collect.store.records import (
    Candidate,
    ExportRow,
    GivenVote,
    Imported,
    NewItem,
    StoredDemonstration,
    StoredRanking,
)

_log = get_logger(__name__)

R = TypeVar("R", Pair, Pair | Ranking)
T = TypeVar("T")

VoteFormat = Literal["jsonl", "csv", "parquet", "datasets", "argilla"]

_MUCH = 2.0
_COLUMNS = frozenset(field.name for field in fields(ExportRow)) | {"messages", "completions", "ranks", "scores", "id"}
"""Columns that an import knows."""


Labels = Literal["drop", "votes", "gold"]
"""Uses of the preference in a file: raters are asked, it is a vote, or it is the known answer of a check."""


def read_for(
    labels: Labels, sources: Sequence[str | Path], *, heldout: bool = False, question: str | None = None
) -> list[NewItem] | list[GivenVote]:
    """The rows of all `sources`, as items or as votes."""
    if labels == "votes":
        return [one for source in sources for one in read_given_votes(source, heldout=heldout, question=question)]
    is_gold = labels == "gold"
    return [one for source in sources for one in read_items(source, gold=is_gold, heldout=heldout, question=question)]


def import_notes(done: Imported, labels: Labels, *, heldout: bool) -> list[str]:
    """The notes on an import, beside the numbers of new rows and of those that were there."""
    notes: list[str] = []
    if done.num_changed:
        marks = " and ".join(name for name, is_on in (("gold", labels == "gold"), ("held out", heldout)) if is_on)
        notes.append(f"{done.num_changed} items that were there are {marks or 'held out'} from now on")
    if done.num_other:
        notes.append(
            f"{done.num_other} votes left out: their rater has said otherwise of the same answers, and that vote stays"
        )
    return notes


def read_items(
    source: str | Path, *, gold: bool = False, heldout: bool = False, question: str | None = None
) -> list[NewItem]:
    """The pairs and rankings of `source`, to be judged by raters; what the file says of their order is dropped.

    With `gold` the chosen answer is taken for known to be the best, which makes a silent check of raters; ties are left
    out then. Rows whose answers are the same cannot be judged and are left out. `question` is that of Argilla's records
    which tells the better answer, if they have several. Raises DataError as `load_preferences`.
    """
    _check_question(source, question)
    if is_argilla(source):
        found = argilla_items(source)
        if gold:
            votes = argilla_votes(source, question)
            found = [replace(one.item, gold=one.better) for one in votes if one.verdict in ("much_better", "better")]
            _say_left_out(len(votes) - len(found), str(source))
    else:
        rows = load_preferences(source, bad=BadRows(can_skip=False))
        found = [item for item in _usable(source, rows, lambda row: _judgeable(row, gold=gold)) if item is not None]
        _say_left_out(len(rows) - len(found), str(source))
    return [replace(item, heldout=heldout or item.heldout) for item in found]


def read_given_votes(source: str | Path, *, heldout: bool = False, question: str | None = None) -> list[GivenVote]:
    """The pairs of `source` as votes, by the rater that the row names, else by `import`.

    Columns of an export (`rater`, `verdict`, `created_at`, `dwell_ms`, `reason`, `chosen_side`, `heldout`) are
    honoured, and a wrong type is an error; otherwise a margin of 2 or more means much better. Rankings count as every
    two of their answers. `heldout` marks all of them, `question` is as in `read_items`. Raises DataError.
    """
    _check_question(source, question)
    if is_argilla(source):
        found = argilla_votes(source, question)
    else:
        rows = load_preferences(source, bad=BadRows(can_skip=False))
        unknown = dict.fromkeys(name for row in rows for name in row.prompt.columns if name not in _COLUMNS)
        if unknown:
            _log.warning("%s: votes have no place for the columns %s, which are left out", source, ", ".join(unknown))
        pairs = [pair for row in rows for pair in (row.pairs() if isinstance(row, Ranking) else [row])]
        found = _usable(source, [pair for pair in pairs if pair.chosen != pair.rejected], _given)
        _say_left_out(len(pairs) - len(found), str(source))
    return [replace(vote, item=replace(vote.item, heldout=True)) for vote in found] if heldout else found


def _check_question(source: str | Path, question: str | None) -> None:
    if question is not None and not is_argilla(source):
        raise InputError(f"--question {question}: {source} has no questions, because it has no records of Argilla")


def _usable(source: str | Path, rows: Sequence[R], parse: Callable[[R], T]) -> list[T]:
    """`parse(row)` of every row. Raises DataError that names the bad ones."""
    bad = BadRows(can_skip=False)
    bad.opened(str(source), len(rows))
    found = usable(rows, parse, bad, "votes")
    bad.check()
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
            if form in ("jsonl", "csv"):
                num_rows = _write_lines(part, (jsonl_lines if form == "jsonl" else csv_lines)(rows))
            else:
                num_rows = _write_table(part, list(rows), form)
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
    return columns | {name: plain_content(columns[name]) for name in ("prompt", "chosen", "rejected")}


def ranking_columns(ranking: StoredRanking) -> dict[str, object]:
    """A ranking as columns that `load_preferences` reads."""
    return {
        "prompt": plain_content(ranking.prompt),
        "completions": [plain_content(as_answer(ranking.prompt, answer.text)) for answer in ranking.candidates],
        "ranks": list(ranking.ranks),
        "reason": ranking.reason,
        **_judged_by(ranking),
    }


def demonstration_columns(demonstration: StoredDemonstration) -> dict[str, object]:
    """A written answer as columns that `load_demonstrations` reads."""
    return {
        "prompt": plain_content(demonstration.prompt),
        "completion": plain_content(as_answer(demonstration.prompt, demonstration.text)),
        **_judged_by(demonstration),
    }


def _judged_by(row: StoredRanking | StoredDemonstration) -> dict[str, object]:
    return {"rater": row.rater, "heldout": row.heldout, "created_at": row.created_at}


def format_of(dest: str | Path) -> VoteFormat:
    """The format that a name asks for: `.jsonl`, `.csv`, `.parquet`, else a folder of the datasets library."""
    suffix = Path(dest).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".parquet"):
        return "csv" if suffix == ".csv" else "parquet"
    if suffix:
        raise InputError(
            f"{dest}: {suffix} is no format of votes; name it .jsonl, .csv, .parquet or, for a folder, without"
        )
    return "datasets"


def jsonl_lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """A line of JSON for each row."""
    for row in rows:
        yield json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def csv_lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """A line of column names and a record for each row, as `readers.csv_rows` reads it: lists as JSON, none as an empty
    cell.

    Raises DataError for a text that would be read as messages.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow([_cell(name, value) for name, value in row.items()])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _cell(name: str, value: object) -> object:
    if isinstance(value, str):
        if messages_in(value) is not None:
            raise DataError(f"`{name}` is a text that CSV cannot tell from a list of messages; export JSONL")
        return value
    if isinstance(value, bool | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return value


def _write_lines(path: Path, lines: Iterable[str]) -> int:
    num_lines = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        for line in lines:
            file.write(line)
            num_lines += 1
        file.flush()
        os.fsync(file.fileno())
    return num_lines


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


def _judgeable(row: Pair | Ranking, *, gold: bool) -> NewItem | None:
    """The row as an item; None if its answers are the same, or if it is to be `gold` and the best is not known."""
    item = _item(row)
    texts = [candidate.text for candidate in item.candidates]
    place = _known_best(row) if gold else None
    return None if len(set(texts)) < len(texts) or (gold and place is None) else replace(item, gold=place)


def _item(row: Pair | Ranking) -> NewItem:
    where, columns = row.prompt.id, row.prompt.columns
    is_pair = isinstance(row, Pair)
    answers = {"chosen": row.chosen, "rejected": row.rejected} if is_pair else dict(enumerate(row.completions))
    candidates = tuple(
        Candidate(
            text=_answer_text(content),
            weight_version=whole_number(columns.get(f"{name}_version"), f"{name}_version") if is_pair else None,
            source_id=f"{where}/{name}",
        )
        for name, content in answers.items()
    )
    prompt = _prompt(row.prompt.content, next(iter(answers.values())))
    kind = "pair" if len(candidates) == 2 else "ranking"
    return NewItem(prompt, candidates, kind, heldout=is_heldout(row))


def _known_best(row: Pair | Ranking) -> int | None:
    if isinstance(row, Pair):
        return None if row.tie else 0
    return row.ranks.index(1) if row.ranks.count(1) == 1 else None


def _given(pair: Pair) -> GivenVote:
    columns = pair.prompt.columns
    by_margin = "tie" if pair.tie else "much_better" if (pair.margin or 0.0) >= _MUCH else "better"
    side = side_of(columns.get("chosen_side"))
    return GivenVote(
        item=_item(pair),
        verdict=verdict_of(columns.get("verdict"), is_tie=pair.tie) or by_margin,
        better=0,
        rater=rater_of(columns.get("rater")),
        created_at=time_of(columns.get("created_at")),
        dwell_ms=duration_of(columns.get("dwell_ms")),
        reason=text_of(columns.get("reason"), "reason"),
        left=None if side is None else 0 if side == "left" else 1,
    )


def _prompt(content: Text, answer: Text) -> Text:
    """The prompt, which is conversational whenever the answers are."""
    return () if not content and not isinstance(answer, str) else content


def _answer_text(content: Text) -> str:
    if isinstance(content, str):
        return content
    if len(content) != 1 or set(content[0]) != {"role", "content"}:
        raise RowError("an answer of several turns, or with tool calls, cannot be put to raters; cut it to one message")
    return content[0]["content"]


def _say_left_out(num_rows: int, source: str) -> None:
    if num_rows:
        _log.warning("%s: %d rows left out, because their answers are the same or are no check", source, num_rows)
