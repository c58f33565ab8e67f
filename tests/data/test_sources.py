"""Every format gives the same rows, is chosen by the name or the content of its path, and names what it cannot read."""

import os
import tempfile
from pathlib import Path

import pytest
from formats import WRITERS, write_all, write_folder, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.sources import parse_rows, source_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
HARD = [
    "\U0001f600\U0001f468‍\U0001f469",
    "שלום עולם",
    "\u202eabc\u202c",
    'a "quoted", comma',
    " two\r\nlines\r ",
    "\ufeffmark",
    "\u2028\x85\x0b",
]


def columns_of(path: Path) -> list[object]:
    return [dict(row.columns) for row in parse_rows(path, lambda row: row)]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.fixed_dictionaries({"prompt": TEXT, "note": TEXT}), min_size=1, max_size=4))
def test_text_survives_every_format_unchanged(rows: list[dict[str, str]]):
    with tempfile.TemporaryDirectory() as folder:
        for path in write_all(Path(folder), rows):
            assert columns_of(path) == rows, path.name


def test_emoji_right_to_left_and_line_ends_survive_every_format(tmp_path: Path):
    rows = [{"prompt": text, "note": text[::-1]} for text in HARD]
    for path in write_all(tmp_path, rows):
        assert columns_of(path) == rows, path.name


def test_a_text_of_a_megabyte_survives_every_format(tmp_path: Path):
    rows = [{"prompt": 'long, "é" ' * 100_000, "note": "x"}, {"prompt": "short", "note": "y"}]
    for path in write_all(tmp_path, rows):
        assert columns_of(path) == rows, path.name


def test_conversations_and_numbers_survive_the_formats_that_have_them(tmp_path: Path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rows = [{"messages": messages, "margin": 0.5, "tie": True}, {"messages": messages[:1], "margin": 1.0, "tie": False}]
    for path in write_all(tmp_path, rows):
        assert columns_of(path) == rows, path.name


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_is_named_by_its_file_and_line_or_number(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path / name, [{"prompt": "a"}, {"prompt": "b"}])
    places = {"rows.csv": [2, 3], "rows.json": [2, 5]}.get(name, [1, 2])
    assert [where for where, _ in source_rows(path)] == [f"{name}:{place}" for place in places]


def test_capital_letters_in_an_extension_do_not_matter(tmp_path: Path):
    assert columns_of(write_jsonl(tmp_path / "ROWS.JSONL", [{"a": 1}])) == [{"a": 1}]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rows.txt", r"unknown kind of file; name it with one of \.jsonl, .*\.parquet"),
        ("nothing.csv", "nothing.csv does not exist"),
        ("rows.tx", r"does not exist; did you mean .*rows\.txt"),
        ("empty", r"is a folder, but none that the datasets library saved \(it has no state.json"),
        ("a:b", "does not exist"),
        ("x" * 5000, "cannot be the name of a file"),
    ],
)
def test_a_source_that_cannot_be_read_says_why(name: str, reason: str, tmp_path: Path):
    (tmp_path / "rows.txt").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=reason):
        list(source_rows(tmp_path / name))


def test_a_split_of_a_saved_folder_is_named_behind_a_colon(tmp_path: Path):
    import datasets

    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    assert [read()["prompt"] for _, read in source_rows(tmp_path / "both")] == ["train"]
    assert [read()["prompt"] for _, read in source_rows(f"{tmp_path}/both:test")] == ["test"]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        list(source_rows(f"{tmp_path}/both:dev"))
    write_folder(tmp_path / "one", [{"prompt": "a"}])
    with pytest.raises(DataError, match="has no splits, but 'train' was asked for"):
        list(source_rows(f"{tmp_path}/one:train"))


def test_a_local_folder_goes_before_a_hub_id_of_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "org" / "name", [{"prompt": "mine"}])
    assert [read()["prompt"] for _, read in source_rows("org/name")] == ["mine"]


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        list(source_rows(path))


def test_a_name_with_a_star_is_all_files_of_that_name_in_their_order(tmp_path: Path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"part-{name}.jsonl", [{"text": name}])
    write_jsonl(tmp_path / "other.jsonl", [{"text": "x"}])
    rows = [(where, read()["text"]) for where, read in source_rows(tmp_path / "part-*.jsonl")]
    assert rows == [("part-a.jsonl:1", "a"), ("part-b.jsonl:1", "b"), ("part-c.jsonl:1", "c")]
    with pytest.raises(DataError, match=r"no file is named .*none-\*\.jsonl"):
        source_rows(tmp_path / "none-*.jsonl")
