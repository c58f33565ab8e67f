"""Readers of rows: JSONL, JSON and CSV in UTF-8, plain or gzipped; Parquet; folders of the datasets library; the hub.

Each row is a `Candidate`: its place, and a function that returns its columns or raises `RowError`. Text files need the
standard library alone; the others the extra `tunesmith[data]`, which is imported where it is used.
"""

import ast
import codecs
import csv
import gzip
import importlib
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from tunesmith.base.core.errors import DataError, MissingDependencyError
from tunesmith.collect.data.rows import Candidate, Refused, RowError, checked_columns

LINE_FORM = 'one JSON object per line, for example {"prompt": "The movie was"}'
LIST_FORM = 'a list of objects, for example [{"prompt": "The movie was"}]'
TABLE_FORM = "a line of column names and one line for each row"

JSON_CELLS = frozenset({"margin", "tie", "ranks", "scores", "completions", "messages"})
"""Columns whose cells are JSON in a CSV file, where everything else is text."""

_MESSAGE_CELLS = frozenset({"prompt", "chosen", "rejected", "completion"})
"""Columns whose cells in a CSV file are text, or a list of messages in JSON."""

_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_GZIP_MAGIC = b"\x1f\x8b"
_SPACE = " \t\n\r"
_CHUNK = 1 << 16
_LONGEST_TOKEN = len(r"\ud83d\ude00")
_MAX_CELL = (1 << 31) - 1
_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # what `surrogateescape` makes of bytes that are no UTF-8


def jsonl_rows(path: Path) -> Iterator[Candidate]:
    """The lines of a JSONL file, one of which is held at a time. Empty lines at the end are skipped."""
    decoder = _decoder()
    blank: list[int] = []
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                blank.append(number)
                continue
            for place in blank:
                yield f"{path.name}:{place}", partial(_parse_line, decoder, b"", False)
            blank.clear()
            yield f"{path.name}:{number}", partial(_parse_line, decoder, line, not line.endswith(b"\n"))


def json_rows(path: Path) -> Iterator[Candidate]:
    """The objects of a JSON list, each named by the line on which it begins, and further ones on it by their number.
    One is held at a time.

    Raises DataError for a file that is no list, and where it stops being JSON: later rows cannot be told apart. A file
    that is cut off at its end loses the cut row alone.
    """
    with opened(path) as file:
        window = _Window(file)
        if window.next() != "[":
            hint = "; a file with one object on each line is named .jsonl" if window.next() == "{" else ""
            raise DataError(f"{path} holds no list; expected {LIST_FORM}{hint}")
        window.skip(1)
        decoder, separator = _decoder(), ""
        last_line, num_on_line = 0, 0
        while window.next() != "]" or separator == ",":
            line = window.line
            num_on_line = num_on_line + 1 if line == last_line else 1
            last_line = line
            # Rows are told apart by their place.
            where = f"{path.name}:{line}" + (f"#{num_on_line}" if num_on_line > 1 else "")
            try:
                value, is_utf8 = window.value(decoder)
            except (ValueError, RecursionError) as error:
                yield f"{path.name}:{line}", _cut_row(window.text, f"{path.name}:{line}", error)
                return
            yield where, partial(_json_columns, value, is_utf8)
            separator = window.next()
            if not separator:
                reason = "the list is cut off; is the file complete?"
                yield f"{path.name}:{window.line}", partial(_cut_off, reason)
                return
            if separator not in ",]":
                raise DataError(
                    f"{path.name}:{window.line}: not JSON (expected , or ] after an object); correct the file"
                )
            if separator == ",":
                window.skip(1)
        window.skip(1)
        if window.next():
            raise DataError(f"{path.name}:{window.line}: not JSON (text after the end of the list); correct the file")


