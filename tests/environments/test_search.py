import json
import math
import os
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from tunesmith.base.core.errors import InputError
from tunesmith.learn.environments.tools.search import FileSearch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of five passages, beside a file outside."""
    inside = tmp_path / "documents"
    (inside / "deep").mkdir(parents=True)
    (inside / "animals.md").write_text("The cat sat on the mat.\n\nA dog chased the cat; the cat ran.\n")
    (inside / "deep" / "trees.txt").write_text("An oak is a tree.\r\n\r\nA tree in winter.\n", encoding="utf-8")
    (inside / "rows.jsonl").write_text(json.dumps({"title": "Rivers", "text": "The Rhine flows.", "id": 3}) + "\n")
    (tmp_path / "secret.txt").write_text("The secret is xyzzy.")
    return inside


def test_the_passage_with_more_of_the_words_comes_first(folder: Path) -> None:
    answer = FileSearch(folder).search("cat dog")
    assert answer == "[1] animals.md\nA dog chased the cat; the cat ran.\n\n[2] animals.md\nThe cat sat on the mat."


def test_scores_are_those_of_the_formula(tmp_path: Path) -> None:
    texts = ["red red blue", "red", "blue green green green green", "red blue", "green"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    mean = sum(len(text.split()) for text in texts) / len(texts)

    def score(text: str) -> float:
        total = 0.0
        for word in ("blue", "red"):
            having, times = sum(word in other.split() for other in texts), text.split().count(word)
            rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            total += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(text.split()) / mean))
        return total

    order = sorted(range(len(texts)), key=lambda number: -score(texts[number]))
    wanted = [f"[{rank}] {number}.txt" for rank, number in enumerate(order[:4], 1)]
    found = FileSearch(tmp_path, max_results=4).search("Red BLUE?").splitlines()
    assert [line for line in found if line.startswith("[")] == wanted


def test_equal_scores_are_in_the_order_of_path_and_position(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text("one apple\n\ntwo apple")
    found = FileSearch(tmp_path, max_results=9).search("apple").split("\n\n")
    names = [part.split()[1] + " " + part.split()[2] for part in found]
    assert names == ["a.txt one", "a.txt two", "b.txt one", "b.txt two", "c.txt one", "c.txt two"]


def test_a_row_of_json_is_a_passage_of_its_texts(folder: Path) -> None:
    assert FileSearch(folder).search("rhine") == "[1] rows.jsonl\nRivers\nThe Rhine flows."


def test_rows_that_are_no_objects_are_passages_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("not json\n[1, 2]\n" + '{"n": 5}\n' + "[" * 100_000)
    assert FileSearch(tmp_path).search("5") == '[1] rows.jsonl\n{"n": 5}'


def test_a_long_passage_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1000)
    assert FileSearch(tmp_path, max_chars=9).search("word") == "[1] long.txt\nword word ..."


def test_links_that_lead_outside_are_not_followed(folder: Path) -> None:
    os.symlink(folder.parent / "secret.txt", folder / "link.txt")
    os.symlink(folder.parent, folder / "up")
    os.symlink(folder / "loop.txt", folder / "loop.txt")
    os.symlink(folder / "animals.md", folder / "zoo.md")
    search = FileSearch(folder, max_results=9)
    assert search.search("xyzzy") == "No passage has any of these words: xyzzy"
    assert search.num_skipped == 2
    assert "zoo.md" in search.search("dog")


def test_what_is_no_text_is_skipped_and_counted(folder: Path) -> None:
    (folder / "binary.txt").write_bytes(b"cat\xff\xfe")
    (folder / "zeros.md").write_bytes(b"cat\0")
    (folder / "picture.png").write_bytes(b"cat")
    os.mkfifo(folder / "pipe.txt")
    search = FileSearch(folder, max_results=9)
    assert search.num_skipped == 3
    assert search.search("cat").count("[") == 2


@pytest.mark.parametrize("query", ["", " ?!", "\ud800"])
def test_a_query_without_words_is_an_error_of_the_model(folder: Path, query: str) -> None:
    assert FileSearch(folder).search(query) == "Error: the query has no words"


def test_a_long_query_is_answered(folder: Path) -> None:
    assert FileSearch(folder).search("cat " * 100_000).startswith("[1] animals.md")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"no text that can be searched \(1 files were skipped\).*\.jsonl"):
        FileSearch(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        FileSearch(tmp_path / "none")
    with pytest.raises(InputError, match="max_results is 0"):
        FileSearch(tmp_path, max_results=0)


def test_its_docstring_makes_a_schema(folder: Path) -> None:
    function = get_json_schema(FileSearch(folder).search)["function"]
    assert function["name"] == "search"
    assert function["parameters"]["required"] == ["query"]
