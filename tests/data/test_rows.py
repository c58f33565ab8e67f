import gzip
import json
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.rows import Row, RowError
from tunesmith.collect.data.sources import parse_rows


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path: Path) -> list[Row]:
    return parse_rows(path, lambda row: row)


def message_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        rows_of(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_rows_carry_file_and_line(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", '{"a": 1}\n{"a": "\\u00e9"}\n')
    assert rows_of(path) == [Row("rows.jsonl:1", {"a": 1}), Row("rows.jsonl:2", {"a": "é"})]


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1}\n{"a": 2}',
        '{"a": 1}\n{"a": 2}\n\n  \n',
        '{"a": 1}\r\n{"a": 2}\r\n',
        b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n',
        gzip.compress(b'{"a": 1}\n{"a": 2}\n'),
    ],
    ids=["no last line end", "empty lines at the end", "CRLF", "byte order mark", "gzip without the suffix"],
)
def test_harmless_forms_are_read(tmp_path: Path, content: str | bytes):
    assert [row.columns for row in rows_of(write(tmp_path / "rows.jsonl", content))] == [{"a": 1}, {"a": 2}]


def test_gzip_file_gives_the_same_rows(tmp_path: Path):
    write(tmp_path / "rows.jsonl.gz", gzip.compress(b'{"a": 1}\n'))
    assert rows_of(tmp_path / "rows.jsonl.gz") == [Row("rows.jsonl.gz:1", {"a": 1})]


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", json.dumps({"a": "x\u2028y\x85z"}, ensure_ascii=False) + "\n")
    assert [row.columns for row in rows_of(path)] == [{"a": "x\u2028y\x85z"}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "blank line"),
        (b"   ", "blank line"),
        (b"[1, 2]", "a list, not an object"),
        (b'"text"', "text, not an object"),
        (b"{a: 1}", "not JSON (Expecting property name"),
        (b'{"a": 1} {"a": 2}', "not JSON (Extra data"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1, "a": 2}', "key `a` is given twice"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 8"),
        (b'{"a": "\\ud83d"}', "lone surrogate"),
        (b'{"a": {"b": ["\\udc00"]}}', "lone surrogate"),
        (b'{"a": "\\u0000"}', "NUL"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_count(tmp_path: Path, line: bytes, reason: str):
    message = message_of(write(tmp_path / "rows.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 3}\n'))
    assert "1 bad row of 3" in message
    assert "rows.jsonl:2: " in message
    assert reason in message


def test_all_bad_lines_are_counted_and_the_first_ten_shown(tmp_path: Path):
    message = message_of(write(tmp_path / "rows.jsonl", '{"a": 1}\n' + "oops\n" * 12))
    assert "12 bad rows of 13" in message
    assert "rows.jsonl:11: " in message
    assert "rows.jsonl:12: " not in message
    assert "and 2 more" in message


def test_a_cut_off_last_line_is_called_so(tmp_path: Path):
    message = message_of(write(tmp_path / "rows.jsonl", '{"a": 1}\n{"a": "unfin'))
    assert "rows.jsonl:2: the last line is cut off" in message


def test_a_bad_last_line_with_its_line_break_is_not_called_cut_off(tmp_path: Path):
    message = message_of(write(tmp_path / "rows.jsonl", '{"a": 1}\n{"a": "unfin\n'))
    assert "rows.jsonl:2: not JSON" in message
    assert "cut off" not in message


def test_a_list_of_rows_is_named_by_index():
    with pytest.raises(DataError, match=r"1 bad row of 2 in the list of rows; .*\s+rows\[1\]: a number, not an object"):
        parse_rows([{"a": 1}, 7], lambda row: row)


def test_reasons_of_the_parser_and_of_the_file_are_counted_together(tmp_path: Path):
    def parse(row: Row) -> object:
        if "a" not in row.columns:
            raise RowError("no a")
        return row

    path = write(tmp_path / "rows.jsonl", '{"a": 1}\n{"b": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"(?s)2 bad rows of 3 .*rows.jsonl:2: no a\n.*rows.jsonl:3: not JSON"):
        parse_rows(path, parse)


def test_files_that_hold_no_rows_are_refused(tmp_path: Path):
    assert "no rows" in message_of(write(tmp_path / "empty.jsonl", ""))
    assert "no rows" in message_of(write(tmp_path / "blank.jsonl", "\n\n"))
    assert "is a folder" in message_of(tmp_path)
    assert "UTF-16" in message_of(write(tmp_path / "wide.jsonl", '{"a": 1}'.encode("utf-16")))
    assert "not gzipped" in message_of(write(tmp_path / "plain.jsonl.gz", '{"a": 1}\n'))
    assert "damaged or cut-off" in message_of(write(tmp_path / "cut.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-12]))


def test_a_missing_file_suggests_the_closest_name(tmp_path: Path):
    write(tmp_path / "prompts.jsonl", '{"a": 1}\n')
    assert f"did you mean {tmp_path / 'prompts.jsonl'}?" in message_of(tmp_path / "promts.jsonl")
    assert "does not exist" in message_of(tmp_path / "nowhere" / "x.jsonl")


def test_a_repeated_id_is_named_with_its_first_place(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", '{"id": 1}\n{"id": "1"}\n{"id": null}\n{"id": null}\n{"id": 1}\n')
    with pytest.raises(DataError, match=r"1 bad row of 5 .*\s+rows.jsonl:5: id '1' is already at rows.jsonl:1"):
        rows_of(path)
