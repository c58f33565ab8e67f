"""Data that people hand over in Python: tables of other libraries, splits, single rows, and what has no order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tunesmith import ModelSection, SamplingParams, Scorer, load_policy, load_prompts, open_engine, train
from tunesmith.base.core.errors import DataError, InputError, RewardError
from tunesmith.collect.data.demonstrations import load_demonstrations
from tunesmith.collect.data.pairs import load_judgements, load_preferences
from tunesmith.collect.data.tables import as_rows

ROWS = [{"prompt": "The cat was", "answer": 1}, {"prompt": "The dog was", "answer": 2}]
TABLES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "polars, lazy": pl.LazyFrame,
    "arrow": pa.Table.from_pylist,
    "datasets": datasets.Dataset.from_list,
    "datasets, with torch's format": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "datasets, streamed": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "dict of columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "dict of arrays": lambda rows: {name: np.array([row[name] for row in rows]) for name in rows[0]},
    "dict of Series": lambda rows: {name: pd.Series([row[name] for row in rows]) for name in rows[0]},
    "generator": lambda rows: (row for row in rows),
    "tuple": tuple,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_read_as_its_rows(kind: str) -> None:
    """People pass the table that they have; its column names were trained on as prompts. Reported: issue 45.8."""
    prompts = load_prompts(TABLES[kind](ROWS))
    assert [prompt.content for prompt in prompts] == ["The cat was", "The dog was"]
    assert [dict(prompt.columns) for prompt in prompts] == [{"answer": 1}, {"answer": 2}]
    assert all(type(prompt.columns["answer"]) is int for prompt in prompts)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_demonstrations_and_pairs_and_judgements_too(kind: str) -> None:
    """The same tables for SFT, reward models, DPO and KTO. Reported: issue 45.8."""
    demonstrations = load_demonstrations(TABLES[kind]([{"prompt": "2 + 2 =", "completion": " 4"}]))
    assert [(one.prompt.content, one.completion) for one in demonstrations] == [("2 + 2 =", " 4")]
    rows = [{"prompt": "I am", "chosen": " happy", "rejected": " sad"}]
    assert [(pair.chosen, pair.rejected) for pair in load_preferences(TABLES[kind](rows))] == [(" happy", " sad")]  # type: ignore[union-attr]
    judged = load_judgements(TABLES[kind]([{"prompt": "I am", "completion": " happy", "label": True}]))
    assert [(one.completion, one.is_wanted) for one in judged] == [(" happy", True)]  # type: ignore[union-attr]


def test_missing_values_and_arrays_of_a_data_frame(tmp_path: Path) -> None:
    """A DataFrame holds NaN for nothing, and NumPy arrays for the lists of a Parquet file. Reported: issue 45.26."""
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    rows = [
        {"prompt": [{"role": "user", "content": "Hi"}], **sides, "margin": 1.5, "tie": None},
        {"prompt": [{"role": "user", "content": "Ho"}], **sides, "margin": None, "tie": True},
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    pairs = load_preferences(pd.read_parquet(tmp_path / "pairs.parquet"))
    assert [(pair.margin, pair.tie) for pair in pairs] == [(1.5, False), (None, True)]  # type: ignore[union-attr]
    assert pairs[0].prompt.content == ({"role": "user", "content": "Hi"},)


def test_columns_taken_out_of_a_table_are_texts() -> None:
    """People pass one column: `frame["prompt"]`. Reported: issue 45.8."""
    for column in (
        pd.DataFrame(ROWS)["prompt"],
        pl.DataFrame(ROWS)["prompt"],
        np.array(["The cat was", "The dog was"]),
    ):
        assert [prompt.content for prompt in load_prompts(column)] == ["The cat was", "The dog was"]
    column = datasets.Dataset.from_list(ROWS)["prompt"]
    assert [prompt.content for prompt in load_prompts(column)] == ["The cat was", "The dog was"]


@pytest.mark.parametrize(
    "splits",
    [
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)}),
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)},
        {"train": pd.DataFrame(ROWS), "test": pd.DataFrame(ROWS)},
        {"train": ROWS, "test": ROWS},
        {"first_half": datasets.Dataset.from_list(ROWS)},
    ],
    ids=["DatasetDict", "dict of Datasets", "dict of DataFrames", "dict of lists", "other names"],
)
@pytest.mark.parametrize("name", ["prompts", "demonstrations", "pairs"])
def test_splits_ask_for_one_of_them(splits: Any, name: str, tmp_path: Path) -> None:
    """`load_dataset` without `split` gives several; the word `train` was trained on. Reported: issue 45.8."""
    start = {"prompts": train.ppo, "demonstrations": train.sft, "pairs": train.dpo}[name]
    with pytest.raises(DataError, match=rf"^{name} holds several splits \({', '.join(splits)}\).*give one of them"):
        start(model="tiny:llama", **{name: splits}, run={"dir": str(tmp_path)})  # type: ignore[operator]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "The cat was"}, r"prompts is a dict, .*`prompt` is text"),
        ({"role": "user", "content": "Hi"}, r"prompts is a dict, .*`role` is text"),
        ({}, r"prompts is a dict, .*it is empty"),
        ({"prompt": ["a", "b"], "answer": [1]}, r"different lengths \(`prompt` has 2, `answer` has 1\)"),
        ({"The cat was", "The dog was"}, r"prompts is a set, which has no order"),
        (b"The cat was", r"prompts is a bytes"),
        (7, r"prompts is a number; give a list of rows"),
        (pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), r"several columns `prompt`"),
    ],
)
def test_what_is_no_table_is_refused(given: Any, message: str) -> None:
    """A single row, a set, bytes: nothing of it may be trained on by its keys. Reported: issue 45.8."""
    with pytest.raises(DataError, match=message):
        train.ppo(model="tiny:llama", prompts=given)


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    """`prompts=open(file)` gave the lines of the file, JSON and all, as prompts. Reported: issue 45.8."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    with (tmp_path / "prompts.jsonl").open() as file, pytest.raises(DataError, match=r"an open file; give its name"):
        load_prompts(file)  # type: ignore[arg-type]
    assert load_prompts(tmp_path / "prompts.jsonl")[0].content == "The cat was"


