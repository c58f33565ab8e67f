"""JSON and CSV: every bad row is named by its line; what cannot be told apart is refused as a whole."""

import csv
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.rows import BadRows, Row, Tally
from tunesmith.collect.data.sources import parse_rows


def rows_of(path: Path, content: str | bytes, bad: BadRows | None = None) -> list[Row]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return parse_rows(path, lambda row: row, bad=bad)


def test_a_json_list_is_read_over_any_white_space(tmp_path: Path):
    content = '\n\n [\n{"a": 1},\n\n{"a":\n 2} , {"a": 3}\n]\n'
    rows = rows_of(tmp_path / "r.json", content)
    assert [(row.where, row.columns["a"]) for row in rows] == [("r.json:4", 1), ("r.json:6", 2), ("r.json:7", 3)]


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        ('{"a": 1, "a": 2}', "key `a` is given twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": {"b": 1, "b": 1}}', "key `b` is given twice"),
        ("7", "a number, not an object"),
        ("NaN", "NaN is no JSON number"),
        ('{"a": "\\ud83d"}', "lone surrogate"),
        ('{"a": "\\u0000"}', "NUL"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": ' + "[" * 400 + "]" * 400 + "}", ""),
    ],
)
def test_a_bad_element_of_a_json_list_is_named_by_its_line(element: str | bytes, reason: str, tmp_path: Path):
    middle = element if isinstance(element, bytes) else element.encode()
    content = b'[{"a": 1},\n' + middle + b',\n{"a": 3}]'
    if not reason:  # deep, but not too deep
        assert len(rows_of(tmp_path / "r.json", content)) == 3
        return
    with pytest.raises(DataError, match=rf"1 bad row of 3 .*\s+r\.json:2: .*{reason}"):
        rows_of(tmp_path / "r.json", content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": 1}\n{"a": 2}', "holds no list; .*one object on each line is named .jsonl"),
        ('"text"', "holds no list; expected a list of objects"),
        ("", "holds no list"),
        ("[]", "has no rows"),
        ('[{"a": 1},\n{a: 2},\n{"a": 3}]', r"r\.json:2: not JSON .*; the rows after it cannot be read"),
        ('[{"a": 1}\n{"a": 2}]', r"r\.json:2: not JSON \(expected , or \]"),
        ('[{"a": 1},]', "not JSON"),
        ('[{"a": 1}] 7', r"text after the end of the list"),
        ('[{"a": ' + "[" * 200_000, "nested too deeply"),
    ],
)
def test_a_json_file_whose_rows_cannot_be_told_apart_is_refused_even_when_skipping(
    content: str, reason: str, tmp_path: Path
):
    for bad in (BadRows(), BadRows(skip=True)):
        with pytest.raises(DataError, match=reason):
            rows_of(tmp_path / "r.json", content, bad)


@pytest.mark.parametrize("end", ['{"a": 2', '{"a": "unfin', '{"a": 2}', '{"a": 2},'])
def test_a_json_list_that_is_cut_off_loses_the_cut_row_alone(end: str, tmp_path: Path):
    content = '[{"a": 1},\n' + end
    with pytest.raises(DataError, match=r"1 bad row of \d .*\s+r\.json:2: .*cut off"):
        rows_of(tmp_path / "r.json", content)
    bad = BadRows(skip=True)
    rows = rows_of(tmp_path / "r.json", content, bad)
    assert [row.columns["a"] for row in rows] == ([1, 2] if "}" in end else [1])
    assert bad.finish().reasons == {"cut off": 1}


def test_csv_rows_are_named_by_the_line_on_which_they_begin(tmp_path: Path):
    rows = rows_of(tmp_path / "r.csv", 'a,b\n"two\nlines",x\nc,d\n\n')
    assert rows == [Row("r.csv:2", {"a": "two\nlines", "b": "x"}), Row("r.csv:4", {"a": "c", "b": "d"})]


def test_a_byte_order_mark_and_tabs_are_read(tmp_path: Path):
    assert rows_of(tmp_path / "r.csv", b"\xef\xbb\xbfa,b\n1,2\n")[0].columns == {"a": "1", "b": "2"}
    assert rows_of(tmp_path / "r.tsv", "a\tb\n1,5\t2\n")[0].columns == {"a": "1,5", "b": "2"}


def test_json_cells_become_values_and_text_stays_text(tmp_path: Path):
    content = 'prompt,margin,tie,scores\n12,0.5,True,"[1, 2]"\ntrue,,false,words\n'
    assert [row.columns for row in rows_of(tmp_path / "r.csv", content)] == [
        {"prompt": "12", "margin": 0.5, "tie": True, "scores": [1, 2]},
        {"prompt": "true", "tie": False, "scores": "words"},
    ]


@pytest.mark.parametrize(
    ("line", "reason", "kind"),
    [
        (b"", "blank line", "blank line"),
        (b"x", "1 cells, but the header has 2", "not parsed"),
        (b"x,y,z", "3 cells, but the header has 2; quote cells that hold a comma", "not parsed"),
        (b'"x"y,z', "not CSV", "not parsed"),
        (b"x,\xff", "not UTF-8", "not UTF-8"),
        (b"x,\x00", "NUL", "bad character"),
    ],
)
def test_a_bad_line_of_csv_is_named_with_its_reason(line: bytes, reason: str, kind: str, tmp_path: Path):
    content = b"a,b\n1,2\n" + line + b"\n3,4\n"
    with pytest.raises(DataError, match=rf"1 bad row of 3 .*\s+r\.csv:3: .*{reason}"):
        rows_of(tmp_path / "r.csv", content)
    bad = BadRows(skip=True)
    assert [row.columns["a"] for row in rows_of(tmp_path / "r.csv", content, bad)] == ["1", "3"]
    assert bad.finish() == Tally(3, 2, {kind: 1})


@pytest.mark.parametrize("end", ["3", '3,"4', '"3'])
def test_a_csv_file_that_is_cut_off_says_so(end: str, tmp_path: Path):
    with pytest.raises(DataError, match=r"1 bad row of 2 .*\s+r\.csv:3: .*cut off"):
        rows_of(tmp_path / "r.csv", f"a,b\n1,2\n{end}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a,a\n1,2\n", "column name 'a' is given twice"),
        ("a,\n1,2\n", "column name '' is empty"),
        ("a\n", "has no rows"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(content: str, reason: str, tmp_path: Path):
    with pytest.raises(DataError, match=reason):
        rows_of(tmp_path / "r.csv", content)


def test_reading_csv_leaves_the_limit_on_cells_as_it_was(tmp_path: Path):
    before = csv.field_size_limit()
    rows_of(tmp_path / "r.csv", "a\n" + "x" * 200_000 + "\n")
    assert csv.field_size_limit() == before
