"""Parquet, saved folders and the hub: bad rows are named, damage and missing packages are said."""

import shutil
import sys
from pathlib import Path

import pytest
from formats import write_folder, write_jsonl, write_parquet

from tunesmith.base.core.errors import DataError, MissingDependencyError
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.rows import BadRows
from tunesmith.collect.data.sources import parse_rows


def test_bad_rows_of_a_table_are_named_by_number(tmp_path: Path):
    rows = [{"prompt": "a"}, {"prompt": None}, {"prompt": "nul \0"}, {"prompt": ""}]
    for source in (write_parquet(tmp_path / "p.parquet", rows), write_folder(tmp_path / "p", rows)):
        with pytest.raises(
            DataError, match=r"(?s)3 bad rows of 4 .*p\w*.*:2: `prompt` is null.*:3: .*NUL.*:4: `prompt` is empty"
        ):
            load_prompts(source)
        bad = BadRows(skip=True)
        assert [prompt.content for prompt in load_prompts(source, None, bad)] == ["a"]
        assert bad.finish().reasons == {"bad character": 1, "empty": 1, "missing column": 1}


def test_a_row_that_is_not_utf8_is_found_among_thousands(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    texts = [b"fine"] * 2500
    texts[1800] = b"\xff\xfe"
    column = pyarrow.array(texts, pyarrow.binary()).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"1 bad row of 2500 .*\s+p\.parquet:1801: a text is not UTF-8"):
        load_prompts(tmp_path / "p.parquet")


def test_damaged_tables_are_refused(tmp_path: Path):
    path = write_parquet(tmp_path / "p.parquet", [{"prompt": "a"}])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="is no Parquet file, or a damaged one"):
        load_prompts(path)
    folder = write_folder(tmp_path / "folder", [{"prompt": "a"}])
    (arrow,) = folder.glob("*.arrow")
    arrow.unlink()
    with pytest.raises(DataError, match="cannot be read by the datasets library"):
        load_prompts(folder)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow.parquet", "p.parquet"), ("datasets", "p"), ("datasets", "o/n")]
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_parquet(tmp_path / "p.parquet", [{"prompt": "a"}])
    write_folder(tmp_path / "p", [{"prompt": "a"}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf"{package.split('.')[0]}; run `pip install 'tunesmith\[data\]'`"
    ):
        load_prompts(name)


def test_text_formats_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "p.csv").write_text("prompt\na\n")
    (tmp_path / "p.json").write_text('[{"prompt": "a"}]')
    assert [load_prompts(tmp_path / name)[0].content for name in ("p.csv", "p.json")] == ["a", "a"]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as after a download of `org/toy`, with splits train and test."""
    import datasets

    source, cache = tmp_path / "toy", tmp_path / "cache"
    source.mkdir()
    write_jsonl(source / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    write_jsonl(source / "test.jsonl", [{"prompt": "c"}])
    datasets.load_dataset(str(source), cache_dir=str(cache))
    shutil.move(cache / "toy" / next((cache / "toy").iterdir()).name, cache / "org___toy" / "default")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.chdir(cache)


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_id_is_found_in_the_local_cache_without_a_network():
    assert [prompt.id for prompt in load_prompts("org/toy")] == ["org/toy:1", "org/toy:2"]
    (prompt,) = load_prompts("org/toy/default:test")
    assert (prompt.id, prompt.content) == ("org/toy/default:1", "c")
    with pytest.raises(DataError, match="org/toy has no split 'dev'; it has train, test"):
        load_prompts("org/toy:dev")


def test_an_unknown_hub_id_says_that_no_file_has_that_name_either():
    with pytest.raises(DataError, match=r"no file or folder is named 'org/nothing', .*HF_HUB_OFFLINE is set"):
        parse_rows("org/nothing", lambda row: row)