def object_rows(path: Path) -> Iterator[Candidate]:
    """The rows of a JSON file that holds objects without a list around them: one on each line, or a single one, which
    is the row, unless it is a page of an API, which has its rows in `data`.
    """
    decoder = _decoder()
    with opened(path) as file:
        first = file.readline().decode("utf-8", errors="surrogateescape")
        try:
            decoder.decode(first)
        except ValueError:
            rest = file.read().decode("utf-8", errors="surrogateescape")
        else:
            yield from jsonl_rows(path)
            return
    try:
        value = decoder.decode(first + rest)
    except (ValueError, RecursionError) as error:
        yield f"{path.name}:1", _cut_row(first + rest, f"{path.name}:1", error)
        return
    page = value.get("data") if isinstance(value, dict) else None
    rows = page if isinstance(page, list) else [value]
    for number, row in enumerate(rows, start=1):
        yield f"{path.name}:{number}", partial(_json_columns, row, True)


def begins_with_object(path: Path) -> bool:
    """True if the first character of a file, beside space, opens an object."""
    with opened(path) as file:
        return _Window(file).next() == "{"


class _Window:
    """The part of a JSON text from the next value on, as far as it is read, and the line on which it begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
        self._is_whole = False
        self.text = ""
        self.line = 1

    def _read(self) -> None:
        # As much again as is there: a value of many chunks is tried a few times, not once for each chunk.
        content = self._file.read(max(_CHUNK, len(self.text)))
        self._is_whole = not content
        self.text += self._decode(content, final=self._is_whole)

    def next(self) -> str:
        """The next character that is no space, to which it moves; empty at the end."""
        while True:
            self.skip(_after_space(self.text, 0))
            if self.text or self._is_whole:
                return self.text[:1]
            self._read()

    def skip(self, length: int) -> None:
        """Go on by `length` characters."""
        self.line += self.text.count("\n", 0, length)
        self.text = self.text[length:]

    def _is_final(self, error: Exception) -> bool:
        """True if what follows the text that is read cannot mend the error."""
        is_open = isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")
        return isinstance(error, json.JSONDecodeError) and not is_open and error.pos < len(self.text) - _LONGEST_TOKEN

    def value(self, decoder: json.JSONDecoder) -> tuple[object, bool]:
        """The value that begins here, behind which it moves, and True if its text is UTF-8."""
        while True:
            try:
                value, end = decoder.raw_decode(self.text, 0)
            except (ValueError, RecursionError) as error:
                if self._is_whole or self._is_final(error):
                    raise
            else:
                # A number may go on behind what is read.
                if end < len(self.text) or self._is_whole:
                    is_utf8 = _NOT_UTF8.search(self.text, 0, end) is None
                    self.skip(end)
                    return value, is_utf8
            self._read()


def csv_rows(path: Path, delimiter: str = ",") -> Iterator[Candidate]:
    """The rows of a CSV file with a header, each named by the line on which it begins. Two are held at a time.

    All cells are text, except those of `JSON_CELLS` and lists of messages. Raises DataError for a header with an empty
    or repeated name.
    """
    with opened(path) as file:
        lines = _Lines(io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline=""))
        records = _csv_records(lines, delimiter)
        _, header = next(records, (1, None))
        if header is None:
            return
        if isinstance(header, csv.Error) or not header:
            raise DataError(f"{path.name}:1: no header ({header or 'blank line'}); expected {TABLE_FORM}")
        bad = next((name for name in header if not name.strip() or header.count(name) > 1), None)
        if bad is not None:
            fault = "is given twice" if bad.strip() else "is empty"
            raise DataError(f"{path.name}:1: column name {bad!r} {fault}; name each column once")
        blank: list[tuple[int, list[str] | csv.Error]] = []
        record = next(records, None)
        while record is not None:
            following = next(records, None)
            is_cut = following is None and not lines.last.endswith(("\n", "\r"))
            blank.append(record)
            if record[1] == []:
                record = following  # empty lines at the end are skipped
                continue
            yield from ((f"{path.name}:{line}", partial(_table_columns, header, one, is_cut)) for line, one in blank)
            blank = []
            record = following


class _Lines:
    """The lines of a file, and the last that was read."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.last = ""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        self.last = next(self._lines)
        return self.last


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if they are gzipped, without a byte order mark.

    Raises DataError if the file cannot be read, is UTF-16, or is a damaged archive.
    """
    try:
        with ExitStack() as stack:
            packed = stack.enter_context(path.open("rb"))
            is_packed = packed.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            if not is_packed and path.suffix == ".gz":
                raise DataError(f"{path} is named .gz but is not gzipped; rename or compress it")
            file = cast(io.BufferedReader, stack.enter_context(gzip.open(packed))) if is_packed else packed
            begin = file.peek(len(_BOM))
            if begin.startswith(_UTF16_MARKS):
                raise DataError(f"{path} is UTF-16; save it as UTF-8")
            if begin.startswith(_BOM):
                file.read(len(_BOM))
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a damaged or cut-off gzip file ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_line(decoder: json.JSONDecoder, line: bytes, is_cut: bool) -> Mapping[str, object]:
    if not line.strip():
        raise RowError("blank line", "blank line")
    try:
        value = decoder.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 (byte {error.start + 1} of the line)", "not UTF-8") from error
    except RecursionError as error:
        raise RowError("nested too deeply", "not parsed") from error
    except json.JSONDecodeError as error:
        if is_cut:
            _cut_off(f"the last line is cut off ({error.msg} at column {error.colno}); is the file complete?")
        reason = f"not JSON ({error.msg} at column {error.colno}); expected {LINE_FORM}"
        raise RowError(reason, "not parsed") from error
    except ValueError as error:  # an integer beyond Python's limit of digits
        raise RowError(f"not JSON ({error})", "not parsed") from error
    return checked_columns(value, LINE_FORM)


def _cut_row(text: str, where: str, error: ValueError | RecursionError) -> Callable[[], Mapping[str, object]]:
    """A row that the end of the file cuts off. Raises DataError if the error is before the end."""
    at_end = isinstance(error, json.JSONDecodeError) and (
        error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    )
    if not at_end:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{where}: not JSON ({reason}); the rows after it cannot be read, correct the file") from error
    return partial(_cut_off, f"the last object is cut off ({error}); is the file complete?")


def _json_columns(value: object, is_utf8: bool) -> Mapping[str, object]:
    try:
        return checked_columns(value, LIST_FORM)
    except RowError as error:
        if error.kind == "bad character" and not is_utf8:
            raise RowError("a text is not UTF-8", "not UTF-8") from error
        raise


def _table_columns(header: list[str], cells: list[str] | csv.Error, is_cut: bool) -> Mapping[str, object]:
    if isinstance(cells, csv.Error):
        if "unexpected end of data" in str(cells):
            _cut_off("a quote is never closed, or the file is cut off")
        raise RowError(f"not CSV ({cells}); double a quote inside a quoted cell", "not parsed")
    if not cells:
        raise RowError("blank line", "blank line")
    if len(cells) != len(header):
        if is_cut and len(cells) < len(header):
            _cut_off(f"the last line is cut off ({len(cells)} cells of {len(header)}); is the file complete?")
        raise RowError(
            f"{len(cells)} cells, but the header has {len(header)}; quote cells that hold a comma", "not parsed"
        )
    if any(map(_NOT_UTF8.search, cells)):
        raise RowError("a cell is not UTF-8", "not UTF-8")
    columns = {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}
    return checked_columns(columns, TABLE_FORM)


_ROLE = re.compile(r"[\"']role[\"']")
_FIRST_MESSAGE = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")


def messages_in(cell: str) -> object | None:
    """The list of messages that a cell holds, in JSON or as Python prints it (pandas and datasets write CSV so), each
    an object with `role` and `content`; None for a text.

    Raises RowError for what begins as such a list and is none.
    """
    if not cell.lstrip().startswith("[") or not _ROLE.search(cell):
        return None
    for read in (_decoder().decode, ast.literal_eval):
        try:
            value = read(cell.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        messages = cast(Sequence[object], value)
        is_list = all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in messages)
        return messages if is_list else None
    if _FIRST_MESSAGE.match(cell):
        raise RowError(
            "a cell begins as a list of messages, but is neither JSON nor Python; write the rows as JSONL or Parquet",
            "not parsed",
        )
    return None


def _cell(name: str, cell: str) -> object:
    """Value of a cell: of `JSON_CELLS` None if it is empty, the text itself if it is no JSON."""
    if name in _MESSAGE_CELLS:
        return messages_in(cell) or cell
    if name not in JSON_CELLS:
        return cell
    if not cell.strip():
        return None
    try:
        return _decoder().decode(cell.lower() if cell.lower() in ("true", "false") else cell)
    except (ValueError, RecursionError):
        return cell


def _csv_records(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """First line and cells of every record; the error in place of cells where a record is no CSV."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        first_line = reader.line_num + 1
        # The limit on a cell is one number for the whole process: raised for each record, then put back.
        limit_before = csv.field_size_limit(_MAX_CELL)
        try:
            record: list[str] | csv.Error = next(reader)
        except csv.Error as error:
            record = error
        except StopIteration:
            return
        finally:
            csv.field_size_limit(limit_before)
        yield first_line, record


