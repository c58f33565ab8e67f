"""Labelled completions in TRL's columns, pairs as judgements, and every bad row by name."""

import json
from pathlib import Path

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Judgement, Pair, Ranking
from tunesmith.collect.data.pairs import load_judgements
from tunesmith.collect.data.rows import BadRows

ASK = [{"role": "user", "content": "Hi"}]
SAY = [{"role": "assistant", "content": "Yo"}]


def test_rows_with_a_label_are_judgements_and_others_are_preferences(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "a", "label": True, "rater": "r"},
        {"prompt": ASK, "completion": SAY, "label": False},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "completions": ["a", "b", "c"]},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third, fourth = load_judgements(file)
    assert isinstance(first, Judgement) and isinstance(second, Judgement)
    assert (first.prompt.id, first.completion, first.is_wanted) == (f"{file}:1", "a", True) or first.prompt.id
    assert first.prompt.columns == {"rater": "r"}
    assert second.prompt.is_conversational and not second.is_wanted
    assert isinstance(third, Pair) and isinstance(fourth, Ranking)


@pytest.mark.parametrize(
    ("label", "wanted"), [(True, True), (0, False), (1, True), ("true", True), ("False", False), ("0", False)]
)
def test_labels_are_truth_values_also_as_tables_write_them(label: object, wanted: bool) -> None:
    (row,) = load_judgements([{"prompt": "p", "completion": "a", "label": label}])
    assert isinstance(row, Judgement) and row.is_wanted is wanted


def test_a_table_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("prompt,completion,label\np, a,true\np, b,false\n")
    assert [row.is_wanted for row in load_judgements(file) if isinstance(row, Judgement)] == [True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "completion": "a", "label": "good"}, "`label` is 'good'; give true for a wanted completion"),
        ({"prompt": "p", "completion": "a", "label": 2}, "`label` is 2"),
        ({"prompt": "p", "completion": "a", "label": None}, "`label` is null"),
        ({"prompt": "p", "label": True}, "no column `completion`"),
        ({"completion": "a", "label": True}, "no column `prompt`"),
        ({"prompt": "p", "completion": " ", "label": True}, "`completion` is empty"),
        ({"prompt": "p", "completion": SAY, "label": True}, "give all columns in one form"),
        ({"prompt": "p", "completion": "a"}, "no column `label`"),
    ],
)
def test_a_bad_row_is_named_with_its_reason(row: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=f"judgements\\[0\\]: .*{message}"):
        load_judgements([row])


def test_bad_rows_can_be_dropped_and_are_counted() -> None:
    bad = BadRows(skip=True)
    rows = [{"prompt": "p", "completion": "a", "label": word} for word in (True, "maybe")]
    assert len(load_judgements(rows, bad=bad)) == 1
    assert bad.finish().reasons == {"wrong type": 1}


def test_no_source_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(DataError, match="name a file with `prompt`, `completion` and `label`"):
        load_judgements("")
