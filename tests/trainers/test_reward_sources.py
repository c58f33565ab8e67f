"""A reward model of several sources: figures of each in metrics and report, the same pairs after a restart."""

import html
import json
from pathlib import Path
from typing import Any

import pytest
from recipes import Started, reward_recipe, training

from tunesmith.apps.workflows.evaluation import evaluate_reward
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import write_pairs
from tunesmith.learn.trainers.resume import resume


def written(folder: Path, name: str, *, longer_wins: bool, count: int = 40) -> str:
    """Pairs in which exclamation marks were preferred, and the answer that has them is longer or shorter."""
    good, poor = ("wow!!! so good, what a fine thing!", "meh") if longer_wins else ("wow!!!", "meh, nothing of note.")
    rows = [Pair(Prompt(f"{name} {i}", f"{name} {i}"), f"{good} {i}", f"{poor} {i}") for i in range(count)]
    write_pairs(folder / f"{name}.jsonl", rows)
    return str(folder / f"{name}.jsonl")


def sources(folder: Path) -> dict[str, Any]:
    return {
        "sources": [
            {"name": "long", "source": written(folder, "long", longer_wins=True), "weight": 1.5},
            {"name": "short", "source": written(folder, "short", longer_wins=False)},
        ],
        "heldout_sources": [{"name": "new", "source": written(folder, "new", longer_wins=False), "max_pairs": 11}],
        "heldout_fraction": 0.25,
    }


def test_every_source_has_its_accuracy_beside_the_baselines(tmp_path: Path) -> None:
    cfg = reward_recipe(tmp_path, pairs=sources(tmp_path), evaluation={"judge": True}, reward_model={"num_epochs": 4})
    result = training(cfg)
    last = result.metrics[-1]
    assert {name: last[f"eval/{name}/longer_wins"] for name in ("long", "short", "new")} == {
        "long": 1.0,
        "short": 0.0,
        "new": 0.0,
    }
    assert last["eval/num_pairs"] == last["eval/long/num_pairs"] + last["eval/short/num_pairs"]
    assert last["eval/new/num_pairs"] == 11
    own = {name: last[f"eval/{name}/accuracy"] * last[f"eval/{name}/num_pairs"] for name in ("long", "short")}
    assert sum(own.values()) == pytest.approx(last["eval/accuracy"] * last["eval/num_pairs"])
    quality = json.loads((result.run_dir / "reward_quality.json").read_text())
    rows = {row["name"]: row for row in quality["sources"]}
    assert [row["is_trained"] for row in rows.values()] == [True, True, False]
    for name, row in rows.items():
        assert row["accuracy"] == last[f"eval/{name}/accuracy"]
        assert row["accuracy_low"] < row["accuracy_high"] and row["tfidf"] is not None
    assert (rows["long"]["num_shorter"], rows["long"]["accuracy_shorter"], rows["long"]["shorter_low"]) == (
        0,
        None,
        None,
    )
    assert rows["new"]["num_shorter"] == 11 and rows["new"]["accuracy_shorter"] == rows["new"]["accuracy"]
    assert quality["num_pairs"] == last["eval/num_pairs"], "sources that are only evaluated on count in their row alone"
    page = html.unescape((result.run_dir / "report.html").read_text())
    assert "Each source of pairs" in page and "yes, other pairs" in page
    again = evaluate_reward(str(result.run_dir))
    assert json.loads(json.dumps(again.quality.to_json()))["sources"] == quality["sources"]


def test_a_run_goes_on_with_the_same_pairs(tmp_path: Path) -> None:
    section = {"pairs": sources(tmp_path), "run": {"dir": str(tmp_path), "steps": 6, "checkpoint_every": 2}}
    whole = training(reward_recipe(tmp_path, **section))
    first = training(reward_recipe(tmp_path, **section | {"run": {**section["run"], "steps": 4}}))
    gone_on = resume(first.run_dir, overrides={"run.steps": 6}, progress=False)
    assert [row["loss"] for row in gone_on.metrics] == [row["loss"] for row in whole.metrics]


def test_a_weight_changes_the_steps_of_an_epoch_and_no_other_source(tmp_path: Path) -> None:
    state = Started(reward_recipe(tmp_path, pairs=sources(tmp_path)))
    names = [item.prompt_id.partition("/")[0] for item in state.data.train]
    assert names.count("long") > 1.2 * names.count("short")
    epoch = [item for index in range(-(-len(names) // 8)) for item in state.task.batch(index)]
    assert {item.sequences for item in epoch} == {item.sequences for item in state.data.train}
