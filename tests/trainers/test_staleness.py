"""Runs that draw ahead: what they learn from, the same result each time and after a kill, and what is refused."""

import copy
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import forked, go_on, outcome, the_run
from recipes import PROMPTS, Started, best_of_n_recipe, distill_recipe, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.core.errors import RunError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.resume import resume

MODEL = {"name": "tiny:llama", "dtype": "float32"}
STEPS = 5
RECIPES: dict[str, Any] = {
    "ppo": ppo_recipe,
    "grpo": grpo_recipe,
    "best_of_n": best_of_n_recipe,
    "distill": distill_recipe,
}


def low_letters(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Easy to learn."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def recipe(algorithm: str, folder: Path, staleness: int, **scale: object) -> Any:
    """Five steps at a learning rate with which weights of different steps draw different tokens."""
    model = {**MODEL, "seed": 1} if algorithm == "distill" else MODEL
    return RECIPES[algorithm](
        folder,
        model=model,
        run={"steps": STEPS, "num_threads": 1, "sample_every": 1, "checkpoint_every": 2, "dir": str(folder)},
        optimizer={"learning_rate": 2e-2},
        scale={"workers": 2, "lease": 2, "staleness": staleness, **scale},
        prompts={"heldout_fraction": 0.3},
    )


def inputs_of(algorithm: str) -> dict[str, Any]:
    return {"prompts": PROMPTS} if algorithm == "distill" else {"prompts": PROMPTS, "rewards": [low_letters]}


class Delayed:
    """An engine of one process that draws step k from a copy of the weights before step k - staleness."""

    name = "stub"
    is_exact = False

    def __init__(self, started: Started, staleness: int) -> None:
        self._started, self._staleness = started, staleness
        self._past: list[dict[str, torch.Tensor]] = []

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, **_: object) -> list[Group]:
        self._past.append(copy.deepcopy(self._started.policy.module.state_dict()))
        old = copy.deepcopy(self._started.policy.module)
        old.load_state_dict(self._past[max(0, len(self._past) - 1 - self._staleness)])
        head = copy.deepcopy(getattr(self._started.learner, "value_head", None))
        engine = NativeEngine(language_model(old), self._started.tokenizer, value_head=head)
        return engine.generate(prompts, n, sampling)

    def unload(self) -> None:
        pass


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_run_learns_from_completions_of_the_weights_of_its_staleness(algorithm: str, tmp_path: Path) -> None:
    staleness = 2
    run_dir = training(recipe(algorithm, tmp_path, staleness), **inputs_of(algorithm)).run_dir

    alone = recipe(algorithm, tmp_path, 0, workers=0)
    started = Started(alone, **inputs_of(algorithm))
    if algorithm == "distill":
        started.learner.engine = Delayed(started, staleness)
    else:
        object.__setattr__(started.learner.rollouts, "engine", Delayed(started, staleness))
    expected = [started.step(started.task.batch(index), index) for index in range(STEPS)]

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row, result in zip(rows, expected, strict=True):
        assert {name: row[name] for name in result.metrics} == result.metrics
    updates = [int(row["updates"]) for row in rows]
    versions = [sum(updates[:step]) for step in range(STEPS)]
    behind = [versions[step] - versions[max(0, step - staleness)] for step in range(STEPS)]
    assert [row["rollout/versions_behind"] for row in rows] == behind and behind[-1] > 0
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for row in samples:
        assert row["weight_version"] == versions[max(0, row["step"] - 1 - staleness)]
    if algorithm in ("ppo", "grpo"):
        ratios = [row.get("sampling/importance_sampling_ratio/max", 1.0) for row in rows]
        assert ratios[0] == 1 and max(ratios[1:]) > 1.001, "of the trained policy to that which drew"


def run_of(folder: Path, workers: int) -> None:
    training(recipe("grpo", folder, 3, workers=workers, swap_tokens=2), **inputs_of("grpo"))


def test_a_killed_run_goes_on_with_what_was_drawn_ahead(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_of(whole, 2)
    assert forked(run_of, killed, 3, fault="update/optimizer:kill:4") == -signal.SIGKILL
    run_dir = the_run(killed)
    with pytest.raises(RunError, match=r"scale.staleness: 3 -> 2"):
        go_on(run_dir, **{"scale.staleness": 2})
    resume(run_dir, overrides={"scale.workers": 1}, inputs=Inputs(**inputs_of("grpo")), progress=False)
    assert outcome(run_dir) == outcome(the_run(whole))
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert max(len(set(row.get("weight_versions", ()))) for row in samples) == 3, "one after another in one completion"


def test_only_workers_can_draw_ahead_and_only_what_waits_can_get_newer_weights() -> None:
    with pytest.raises(ValueError, match=r"swap_tokens is 4, but staleness is 1"):
        GRPORecipe.model_validate({"scale": {"workers": 1, "staleness": 1, "swap_tokens": 4}})
    with pytest.raises(ValueError, match=r"scale.staleness is 1, but no other process can draw ahead"):
        GRPORecipe.model_validate({"scale": {"staleness": 1}})
