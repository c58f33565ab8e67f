"""Runs whose completions are drawn by workers: their weights, metrics and samples are those of one process."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import forked, go_on, noisy, outcome, the_run
from recipes import PROMPTS, best_of_n_recipe, distill_recipe, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.algorithms.grpo import GRPORecipe

MODEL = {"name": "tiny:llama", "dtype": "float32"}
RUN = {"steps": 2, "num_threads": 1, "sample_every": 1}
OF_THE_ENGINE = ("rollout/", "evaluate/")
"""Figures of the work of an engine, which is another with leases: what is shared, how many steps."""


def low_letters(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def result(run_dir: Path) -> Mapping[str, object]:
    found = outcome(run_dir)
    rows: Any = found["metrics"]
    return {**found, "metrics": [{k: v for k, v in row.items() if not k.startswith(OF_THE_ENGINE)} for row in rows]}


def trained(algorithm: str, folder: Path, workers: int) -> Path:
    """Two steps on `workers`."""
    sections: dict[str, Any] = {
        "model": MODEL,
        "run": {**RUN, "dir": str(folder / f"of-{workers}")},
        "scale": {"workers": workers, "lease": 2},
        "prompts": {"heldout_fraction": 0.3},
    }
    # A reward of its own noise would depend on the order in which groups end.
    rewards = {"rewards": [low_letters]}
    match algorithm:
        case "ppo":
            return training(ppo_recipe(folder, **sections), prompts=PROMPTS, **rewards).run_dir
        case "grpo":
            drawing = {"score_while_drawing": True}
            recipe = grpo_recipe(folder, **sections, rollout=drawing, grpo={"num_minibatches": 2})
            return training(recipe, prompts=PROMPTS, **rewards).run_dir
        case "best_of_n":
            return training(best_of_n_recipe(folder, **sections), prompts=PROMPTS, **rewards).run_dir
        case _:
            sections["model"] = {**MODEL, "seed": 1}
            return training(distill_recipe(folder, **sections), prompts=PROMPTS).run_dir


@pytest.mark.parametrize("algorithm", ("ppo", "grpo", "best_of_n", "distill"))
def test_a_run_on_workers_is_the_run_of_one_process(algorithm: str, tmp_path: Path) -> None:
    assert result(trained(algorithm, tmp_path, 2)) == result(trained(algorithm, tmp_path, 0))


def five_steps(folder: Path, workers: int) -> None:
    """PPO with a value head, whose values workers draw."""
    run = {"dir": str(folder), "steps": 5, "checkpoint_every": 2, "num_threads": 1}
    cfg = ppo_recipe(folder, model=MODEL, run=run, scale={"workers": workers, "lease": 2})
    training(cfg, prompts=PROMPTS, rewards=[noisy])


def test_a_killed_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    five_steps(whole, 0)
    assert forked(five_steps, killed, 2, fault="update/optimizer:kill:13") == -signal.SIGKILL
    run_dir = the_run(killed)
    go_on(run_dir, **{"scale.workers": 3})
    assert result(run_dir) == result(the_run(whole))


def test_workers_cannot_draw_by_other_engines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.backend is transformers; workers draw by the native engine"):
        GRPORecipe.model_validate({"scale": {"workers": 2}, "rollout": {"backend": "transformers"}})
    unknown = grpo_recipe(tmp_path, model={"name": "tiny:llama", "forward": "full"}, scale={"workers": 1})
    training(unknown, prompts=PROMPTS, rewards=[noisy])  # trained by another forward pass, drawn by the engine
    with pytest.raises(ValueError, match=r"scale.workers"):
        grpo_recipe(tmp_path, scale={"workers": -1})