def test_rewards_without_an_order_or_none_at_all(tmp_path: Path) -> None:
    """`reward=[]` scored by sentiment, and a set of functions has no first one. Reported: issue 45.8."""
    for rewards, message in (
        ([], "no reward is given; give at least one"),
        ((), "no reward is given; give at least one"),
        ({"length", "sentiment"}, "the reward is a set; give one reward, or a list of them"),
        ({"source": "length"}, "the reward is a dict"),
    ):
        with pytest.raises(RewardError, match=message):
            train.ppo(model="tiny:llama", prompts=["Hi"], reward=rewards, run={"dir": str(tmp_path)})  # type: ignore[arg-type]
        with pytest.raises(RewardError, match=message):
            Scorer(rewards)  # type: ignore[arg-type]
    assert Scorer("length").names == ("length",)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_an_engine_asks_for_prompts() -> None:
    """Texts and tables go to an engine without `load_prompts`. Reported: issue 45.8."""
    loaded = load_policy(ModelSection(name="tiny:llama"))
    engine = open_engine(loaded.model, loaded.tokenizer)
    for given in (["The cat was"], pd.DataFrame(ROWS), "The cat was"):
        with pytest.raises(InputError, match=r"must be a list of Prompt records; tunesmith.load_prompts makes them"):
            engine.generate(given, 1, SamplingParams(2))  # type: ignore[arg-type]
    assert len(engine.generate(load_prompts(pd.DataFrame(ROWS)), 1, SamplingParams(2))) == 2


def test_rows_of_a_list_are_not_copied() -> None:
    """A million rows in a list are read as they are. Reported: issue 45.8."""
    assert as_rows(ROWS, "prompts") is ROWS


CHATS = [
    {
        "prompt": [{"role": "user", "content": f"It's {i}"}],
        "completion": [{"role": "assistant", "content": "one"}],
        "chosen": [{"role": "assistant", "content": "one"}],
        "rejected": [{"role": "assistant", "content": 'a "two"'}],
    }
    for i in range(3)
]


@pytest.mark.parametrize("table", [pd.DataFrame, datasets.Dataset.from_list])
def test_conversations_in_a_csv_of_pandas_are_conversations(table: Callable[..., Any], tmp_path: Path) -> None:
    """People save chats by to_csv, which writes them as Python prints them; that was trained on. Reported: a tester."""
    file = tmp_path / "chats.csv"
    table(CHATS).to_csv(file, index=False)
    assert load_preferences(str(file))[0].prompt.content == ({"role": "user", "content": "It's 0"},)
    assert load_preferences(str(file))[0].rejected == ({"role": "assistant", "content": 'a "two"'},)
    assert load_demonstrations(str(file))[0].completion == ({"role": "assistant", "content": "one"},)
    assert load_prompts(str(file))[2].content == ({"role": "user", "content": "It's 2"},)


def test_a_cell_that_begins_as_messages_and_is_none_is_refused(tmp_path: Path) -> None:
    """People save arrays of messages, which pandas prints without commas. Reported: a tester."""
    file = tmp_path / "chats.csv"
    file.write_text("prompt\n\"[{'role': 'user', 'content': 'Hi'} {'role': 'assistant', 'content': 'Hello'}]\"\n")
    with pytest.raises(DataError, match="begins as a list of messages, but is neither JSON nor Python"):
        load_prompts(str(file))


def test_a_data_sets_transform_makes_its_rows() -> None:
    """People rename and join columns by set_transform; the raw columns were trained on. Reported: a tester."""
    data = datasets.Dataset.from_dict({"q": ["raw"], "a": ["answer"]})
    data.set_transform(lambda b: {"prompt": [f"Q: {q}" for q in b["q"]], "completion": [f" A: {a}" for a in b["a"]]})
    (found,) = load_demonstrations(data)
    assert (found.prompt.content, found.completion) == ("Q: raw", " A: answer")


def test_labels_may_be_the_numbers_of_a_column_with_gaps() -> None:
    """People load labels by pandas, where a column with gaps has floats. Reported: a tester."""
    rows = [{"prompt": "a", "completion": " b", "label": label} for label in (1.0, 0.0, "1.0", "0.0", 1, "false")]
    assert [one.is_wanted for one in load_judgements(rows)] == [True, False, True, False, True, False]
    with pytest.raises(DataError, match=r"`label` is 0\.5; give true"):
        load_judgements([{"prompt": "a", "completion": " b", "label": 0.5}])
