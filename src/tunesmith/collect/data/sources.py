"""Rows of a source, read by the extension of a file, the content of a folder, or the form of a hub id.

| source | read as |
| --- | --- |
| `x.jsonl`, `x.ndjson` | one JSON object per line |
| `x.json` | a list of objects |
| `x.csv`, `x.tsv` | a table with a header |
| `x.parquet` | Parquet |
| `folder`, `folder:split` | a folder written by `save_to_disk` of the datasets library |
| `org/name`, `org/name/config`, either with `:split` | a data set on the hub, if nothing on disk has that name |
| `folder/part-*.jsonl` | all files of that name, in the order of their names, one after another |
| `data:path` | any of these below the folder that `TUNESMITH_DATA` names, as shipped recipes name their data |

Text files may be gzipped, with `.gz` after the extension.
"""

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.readers import csv_rows, hub_rows, json_rows, jsonl_rows, parquet_rows, saved_rows
from tunesmith.collect.data.rows import HELDOUT, BadRows, Candidate, Row, RowError, checked_columns, heldout_mark
from tunesmith.collect.data.tables import as_rows

READERS: dict[str, Callable[[Path], Iterator[Candidate]]] = {
    ".jsonl": jsonl_rows,
    ".ndjson": jsonl_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": partial(csv_rows, delimiter="\t"),
    ".parquet": parquet_rows,
}
"""Reader of each kind of file, by its extension."""

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"(?P<name>{_PART}/{_PART})(?:/(?P<config>{_PART}))?(?::(?P<split>[\w.-]+))?")
_FOLDER_MARKS = ("state.json", "dataset_dict.json")


def source_rows(source: str | Path) -> Iterator[Candidate]:
    """The rows of `source`, each as its place and a function that returns its columns.

    Raises DataError if there is no such file, folder or data set, or if its kind is unknown.
    """
    name = str(source)
    if is_data_source(name):
        return source_rows(data_path(name))
    path = Path(source)
    try:
        path.stat()  # `exists` takes every error for an answer from Python 3.14 on
        exists = True
    except (FileNotFoundError, NotADirectoryError, ValueError):
        exists = False
    except OSError as error:  # a whole text given for a name
        raise DataError(f"{name[:80]!r}... cannot be the name of a file: {error.strerror or error}") from error
    if path.is_dir():
        return saved_rows(_saved_folder(path), None)
    if not exists and "*" in path.name:
        files = _matching(path)
        if not files:
            raise DataError(f"no file is named {path}; correct the name, or give one file")
        return itertools.chain.from_iterable([_file_rows(file) for file in files])
    if exists or _extension(path) in READERS:
        return _file_rows(path)
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return saved_rows(_saved_folder(Path(folder)), split)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id:
        return hub_rows(hub_id["name"], hub_id["config"], hub_id["split"])
    raise DataError(_missing(path))


def _extension(path: Path) -> str:
    """The extension that names the format, in lower case: that before `.gz` of a gzipped file."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _file_rows(path: Path) -> Iterator[Candidate]:
    if not path.is_file():
        raise DataError(_missing(path))
    reader = READERS.get(_extension(path))
    if reader is None:
        raise DataError(f"{path}: unknown kind of file; name it with one of {', '.join(READERS)} (text also with .gz)")
    if reader is parquet_rows and path.suffix == ".gz":
        raise DataError(f"{path} is a gzipped Parquet file; unpack it, Parquet is packed already")
    return reader(path)


def _saved_folder(path: Path) -> Path:
    if not any((path / mark).is_file() for mark in _FOLDER_MARKS):
        raise DataError(
            f"{path} is a folder, but none that the datasets library saved (it has no {' or '.join(_FOLDER_MARKS)}); "
            "give a file, or a folder written by save_to_disk"
        )
    return path


def _missing(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = (
        f"did you mean {folder / close[0]}?" if close else f"give a file ({', '.join(READERS)}), a folder or a hub id"
    )
    return f"{path} does not exist; {hint}"


VARIABLE = "TUNESMITH_DATA"
"""Environment variable that names the data folder."""

PREFIX = "data:"
"""Prefix of a source below the data folder."""

_ON_THE_HUB = (
    ("instruction/oasst1.", "timdettmers/openassistant-guanaco:test", "the best replies of OASST1, in a `text` column"),
    ("preference/hh-rlhf.", "Anthropic/hh-rlhf:test", "helpful and harmless pairs together"),
    ("sentiment/imdb", "stanfordnlp/imdb:train", "25,000 rows instead of 5,000"),
    ("math/gsm8k.", "openai/gsm8k/main:train", "the same rows"),
)
"""Prefix of a file's name, the equivalent hub id, and how it differs."""


