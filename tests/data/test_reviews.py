"""Labelled reviews from rows and from sentence archives, and pieces of them."""

import zipfile
from pathlib import Path

import pytest
from formats import write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.reviews import Review, cleaned, load_reviews, pieces


def test_rows_become_reviews_without_html(tmp_path: Path) -> None:
    rows = [{"text": "A joy.<br /><br />Truly.", "label": 1}, {"text": '\\"Dull\\" it is', "label": 0}]
    write_jsonl(tmp_path / "r.jsonl", rows)
    assert load_reviews(str(tmp_path / "r.jsonl")) == [
        Review("r.jsonl:1", "A joy. Truly.", True),
        Review("r.jsonl:2", cleaned('"Dull" it is'), False),
    ]


def test_bad_rows_are_all_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "r.jsonl", [{"text": "a", "label": 2}, {"label": 1}, {"text": "<br />", "label": 0}])
    with pytest.raises(DataError, match=r"(?s)3 bad rows.*`label` is 2.*r\.jsonl:2.*r\.jsonl:3"):
        load_reviews(str(tmp_path / "r.jsonl"))


def test_an_archive_of_sentences_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("polarity/rt.neg", "dull\n\nbad film\n")
        archive.writestr("polarity/rt.pos", "warm\n")
        archive.writestr("polarity/README", "about")
    found = load_reviews(str(tmp_path / "s.zip"))
    assert [(one.id, one.text, one.is_positive) for one in found] == [
        ("polarity/rt.neg:1", "dull", False),
        ("polarity/rt.neg:3", "bad film", False),
        ("polarity/rt.pos:1", "warm", True),
    ]


def test_archives_that_are_none_or_hold_one_side_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read as a zip archive"):
        load_reviews(str(tmp_path / "x.zip"))
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("rt.pos", "warm\n")
    with pytest.raises(DataError, match=r"end in \.pos and \.neg"):
        load_reviews(str(tmp_path / "s.zip"))


@given(st.integers(1, 40), st.integers(1, 10), st.integers(0, 20), st.integers(0, 99))
def test_pieces_are_runs_of_words_of_the_asked_length_and_depend_on_the_seed_alone(
    num_words: int, low: int, more: int, seed: int
) -> None:
    review = Review("r", " ".join(f"w{i}" for i in range(num_words)), True)
    found = pieces(review, (low, low + more), 3, seed)
    assert found == pieces(review, (low, low + more), 3, seed)
    for piece in found:
        assert f" {piece} " in f" {review.text} "
        assert min(low, num_words) <= len(piece.split()) <= low + more
