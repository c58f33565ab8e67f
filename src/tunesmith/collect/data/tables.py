"""Rows given as Python objects: lists, and the tables of pandas, polars, Arrow and the datasets library."""

import io
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.rows import kind_of

_SPLITS = frozenset({"train", "training", "test", "testing", "valid", "validation", "val", "dev", "eval", "evaluation"})


def as_rows(given: object, label: str) -> list[Any]:
    """`given` as a list of rows, of texts or of records, in its order; a list is returned as it is.

    A DataFrame of pandas or polars, a table of Arrow, a Dataset and a mapping of columns of one length are read row by
    row. A missing value of a DataFrame is None. A column of one of them, and any other iterable, is a list of its
    items. `label` is the name of the argument in messages.

    Raises:
        DataError: several splits, of which one must be named; a single row; a set, which has no order; a file that is
            open; or no collection at all.
    """
    if isinstance(given, list):
        return cast(list[Any], given)
    if _is(given, "datasets", "DatasetDict", "IterableDatasetDict"):
        raise _splits(cast(Mapping[object, object], given), label)
    for module, names, rows in _TABLES:
        if _is(given, module, *names):
            return rows(given)
    if isinstance(given, Mapping):
        return _rows_of_columns(cast(Mapping[object, object], given), label)
    if isinstance(given, str | bytes | bytearray | Path):
        raise DataError(f"{label} is {_name_of(given)}; give a list of rows")
    if isinstance(given, set | frozenset):
        raise DataError(f"{label} is a {type(given).__name__}, which has no order; give a list")
    if isinstance(given, io.IOBase):
        raise DataError(f"{label} is an open file; give its name, so that it is read by its extension")
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise DataError(f"{label} is {_name_of(given)}; give a list of rows, a DataFrame or a Dataset")
    return list(cast(Iterable[Any], given))


def _is(value: object, module: str, *names: str) -> bool:
    """True for an object of one of the classes `names` of a module that has been imported; others cannot be theirs."""
    loaded = sys.modules.get(module)
    classes = tuple(found for name in names if isinstance(found := getattr(loaded, name, None), type))
    return isinstance(value, classes)


def _rows_of_pandas(frame: Any) -> list[Any]:
    if frame.columns.has_duplicates:
        twice = [str(name) for name in frame.columns[frame.columns.duplicated()]]
        raise DataError(f"the DataFrame has several columns `{twice[0]}`; name each column once")
    names = list(frame.columns)
    columns = [_items_of_pandas(frame[name]) for name in names]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _items_of_pandas(column: Any) -> list[Any]:
    """The cells as Python objects, None where one is missing."""
    return [None if gone else _plain(cell) for cell, gone in zip(column.tolist(), column.isna().tolist(), strict=True)]


def _plain(value: Any) -> Any:
    """`value` with NumPy's arrays as lists, and its scalars as numbers: pandas holds the lists of Parquet as arrays."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    if _is(value, "numpy", "ndarray", "generic"):
        return _plain(value.tolist())
    return value


def _without_format(data: Any) -> Any:
    """A data set that yields plain Python values; one with a transform, which makes its rows, as it is."""
    form = getattr(data, "format", None)
    has_transform = isinstance(form, Mapping) and cast(Mapping[str, object], form).get("type") == "custom"
    return data if has_transform else data.with_format(None)


_TABLES: tuple[tuple[str, tuple[str, ...], Callable[[Any], list[Any]]], ...] = (
    ("datasets", ("Dataset", "IterableDataset"), lambda data: list(_without_format(data))),
    ("datasets", ("Column", "IterableColumn"), list),
    ("pandas", ("DataFrame",), _rows_of_pandas),
    ("pandas", ("Series", "Index"), _items_of_pandas),
    ("polars", ("DataFrame",), lambda frame: frame.to_dicts()),
    ("polars", ("LazyFrame",), lambda frame: frame.collect().to_dicts()),
    ("polars", ("Series",), lambda column: column.to_list()),
    ("pyarrow", ("Table", "RecordBatch", "Array", "ChunkedArray"), lambda table: table.to_pylist()),
    ("numpy", ("ndarray",), _plain),
)
"""Module, its classes, and what makes rows (or the items of a column) of one of their objects."""


def _rows_of_columns(given: Mapping[object, object], label: str) -> list[Any]:
    """The rows of a mapping of columns. Raises DataError if it is none."""
    tables = [name for name, value in given.items() if any(_is(value, module, *names) for module, names, _ in _TABLES)]
    are_frames = any(hasattr(given[name], "columns") or hasattr(given[name], "column_names") for name in tables)
    if given and (are_frames or all(str(name).lower() in _SPLITS for name in given)):
        raise _splits(given, label)
    columns = {name: as_rows(value, label) for name, value in given.items() if _is_column(value)}
    others = [name for name in given if name not in columns]
    if others or not columns:
        found = f"`{others[0]}` is {_name_of(given[others[0]])}" if others else "it is empty"
        raise DataError(
            f"{label} is a {type(given).__name__}, which is neither a list of rows nor a table ({found}); give a list "
            'such as [{"prompt": "The movie was"}], or a mapping of columns, each a list'
        )
    lengths = {str(name): len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{name}` has {length}" for name, length in itertools.islice(lengths.items(), 6))
        raise DataError(f"{label} is a mapping of columns of different lengths ({listed}); give one cell for each row")
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _is_column(value: object) -> bool:
    return isinstance(value, list | tuple) or any(_is(value, module, *names) for module, names, _ in _TABLES)


def _splits(given: Mapping[object, object], label: str) -> DataError:
    names = [str(name) for name in given]
    first = "train" if "train" in names else names[0] if names else "train"
    return DataError(
        f"{label} holds several splits ({', '.join(names) or 'none'}), not rows; give one of them, such as "
        f'data["{first}"], or load it alone: load_dataset(..., split="{first}")'
    )


def _name_of(value: object) -> str:
    return "a path" if isinstance(value, Path) else kind_of(value)
