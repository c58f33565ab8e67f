"""Rows of Parquet files, of folders that the `datasets` library saved, and of data sets on the hub.

They need the extra `tunesmith[data]`, which is imported where it is used.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError, MissingDependencyError
from tunesmith.data.rows import Candidate, RowError, checked_columns

DEFAULT_SPLIT = "train"
"""Split that is taken where none is named."""

TABLE_FORM = "a table with one column for each name"
_ROWS_AT_A_TIME = 1000


def parquet_rows(path: Path) -> Iterator[Candidate]:
    """The rows of a Parquet file, counted from 1. Raises DataError if it is damaged, MissingDependencyError without
    pyarrow.
    """
    parquet = _library("pyarrow.parquet", f"{path} is Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            yield from _numbered_rows(file.iter_batches(batch_size=_ROWS_AT_A_TIME), path.name)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{path} is no Parquet file, or a damaged one ({_first_line(error)}); copy it again") from error


def saved_rows(folder: Path, split: str | None) -> Iterator[Candidate]:
    """The rows of a folder written by `save_to_disk`, counted from 1; of a folder with several splits those of
    `split`.

    Raises DataError if it is damaged or has no such split, MissingDependencyError without `datasets`.
    """
    datasets = _library("datasets", f"{folder} is a folder of the datasets library")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be read by the datasets library ({_first_line(error)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _pick(loaded, split, str(folder))
    elif split is not None:
        raise DataError(f"{folder} has no splits, but {split!r} was asked for; leave out `:{split}`")
    yield from _numbered_rows(_batches(loaded), folder.name)


def hub_rows(name: str, config: str | None, split: str | None) -> Iterator[Candidate]:
    """The rows of a data set on the hub, counted from 1. With HF_HUB_OFFLINE=1 the hub's own cache answers alone.

    Raises DataError if it cannot be had, MissingDependencyError without `datasets`.
    """
    datasets = _library("datasets", f"{name} is taken for a data set on the hub, because no file has that name")
    try:
        loaded = datasets.load_dataset(name, config)
    except (OSError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        remedy = (
            "HF_HUB_OFFLINE is set, so only the hub's local cache was searched; unset it to download"
            if offline
            else "check the spelling and the connection (private and gated data sets need `hf auth login`)"
        )
        raise DataError(
            f"no file or folder is named {name!r}, and the hub gives no such data set ({_first_line(error)}); {remedy}"
        ) from error
    yield from _numbered_rows(_batches(_pick(loaded, split, name)), "/".join(filter(None, (name, config))))


def _pick(splits: Mapping[str, Any], split: str | None, name: str) -> Any:
    """The data set of the wanted split: the one asked for, else `train`, else the only one."""
    wanted = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in splits or len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        raise DataError(
            f"{name} has no split {wanted!r}; it has {', '.join(splits) or 'none'}. Name one behind a colon, "
            f"{name}:SPLIT"
        )
    return splits[wanted]


def _batches(dataset: Any) -> Iterator[Any]:
    """A data set of the datasets library as Arrow tables."""
    yield from dataset.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME)


def _numbered_rows(batches: Iterable[Any], name: str) -> Iterator[Candidate]:
    number = 0
    for batch in batches:
        for columns in _batch_rows(batch):
            number += 1
            yield f"{name}:{number}", columns


def _batch_rows(batch: Any) -> Iterable[Callable[[], Mapping[str, object]]]:
    """One function for each row of an Arrow batch or table, which gives its columns."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # some row holds bytes that are no UTF-8: take them one at a time to find it
        return [lambda index=index: _one_row(batch, index) for index in range(batch.num_rows)]
    return [lambda row=row: checked_columns(row, TABLE_FORM) for row in rows]


def _one_row(batch: Any, index: int) -> Mapping[str, object]:
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise RowError("a text is not UTF-8", "not UTF-8") from error
    return checked_columns(row, TABLE_FORM)


def _library(name: str, reason: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{reason}, which needs the package {name.partition('.')[0]}; run `pip install tunesmith[data]`, "
            "or give JSONL, JSON or CSV"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