def _decoder() -> json.JSONDecoder:
    """JSON as the standard has it: NaN and repeated keys become `Refused`."""
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refused_constant)


def _unique_keys(pairs: list[tuple[str, object]]) -> object:
    columns = dict(pairs)
    if len(columns) == len(pairs):
        return columns
    repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return Refused(f"key `{repeated}` is given twice in one object")


def _refused_constant(name: str) -> object:
    return Refused(f"{name} is no JSON number; write null or a finite number")


def _cut_off(reason: str) -> NoReturn:
    raise RowError(reason, "cut off")


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


_COLUMNS_FORM = "a table with one column for each name"
_ROWS_AT_A_TIME = 1000


def parquet_rows(path: Path) -> Iterator[Candidate]:
    """The rows of a Parquet file, counted from 1. Raises DataError if it is damaged, MissingDependencyError without
    pyarrow.
    """
    parquet = library("pyarrow.parquet", f"{path} is Parquet")
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
    datasets = library("datasets", f"{folder} is a folder of the datasets library")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be read by the datasets library ({_first_line(error)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = _pick(loaded, split, str(folder))
    elif split is not None:
        raise DataError(f"{folder} has no splits, but {split!r} was asked for; leave out `:{split}`")
    yield from _numbered_rows(loaded.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME), folder.name)


def hub_rows(name: str, config: str | None, split: str | None) -> Iterator[Candidate]:
    """The rows of a data set on the hub, counted from 1. With HF_HUB_OFFLINE=1 the hub's own cache answers alone.

    Raises DataError if it cannot be loaded, MissingDependencyError without `datasets`.
    """
    datasets = library("datasets", f"{name} is taken for a data set on the hub, because no file has that name")
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
    batches = _pick(loaded, split, name).with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME)
    yield from _numbered_rows(batches, f"{name}/{config}" if config else name)


