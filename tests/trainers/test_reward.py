"""The reward model learns votes, holds pairs out by prompt, and is read by plain transformers."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipes import Started, pairs, reward_recipe, training
from transformers import AutoModelForSequenceClassification

from tunesmith.base.core.errors import DataError
from tunesmith.base.core.trace import Watcher, watching
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.engine.models.load import load_reward_model
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.reward import RewardTask


def test_it_learns_which_text_was_preferred_on_prompts_it_has_not_seen(tmp_path: Path) -> None:
    result = training(reward_recipe(tmp_path, pairs={"heldout_fraction": 0.25}), pairs=pairs())
    assert result.summary["eval/accuracy"] == 1.0
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert all(math.isfinite(value) for row in result.metrics for value in row.values())


def test_a_model_that_is_no_better_than_chance_is_told(tmp_path: Path) -> None:
    learnt = pairs()
    wrong = [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in learnt]
    found = {
        name: training(reward_recipe(tmp_path / name), pairs=learnt, heldout_pairs=heldout)
        for name, heldout in {"wrong": wrong, "right": learnt}.items()
    }
    told = [row for row in read_jsonl(found["wrong"].run_dir / "findings.jsonl") if row["name"] == "chance"]
    assert f"right on 0% of {len(wrong)} held-out pairs" in str(told[0]["message"])
    assert found["wrong"].summary["verdict"] == "no better than chance"
    assert not [row for row in read_jsonl(found["right"].run_dir / "findings.jsonl") if row["name"] == "chance"]
    assert str(found["right"].summary["verdict"]).startswith("right on 100% of ")


def test_evaluation_and_judgement_are_stages_that_go_on_with_each_forward_pass(tmp_path: Path) -> None:
    told: Counter[str] = Counter()

    class Listener(Watcher):
        path = ""

        def enter(self, path: str) -> None:
            self.path = path

        def went_on(self) -> None:
            told[self.path] += 1

    recipe = reward_recipe(tmp_path, reward_model={"micro_batch_size": 2}, evaluation={"judge": True})
    with watching(Listener()):
        training(recipe, pairs=pairs()[:24], heldout_pairs=pairs()[24:])
    assert told["evaluate"] == 12
    assert told["judge/rewards"] >= 12, "none of long judgements counts as a hang"


def test_a_model_that_has_hardly_learnt_is_told_with_what_to_change(tmp_path: Path) -> None:
    recipe = reward_recipe(
        tmp_path,
        optimizer={"learning_rate": 1e-9, "head_learning_rate": 1e-9},
        reward_model={"heads": {"count": 4}, "num_epochs": 1},
    )
    result = training(recipe, pairs=pairs(), heldout_pairs=pairs())
    (told,) = [
        row for row in read_jsonl(result.run_dir / "findings.jsonl") if row["name"] in ("hardly_learnt", "chance")
    ]
    assert told["name"] == "hardly_learnt"
    message = str(told["message"])
    assert "Raise optimizer.learning_rate" in message and "`pessimism`" in message


def test_the_final_folder_is_a_standard_classifier_with_the_same_rewards(tmp_path: Path) -> None:
    result = training(reward_recipe(tmp_path), pairs=pairs())
    plain = AutoModelForSequenceClassification.from_pretrained(result.run_dir / "final", dtype=torch.float32)
    assert plain.config.num_labels == 1
    ours = load_reward_model(str(result.run_dir), dtype=torch.float32)
    ids = torch.tensor([[50, 60, 70, 2]])
    with torch.no_grad():
        expected = ours(ids, torch.tensor([4]))
        torch.testing.assert_close(plain(ids).logits[:, 0], expected)


def test_micro_batches_do_not_change_the_update(tmp_path: Path) -> None:
    def updated(size: int) -> torch.Tensor:
        state = Started(reward_recipe(tmp_path, reward_model={"micro_batch_size": size}), pairs=pairs())
        state.step(state.data.train[:8])
        return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()])

    assert ((updated(3) - updated(8)).abs() > 1e-5).float().mean() < 0.01


def test_pairs_of_one_prompt_share_a_step_whose_completions_are_computed_once(tmp_path: Path) -> None:
    """Rows of a file have ids of their own; what they share is the text of the prompt."""
    rows = [
        {"prompt": f"prompt {number}", "chosen": f"{better} of {number}", "rejected": f"{worse} of {number}"}
        for better, worse in itertools.combinations("abcd", 2)
        for number in range(3)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = reward_recipe(tmp_path, pairs={"source": str(tmp_path / "pairs.jsonl")}, reward_model={"pairs_per_step": 6})
    task = RewardTask(cfg, Inputs(), torch.device("cpu"))
    for index in range(3):
        assert len({ids for pair in task.batch(index) for ids in pair.sequences}) == 4
    assert task.estimate().work.rows.per_prompt == 4


def test_margins_count_only_when_asked_for(tmp_path: Path) -> None:
    rows = [pair.__class__(pair.prompt, pair.chosen, pair.rejected, margin=3.0) for pair in pairs()]

    def loss(margin: str) -> float:
        state = Started(reward_recipe(tmp_path, reward_model={"margin": margin}), pairs=rows)
        return state.step(state.data.train[:8]).metrics["loss"]

    assert loss("column") > loss("none") + 1


def test_margins_that_no_pair_has_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = reward_recipe(tmp_path, reward_model={"margin": "column"})
    Started(cfg, pairs=[replace(pair, margin=0.5) for pair in pairs(4)])
    assert "no effect" not in caplog.text
    Started(cfg, pairs=pairs(4))
    assert "no pair to train on has a margin above 0, so that it has no effect" in caplog.text


def test_held_out_pairs_may_be_given_and_no_pairs_at_all_are_an_error(tmp_path: Path) -> None:
    state = Started(reward_recipe(tmp_path), pairs=pairs(8), heldout_pairs=pairs(3))
    assert (len(state.data.train), len(state.data.heldout)) == (8, 3)
    with pytest.raises(DataError, match="no pairs"):
        training(reward_recipe(tmp_path), pairs=[])
    assert not (tmp_path / "runs").exists()
