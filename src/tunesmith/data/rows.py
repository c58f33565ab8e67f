"""Strict reading of rows: every bad row is found, named and counted before anything is used.

A file holds one JSON object per line in UTF-8, and may be gzipped. A Python list holds the same rows as mappings.
"""

import difflib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from tunesmith.core.errors import DataError

T = TypeVar("T")

_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_NUM_SHOWN = 5
_LINE_FORM = 'one JSON object per line, for example {"prompt": "The movie was"}'


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands (`prompts.jsonl:3`, `prompts[2]`) and its columns."""

    where: str
    columns: Mapping[str, object]


class RowError(DataError):
    """The reason why one row cannot be used. Readers collect these; the caller sees all of them in one `DataError`."""


def read_jsonl(path: str | Path) -> list[Row]:
    """All rows of a JSONL file, plain or gzipped.

    Empty lines at the end are skipped. Raises DataError if the file cannot be read or has no row, or naming `file:line:
    reason` of the first bad rows and the count of all: not an object, cut off, not UTF-8, blank, a repeated key, NaN, a
    lone surrogate.
    """
    return parse_rows(path, lambda row: row)


def parse_rows(source: str | Path | Sequence[object], parse: Callable[[Row], T], *, label: str = "rows") -> list[T]:
    """`parse(row)` of every row of a file or of a list of mappings, in order.

    `parse` raises `RowError(reason)` for a row that it cannot use. `label` names a list in messages. Raises DataError
    listing the first bad rows and the count of all; the rows of a file that are no JSON are counted together with those
    that `parse` refuses.
    """
    if isinstance(source, str | Path):
        name, candidates = str(source), _file_rows(Path(source))
    else:
        name, candidates = f"the list of {label}", _list_rows(source, label)
    parsed: list[T] = []
    problems: list[str] = []
    for where, read in candidates:
        try:
            parsed.append(parse(Row(where=where, columns=read())))
        except RowError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise DataError(_report(name, problems, num_rows=len(parsed) + len(problems)))
    if not parsed:
        raise DataError(f"{name} has no rows; give at least one: {_LINE_FORM}")
    return parsed


def check_characters(value: object) -> None:
    """Raise RowError if a text anywhere inside `value` holds a lone surrogate or a NUL, which no tokenizer or file can
    carry.
    """
    if isinstance(value, str):
        if "\x00" in value:
            raise RowError("a text holds a NUL character; remove it")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                "a text holds a lone surrogate (half of a pair, like \\ud83d), which is no character; remove it"
            ) from error
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[object, object], value).items():
            check_characters(key)
            check_characters(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[object], value):
            check_characters(item)


def _report(name: str, problems: Sequence[str], num_rows: int) -> str:
    shown = "\n  ".join(problems[:_NUM_SHOWN])
    more = f"\n  and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
    verb = "row" if len(problems) == 1 else "rows"
    return f"{len(problems)} bad {verb} of {num_rows} in {name}; correct or remove:\n  {shown}{more}"


_Candidate = tuple[str, Callable[[], Mapping[str, object]]]


def _list_rows(items: Iterable[object], label: str) -> Iterator[_Candidate]:
    for index, item in enumerate(items):
        yield f"{label}[{index}]", lambda item=item: _checked_columns(item)


def _file_rows(path: Path) -> Iterator[_Candidate]:
    lines = _read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    last_is_closed = not lines[-1].strip()
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        is_cut = number == len(lines) and not last_is_closed
        yield f"{path.name}:{number}", lambda line=line, is_cut=is_cut: _parse_line(line, is_cut)


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(_missing(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if content.startswith(_UTF16_MARKS):
        raise DataError(f"{path} is UTF-16; save it as UTF-8")
    if not content.startswith(_GZIP_MAGIC):
        if path.suffix == ".gz":
            raise DataError(f"{path} is named .gz but is not gzipped; rename or compress it")
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is a damaged or cut-off gzip file ({error}); copy it again") from error


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; give a JSONL file"
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {folder / close[0]}?" if close else "; give the path of a JSONL file"
    return f"{path} does not exist{hint}"


def _parse_line(line: bytes, is_cut: bool) -> Mapping[str, object]:
    if not line.strip():
        raise RowError("blank line")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RowError("nested too deeply") from error
    except json.JSONDecodeError as error:
        if is_cut:
            raise RowError(
                f"the last line is cut off ({error.msg} at column {error.colno}); is the file complete?"
            ) from error
        raise RowError(f"not JSON ({error.msg} at column {error.colno}); expected {_LINE_FORM}") from error
    except ValueError as error:  # an integer beyond Python's limit of digits
        raise RowError(f"not JSON ({error})") from error
    return _checked_columns(value)


def _checked_columns(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise RowError(f"{kind_of(value)}, not an object; expected {_LINE_FORM}")
    columns = cast(Mapping[object, object], value)
    for key in columns:
        if not isinstance(key, str):
            raise RowError(f"column name {key!r} is no text")
    check_characters(columns)
    return cast(Mapping[str, object], columns)


def kind_of(value: object) -> str:
    """A value's type in a reader's words, for messages: `text`, `a list`, `a number`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    for types, name in ((str, "text"), ((int, float), "a number"), (Mapping, "an object"), ((list, tuple), "a list")):
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RowError(f"key `{repeated}` stands twice in one object")
    return columns


def _refuse_constant(name: str) -> object:
    raise RowError(f"{name} is no JSON number; write null or a finite number")