def is_data_source(source: str) -> bool:
    """True for `data:` with a path after it; `data:train` is a split of the folder `data`."""
    name = source.removeprefix(PREFIX)
    return source.startswith(PREFIX) and re.fullmatch(r"[\w-]*", name) is None


def _matching(pattern: Path) -> list[Path]:
    """The files that match `pattern`, sorted by name; none if the name has no `*`."""
    return sorted(file for file in pattern.parent.glob(pattern.name) if file.is_file()) if "*" in pattern.name else []


def data_path(source: str) -> Path:
    """The file or folder that `source`, such as `data:math/gsm8k.train.jsonl.gz`, names.

    Raises DataError if the variable is not set, names no folder, or if there is nothing of that name below it.
    """
    name = source.removeprefix(PREFIX)
    named = os.environ.get(VARIABLE, "")
    if not named:
        raise DataError(f"{source} is below the folder that {VARIABLE} names, but it is not set; set it{_or(name)}")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"{source}: {VARIABLE} names {folder}, which is no folder; correct it{_or(name)}")
    path = Path(os.path.normpath(folder / name))  # links inside of the folder may lead anywhere
    if not path.is_relative_to(os.path.normpath(folder)):
        raise DataError(f"{source} leads out of the folder {folder}; give the path of the file itself")
    if not path.exists() and not _matching(path):
        names = [str(file.relative_to(folder)) for file in folder.glob("*/*")]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else f"; put it there{_or(name)}"
        raise DataError(f"{source}: the folder {folder}, which {VARIABLE} names, has no {name}{hint}")
    return path


def _or(name: str) -> str:
    """The end of a message on a missing data file: the same data on the hub."""
    for beginning, hub_id, difference in _ON_THE_HUB:
        if name.startswith(beginning):
            return f", or take {hub_id} from the hub ({difference})"
    return ", or give a file, a folder or a hub id"


T = TypeVar("T")


def parse_rows(
    source: object,
    parse: Callable[[Row], T],
    *,
    label: str = "rows",
    bad: BadRows | None = None,
    records: tuple[type, ...] = (),
) -> list[T]:
    """`parse(row)` of every row of a source, or of a list or table (`tables.as_rows`), in order; a list of `records` as
    it is.

    A column `heldout` is true or false for `parse`, however the source writes it.

    `parse` raises `RowError(reason, kind)` for a row that it cannot use. A row with the `id` of an earlier one is bad
    too. `label` names a list in messages. Bad rows go to `bad`, which may skip them; without it they are an error.
    Raises DataError listing the first bad rows and the count of all, or if there are no rows.
    """
    bad = bad or BadRows()
    if isinstance(source, str | Path):
        bad.opened(str(source))
        candidates = source_rows(source)
    else:
        rows = as_rows(source, label)
        if rows and all(isinstance(item, records) for item in rows):
            bad.opened(f"the list of {label}", len(rows))
            return cast(list[T], rows)
        bad.opened(f"the list of {label}")
        form = "a mapping of columns"
        candidates = ((f"{label}[{index}]", partial(checked_columns, item, form)) for index, item in enumerate(rows))
    parsed: list[T] = []
    place_of_id: dict[str, str] = {}
    for where, read in candidates:
        bad.num_rows += 1
        try:
            columns = read()
            if HELDOUT in columns:
                columns = {**columns, HELDOUT: heldout_mark(columns[HELDOUT])}
            row = Row.of(where, columns)
            item = parse(row)
            row_id = row.columns.get("id")
            place = where if row_id is None else place_of_id.setdefault(repr(row_id), where)
            if place != where:
                raise RowError(f"id {str(row_id)[:80]!r} is already at {place}", "repeated id")
        except RowError as error:
            bad.add(where, error)
        else:
            parsed.append(item)
    bad.check()
    if not parsed:
        raise DataError(f"{bad.source} has no rows; give at least one")
    return parsed
