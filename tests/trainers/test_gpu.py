"""Every trainer on a GPU: it is there that the model is, the figures are the CPU's, and a stopped run goes on."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import DPO_VARIANTS, TRAINERS, go_on, outcome, train
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe, training

from tunesmith.engine.rollout.device.engine import DeviceEngine

pytestmark = pytest.mark.skipif(os.environ.get("TUNESMITH_TEST_GPU") != "1", reason="for a GPU: make test-gpu")


@pytest.fixture
def by_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A context in which torch says that there is no GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield patch


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def share_of_small_bytes(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize("trainer", [*TRAINERS, *DPO_VARIANTS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_ends_with_finite_figures(trainer: str, dtype: str, tmp_path: Path) -> None:
    rows = rows_of(train(trainer, tmp_path, dtype=dtype))
    assert len(rows) >= 10
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row


@pytest.mark.parametrize("trainer", ["grpo", "dpo", "reward"])
def test_adapters_train(trainer: str, tmp_path: Path) -> None:
    assert len(rows_of(train(trainer, tmp_path, lora={"rank": 4}))) >= 10


@pytest.mark.parametrize("trainer", ["sft", "reward", "dpo", "kto"])
def test_a_training_on_given_rows_is_the_cpus(trainer: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ours = rows_of(train(trainer, tmp_path / "gpu"))
    request.getfixturevalue("by_cpu")
    theirs = rows_of(train(trainer, tmp_path / "cpu"))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3, abs=2e-4)
        assert mine.get("grad_norm", 0.0) == pytest.approx(other.get("grad_norm", 0.0), rel=2e-2, abs=1e-4)


@pytest.mark.parametrize("recipe", [grpo_recipe, ppo_recipe])
def test_a_policy_is_drawn_and_trained_on_the_gpu(recipe, tmp_path: Path) -> None:
    state = Started(recipe(tmp_path), prompts=PROMPTS, rewards=[share_of_small_bytes])
    assert state.policy.module.device.type == "cuda"
    engine = state.rollouts.engine
    assert isinstance(engine, DeviceEngine)
    assert engine._model.decoder.kernels.picked("attention", torch.empty(1, device="cuda")) == "triton"
    assert state.step(state.data.train[:2]).report is not None


def test_it_learns(tmp_path: Path) -> None:
    sampling = {"rollout": {"completions_per_prompt": 16, "max_new_tokens": 12}}
    cfg = grpo_recipe(tmp_path, run={"steps": 40}, optimizer={"learning_rate": 5e-3}, **sampling)
    rows = rows_of(training(cfg, prompts=PROMPTS, rewards=[share_of_small_bytes]).run_dir)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.25


@pytest.mark.parametrize("trainer", ["ppo", "grpo", "sft"])
def test_a_stopped_run_goes_on(trainer: str, tmp_path: Path) -> None:
    whole = train(trainer, tmp_path / "whole")
    stopped = train(trainer, tmp_path / "stopped", steps=6)
    assert len(rows_of(go_on(stopped, **{"run.steps": 10}))) == len(rows_of(whole))
    assert outcome(whole)["weights"]