def _pick(splits: Mapping[str, Any], split: str | None, name: str) -> Any:
    """The data set of the wanted split: the one asked for, else `train`, else the only one."""
    wanted = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        known = ", ".join(splits) or "none"
        raise DataError(f"{name} has no split {wanted!r}; it has {known}. Name one after a colon, {name}:SPLIT")
    return splits[wanted]


def _numbered_rows(batches: Iterable[Any], name: str) -> Iterator[Candidate]:
    for number, columns in enumerate(chain.from_iterable(map(_batch_rows, batches)), start=1):
        yield f"{name}:{number}", columns


def _batch_rows(batch: Any) -> Iterable[Callable[[], Mapping[str, object]]]:
    """One function for each row of an Arrow batch or table, which gives its columns."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # some row holds bytes that are no UTF-8: take them one at a time to find it
        return [partial(_one_row, batch, index) for index in range(batch.num_rows)]
    return [partial(checked_columns, row, _COLUMNS_FORM) for row in rows]


def _one_row(batch: Any, index: int) -> Mapping[str, object]:
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise RowError("a text is not UTF-8", "not UTF-8") from error
    return checked_columns(row, _COLUMNS_FORM)


def library(name: str, reason: str) -> Any:
    """The module `name` of the extra `data`. Raises MissingDependencyError, which gives the `reason` for it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{reason}, which needs the package {name.partition('.')[0]}; run `pip install 'tunesmith[data]'`, "
            "or give JSONL, JSON or CSV"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
