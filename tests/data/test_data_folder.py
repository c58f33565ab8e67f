"""A source below the data folder is found by its variable, and where it is missing the error says what to take."""

from pathlib import Path

import pytest
from formats import write_folder, write_jsonl

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.sources import VARIABLE, source_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "all"))
    (tmp_path / "all" / "math").mkdir(parents=True)
    return tmp_path / "all"


def test_a_file_below_the_folder_is_read_and_its_rows_named(folder: Path) -> None:
    write_jsonl(folder / "math" / "sums.jsonl", [{"prompt": "1 + 1 ="}])
    (prompt,) = load_prompts("data:math/sums.jsonl")
    assert (prompt.id, prompt.content) == ("sums.jsonl:1", "1 + 1 =")


def test_a_saved_folder_below_it_is_read(folder: Path) -> None:
    write_folder(folder / "math" / "saved", [{"prompt": "2"}])
    assert [read()["prompt"] for _, read in source_rows("data:math/saved")] == ["2"]


def test_a_split_of_a_folder_called_data_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    datasets.DatasetDict({"dev": datasets.Dataset.from_list([{"prompt": "mine"}])}).save_to_disk("data")
    assert [read()["prompt"] for _, read in source_rows("data:dev")] == ["mine"]


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("instruction/oasst1.en-validation.best-replies.jsonl.gz", "timdettmers/openassistant-guanaco:test"),
        ("preference/hh-rlhf.helpful-base.test.jsonl.gz", "Anthropic/hh-rlhf:test"),
        ("sentiment/imdb5k.text2vec.jsonl.gz", "stanfordnlp/imdb:train"),
        ("math/gsm8k.train.jsonl.gz", "openai/gsm8k/main:train"),
        ("math/other.jsonl", "give a file, a folder or a hub id"),
    ],
)
def test_without_the_variable_the_data_set_on_the_hub_is_named(
    name: str, hub_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(DataError, match=rf"{VARIABLE} names, but it is not set; .*{hub_id}"):
        source_rows(f"data:{name}")


def test_a_variable_that_names_no_folder_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder / "gone"))
    with pytest.raises(DataError, match=r"names .*gone, which is no folder; correct it, or take openai/gsm8k"):
        source_rows("data:math/gsm8k.train.jsonl.gz")


def test_a_missing_file_is_named_with_the_nearest_or_the_hub_id(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no math/gsm8k.train.jsonl.gz; put it there, or take openai/gsm8k"):
        source_rows("data:math/gsm8k.train.jsonl.gz")
    write_jsonl(folder / "math" / "gsm8k.test.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"did you mean data:math/gsm8k\.test\.jsonl\?"):
        source_rows("data:math/gsm8k.tst.jsonl")


@pytest.mark.parametrize("name", ["../rows.jsonl", "math/../../rows.jsonl"])
def test_a_path_out_of_the_folder_is_refused(name: str, folder: Path) -> None:
    write_jsonl(folder.parent / "rows.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match="leads out of the folder"):
        source_rows(f"data:{name}")


def test_several_files_below_it_are_read_by_a_star_and_missed_with_the_hub_id(folder: Path) -> None:
    for number in (1, 2):
        write_jsonl(folder / "math" / f"part-{number}.jsonl", [{"prompt": str(number)}])
    assert [prompt.content for prompt in load_prompts("data:math/part-*.jsonl")] == ["1", "2"]
    with pytest.raises(DataError, match=r"has no math/gsm8k\.\*\.gz; put it there, or take openai/gsm8k"):
        source_rows("data:math/gsm8k.*.gz")
