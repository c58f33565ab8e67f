"""Losses, gradients, weights and rewards that are no numbers, or say nothing: refused, recorded, and never learnt."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import TRAINERS, forked, go_on, noisy, outcome, the_run
from recipes import reward_recipe, training
from spoilt import findings, grpo_with, ppo_with, rows_of, told, train_poisoned, train_with_broken_weights

from tunesmith.base.core.errors import RewardError
from tunesmith.base.runs.checkpoint import list_steps, load
from tunesmith.base.schema.records import Pair, Prompt

Uninterrupted = Callable[[str], Mapping[str, object]]
MATRIX = "layers.1.mlp.down_proj.weight"
CALLS_PER_STEP = {"sft": 1, "reward": 1, "dpo": 3, "ppo": 4, "grpo": 2, "best_of_n": 2, "distill": 2}
"""Calls of the loss with gradient in one step of the jobs, where nothing is refused or dropped."""


@pytest.mark.parametrize(
    ("trainer", "kind"),
    [
        ("sft", "gradient"),
        ("reward", "loss"),
        ("reward", "gradient"),
        ("ppo", "infinite"),
        ("ppo", "loss"),
        ("grpo", "gradient"),
    ],
)
def test_a_step_that_is_not_finite_changes_no_weight_and_leaves_its_batch(
    trainer: str, kind: str, tmp_path: Path
) -> None:
    """All updates of the last step are refused: the weights are those of a run that is one step shorter."""
    spoilt, shorter = tmp_path / "spoilt", tmp_path / "shorter"
    spoilt.mkdir()
    shorter.mkdir()
    no_evaluation = {"eval_every": 100, "checkpoint_every": 0}
    assert forked(train_poisoned, trainer, shorter, kind, range(0), {"steps": 2, **no_evaluation}) == 0
    first_bad = 2 * CALLS_PER_STEP[trainer]
    calls = range(first_bad, first_bad + CALLS_PER_STEP[trainer])
    assert forked(train_poisoned, trainer, spoilt, kind, calls, {"steps": 3, **no_evaluation}) == 0
    run_dir = the_run(spoilt)
    assert outcome(run_dir)["weights"] == outcome(the_run(shorter))["weights"]
    refused = [row["refused_steps"] for row in rows_of(run_dir)]
    assert refused[:2] == [0, 0]
    assert refused[2] > 0
    (finding,) = findings(run_dir, "refused")
    assert finding["step"] == 3
    assert ("the loss is not finite" if kind == "loss" else "the gradient of ") in finding["message"]
    if kind == "gradient":
        assert MATRIX in finding["message"]
    batch = (run_dir / "refused" / "step-000003.jsonl").read_text().splitlines()
    assert batch
    assert all(json.loads(line) for line in batch)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_refused_steps_in_a_row_end_the_run_with_the_last_good_checkpoint(
    trainer: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """From step 5 on every update is refused; without the fault, the run goes on from its checkpoint."""
    message, runs = tmp_path / "message", tmp_path / "runs"
    runs.mkdir()
    calls = range(4 * CALLS_PER_STEP[trainer], 10**6)
    assert forked(told, message, train_poisoned, trainer, runs, "gradient", calls, {"checkpoint_every": 4}) == 1
    run_dir = the_run(runs)
    text = message.read_text()
    assert "optimizer steps in a row were not finite, the last in the gradient of" in text
    assert MATRIX in text
    assert f"Look at the batches in {run_dir / 'refused'}" in text
    assert f"`tunesmith resume {run_dir} --optimizer.learning-rate ...`" in text
    assert (run_dir / "refused" / "step-000005.jsonl").stat().st_size > 0
    steps = list_steps(run_dir / "checkpoints")
    assert steps[0] == 4
    assert [load(run_dir / "checkpoints" / f"step-{step:06d}").step for step in steps] == steps
    if steps == [4]:
        assert forked(go_on, run_dir) == 0
        assert outcome(run_dir) == uninterrupted(trainer)


@pytest.mark.parametrize("trainer", ["ppo", "grpo"])
def test_weights_that_are_no_numbers_end_the_run_before_anything_is_drawn(
    trainer: str, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    message, runs = tmp_path / "message", tmp_path / "runs"
    runs.mkdir()
    at = 6 * CALLS_PER_STEP[trainer]
    assert forked(told, message, train_with_broken_weights, trainer, runs, at) == 1
    assert "the model's numbers are not finite from layer 1 on" in message.read_text()
    assert "go back to an older checkpoint" in message.read_text()
    run_dir = the_run(runs)
    assert list_steps(run_dir / "checkpoints")[-1] == 6
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == uninterrupted(trainer)


def same(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    return [1.0] * len(completion_ids)


def test_equal_rewards_teach_grpo_nothing_and_are_a_finding(tmp_path: Path) -> None:
    run_dir = grpo_with(tmp_path, [same])
    rows = rows_of(run_dir)
    assert [row["frac_reward_zero_std"] for row in rows] == [1.0] * 3
    (finding,) = findings(run_dir, "no_signal")
    assert finding["step"] == 1
    untrained = grpo_with(tmp_path / "other", [same], run={"dir": str(tmp_path / "other"), "steps": 1})
    assert outcome(run_dir)["weights"] == outcome(untrained)["weights"]


def test_equal_rewards_leave_ppo_finite(tmp_path: Path) -> None:
    run_dir = ppo_with(tmp_path, [same])
    for row in rows_of(run_dir):
        assert row["refused_steps"] == 0
        assert None not in row.values()
        assert row["reward_std"] == 0


@pytest.mark.parametrize("run", [ppo_with, grpo_with])
def test_completions_that_the_limit_cut_off_are_trained_on_and_counted(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    run_dir = run(tmp_path, [noisy], rollout={"max_new_tokens": 2, "min_new_tokens": 2})
    for row in rows_of(run_dir):
        assert row["completions/clipped_ratio"] == 1.0
        assert row["refused_steps"] == 0
        assert None not in row.values()


def test_pairs_that_contradict_each_other_are_trained_on_with_finite_figures(tmp_path: Path) -> None:
    """Each against each: a beats b, b beats a; and a circle of three."""
    prompt = Prompt("p", "The film was")
    orders = ["ab", "ba", "bc", "ca", "ab", "cb"]
    pairs = [Pair(prompt, chosen=better * 3, rejected=worse * 3) for better, worse in orders]
    cfg = reward_recipe(tmp_path, reward_model={"num_epochs": 20}, pairs={"heldout_fraction": 0.0})
    run_dir = training(cfg, pairs=pairs).run_dir
    for row in rows_of(run_dir):
        assert None not in row.values()
        assert row["refused_steps"] == 0
        assert row["loss"] < 10


@pytest.mark.parametrize("run", [ppo_with, grpo_with])
@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        (lambda ids: [float("nan")] * len(ids), "returned nan for prompt prompts"),
        (lambda ids: [float("inf")] * len(ids), "returned inf for prompt prompts"),
        (lambda ids: ["good"] * len(ids), "returned 'good' for prompt prompts"),
        (lambda ids: [1.0], "returned 1 scores for"),
        (lambda ids: None, "returned an object of type NoneType"),
        (lambda ids: [None] * len(ids), "None"),
        (lambda ids: 1 / 0, "raised ZeroDivisionError"),
    ],
    ids=["nan", "infinite", "text", "wrong length", "nothing", "all none", "raises"],
)
def test_a_reward_that_gives_no_score_ends_a_run_and_names_function_and_sample(
    run: Callable[..., Path], scores: Callable[[Any], Any], problem: str, tmp_path: Path
) -> None:
    def mine(completion_ids: Sequence[Sequence[int]], **_: object) -> Any:
        return scores(completion_ids)

    with pytest.raises(RewardError) as caught:
        run(tmp_path, [mine])
    assert problem in str(caught.value)
    assert "mine" in str(caught.value)
    assert "prompt prompts[" in str(caught.value)


@pytest.mark.parametrize("on_error", ["drop", "zero"])
@pytest.mark.parametrize("run", [ppo_with, grpo_with])
def test_a_reward_that_fails_on_some_follows_its_policy(
    run: Callable[..., Path], on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def mine(completion_ids, **_):\n"
        "    return [float('nan') if index % 4 == 1 else sum(ids) for index, ids in enumerate(completion_ids)]\n"
    )
    reward = [{"source": "./mine.py:mine", "on_error": on_error}]
    run_dir = run(tmp_path, None, reward=reward)
    rows = rows_of(run_dir)
    assert len(rows) == 3
    assert all(row["rewards/num_failed"] > 0 for row in rows)
    assert all(bool(row["rewards/num_dropped"]) == (on_error == "drop") for row in rows)
    assert all(row["refused_steps"] == 0 for row in rows)


@pytest.mark.parametrize("run", [ppo_with, grpo_with])
def test_a_run_whose_completions_are_all_dropped_ends(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def mine(completion_ids, **_):\n    raise ValueError('no')\n")
    with pytest.raises(RewardError, match="mine"):
        run(tmp_path, None, reward=[{"source": "./mine.py:mine", "on_error": "drop"}])
