"""Scoring while others are drawn changes when rewards are asked, and nothing else of a run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import forked, go_on, noisy, outcome, the_run
from recipes import PROMPTS, grpo_recipe, ppo_recipe, training

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import RewardError
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.load import new_reward_model
from tunesmith.learn.trainers import grpo, ppo

TRAINERS = [(ppo, ppo_recipe), (grpo, grpo_recipe)]


def reward_model() -> RewardModel:
    model = new_reward_model(ModelSection(name="tiny:llama", dtype="float32"))
    torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
    return model


def spread(completions: Sequence[str], **_: object) -> list[float]:
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


async def judge(completions: Sequence[str], **_: object) -> list[float]:
    await asyncio.sleep(0)
    return [len(text) / 10 for text in completions]


def rollout(is_early: bool, **more: Any) -> dict[str, Any]:
    return {"score_while_drawing": is_early, "num_slots": 5, "prompts_per_step": 6, **more}


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("trainer", "recipe"), TRAINERS, ids=["ppo", "grpo"])
def test_a_run_is_the_same_bit_for_bit(trainer: Any, recipe: Any, backend: str, tmp_path: Path) -> None:
    outcomes: list[Any] = []
    for is_early in (False, True):
        cfg = recipe(
            tmp_path / str(is_early), rollout=rollout(is_early, backend=backend), prompts={"heldout_fraction": 0.3}
        )
        run = training(cfg, prompts=PROMPTS, rewards=[reward_model(), spread, judge])
        outcomes.append(outcome(run.run_dir))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("trainer", "recipe"), TRAINERS, ids=["ppo", "grpo"])
def test_an_error_of_a_reward_ends_the_run_with_the_same_words(trainer: Any, recipe: Any, tmp_path: Path) -> None:
    def fragile(completions: Sequence[str], **_: object) -> list[float]:
        return [1.0 if len(text) % 2 else float("nan") for text in completions]

    words: list[str] = []
    for is_early in (False, True):
        with pytest.raises(RewardError, match="`fragile` returned nan") as error:
            training(recipe(tmp_path, rollout=rollout(is_early)), prompts=PROMPTS, rewards=[fragile])
        words.append(str(error.value))
    assert words[0] == words[1]


def train(folder: Path) -> Path:
    """Six steps with a reward that draws from every global generator."""
    cfg = grpo_recipe(
        folder,
        rollout=rollout(True),
        prompts={"heldout_fraction": 0.3},
        run={"dir": str(folder), "steps": 6, "checkpoint_every": 2, "eval_every": 3},
    )
    return training(cfg, prompts=PROMPTS, rewards=[noisy]).run_dir


def test_a_run_that_is_killed_while_it_scores_and_draws_is_resumed_exactly(tmp_path: Path) -> None:
    assert forked(train, tmp_path / "whole") == 0
    assert forked(train, tmp_path / "cut", fault="noisy:kill:21") == -9
    run_dir = the_run(tmp_path / "cut")
    assert not (run_dir / "result.json").exists()
    assert forked(go_on, run_dir) == 0
    assert outcome(run_dir) == outcome(the_run(tmp_path / "whole"))
