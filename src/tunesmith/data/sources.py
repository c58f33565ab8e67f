"""Which reader a source needs: by the extension of a file, the content of a folder, or the form of a hub id.

| source | read as |
| --- | --- |
| `x.jsonl`, `x.ndjson` | one JSON object per line |
| `x.json` | a list of objects |
| `x.csv`, `x.tsv` | a table with a header |
| `x.parquet` | Parquet |
| `folder`, `folder:split` | a folder written by `save_to_disk` of the datasets library |
| `org/name`, `org/name/config`, either with `:split` | a data set on the hub, if nothing on disk has that name |
| `data:path` | any of these below the folder that `TUNESMITH_DATA` names |

Text files may be gzipped, with `.gz` behind the extension.
"""

import difflib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tunesmith.core.errors import DataError
from tunesmith.data.data_folder import data_path, is_data_source
from tunesmith.data.tables import hub_rows, parquet_rows, saved_rows
from tunesmith.data.text_files import Candidate, csv_rows, json_rows, jsonl_rows

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
    """The rows of `source`, each as the place where it stands and a function that gives its columns.

    Raises DataError if there is no such file, folder or data set, or if its kind is unknown.
    """
    name = str(source)
    if is_data_source(name):
        return source_rows(data_path(name))
    path = Path(source)
    try:
        exists = path.exists()
    except OSError as error:  # a whole text given for a name
        raise DataError(f"{name[:80]!r}... cannot be the name of a file: {error.strerror or error}") from error
    if path.is_dir():
        return saved_rows(_saved_folder(path), None)
    if exists or extension(path) in READERS:
        return _file_rows(path)
    folder, colon, split = name.rpartition(":")
    if colon and Path(folder).is_dir():
        return saved_rows(_saved_folder(Path(folder)), split)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id:
        return hub_rows(hub_id["name"], hub_id["config"], hub_id["split"])
    raise DataError(_missing(path))


def extension(path: Path) -> str:
    """The extension that names the format, in lower case: that before `.gz` where the file is gzipped."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _file_rows(path: Path) -> Iterator[Candidate]:
    if not path.is_file():
        raise DataError(_missing(path))
    reader = READERS.get(extension(path))
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
        f"; did you mean {folder / close[0]}?"
        if close
        else f"; give a file ({', '.join(READERS)}), a folder or a hub id"
    )
    return f"{path} does not exist{hint}"
