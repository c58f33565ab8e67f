"""Training on completions that are drawn in 8 bits: corrected by importance weights, repeatable, also when resumed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import forked, go_on, outcome, the_run, train
from recipes import PROMPTS, best_of_n_recipe, distill_recipe, grpo_recipe, online_dpo_recipe, ppo_recipe, training

from tunesmith.base.runs.checkpoint import list_steps
from tunesmith.base.runs.listing import read_object
from tunesmith.engine.rollout import products

INT8 = {"weights": "int8"}


def low_letters(completion_ids: Any, **_: object) -> list[float]:
    """Easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def inputs_of(recipe: Any) -> dict[str, Any]:
    return {"prompts": PROMPTS, **({} if recipe is distill_recipe else {"rewards": [low_letters]})}


@pytest.mark.parametrize("recipe", [ppo_recipe, grpo_recipe, best_of_n_recipe, online_dpo_recipe, distill_recipe])
def test_every_algorithm_that_draws_can_draw_in_8_bits(recipe: Any, tmp_path: Path) -> None:
    result = training(recipe(tmp_path, rollout=INT8), **inputs_of(recipe))
    setup = json.loads((result.run_dir / "setup.json").read_text())
    assert setup["engine"] == "native" and setup["engine_exact"] is False
    if recipe is not distill_recipe:  # which learns from no log-prob of the engine
        assert all(0 < row["rollout/logp_diff_max"] < 0.2 for row in result.metrics)


@pytest.mark.parametrize("recipe", [ppo_recipe, grpo_recipe])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_the_weights_of_tokens_are_corrected(recipe: Any, num_epochs: int, tmp_path: Path) -> None:
    section = "ppo" if recipe is ppo_recipe else "grpo"
    cfg = recipe(tmp_path, rollout=INT8, **{section: {"num_epochs": num_epochs}})
    for row in training(cfg, **inputs_of(recipe)).metrics:
        assert row["sampling/importance_sampling_ratio/min"] < 1 < row["sampling/importance_sampling_ratio/max"]
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("recipe", [ppo_recipe, grpo_recipe, online_dpo_recipe])
def test_a_reference_in_8_bits_is_a_little_off_and_the_engine_stays_exact(recipe: Any, tmp_path: Path) -> None:
    model = {"name": "tiny:llama", "dtype": "float32", "reference": "int8"}
    rows = training(recipe(tmp_path, model=model), **inputs_of(recipe)).metrics
    assert all(row["rollout/logp_diff_max"] == 0 for row in rows)
    if recipe is not online_dpo_recipe:
        assert 0 < abs(rows[0]["kl"]) < 0.02


def test_it_learns_as_with_the_models_own_weights(tmp_path: Path) -> None:
    def rewards(folder: str, **rollout: Any) -> list[float]:
        cfg = grpo_recipe(
            tmp_path / folder, rollout=rollout, run={"steps": 12}, optimizer={"learning_rate": 3e-3, "warmup_steps": 0}
        )
        return [row["reward"] for row in training(cfg, prompts=PROMPTS, rewards=[low_letters]).metrics]

    exact, rounded = rewards("exact"), rewards("rounded", **INT8)
    assert rounded[0] == pytest.approx(exact[0], abs=0.1)
    assert rounded[-1] - rounded[0] > 0.6 * (exact[-1] - exact[0]) > 0


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["all", "lora"])
def test_killed_and_resumed_in_another_process_a_run_ends_the_same(lora: dict[str, int], tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, "int8", whole, "float32", lora) == 0
    assert forked(train, "int8", killed, "float32", lora, fault="update/backward:kill:13") == -9
    assert list_steps(the_run(killed) / "checkpoints")[-1] >= 4
    assert forked(go_on, the_run(killed)) == 0
    assert outcome(the_run(killed)) == outcome(the_run(whole))


def measured(seconds: dict[str, float], do: Callable[..., object], *arguments: object) -> None:
    """`do(*arguments)` on a machine whose products take `seconds`."""
    products._measured = lambda *_: seconds  # type: ignore[assignment]
    do(*arguments)


@pytest.mark.parametrize("chosen", ["int8", "model"])
def test_what_auto_chose_holds_after_a_kill_whatever_is_measured_then(chosen: str, tmp_path: Path) -> None:
    other = "model" if chosen == "int8" else "int8"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert forked(train, chosen, whole) == 0
    now, later = {chosen: 0.5, other: 1.0}, {chosen: 1.0, other: 0.5}
    assert forked(partial(measured, now, train), "auto", killed, fault="update/backward:kill:13") == -9
    setup = read_object(the_run(killed) / "setup.json")
    assert (setup["rollout_weights"], setup["products_s"]) == (chosen, now)
    assert forked(partial(measured, later, go_on), the_run(killed)) == 0
    assert "  weights: auto\n" in (the_run(killed) / "recipe.yaml").read_text()
    setup = read_object(the_run(killed) / "setup.json")
    assert (setup["rollout_weights"], setup["products_s"]) == (chosen, later)
    assert outcome(the_run(killed)) == outcome(the_run(whole))
