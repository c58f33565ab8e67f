"""A step whose rewards are asked while others are drawn, against one that waits for the last completion.

The demo's PPO step with a reward model of six layers, which needs the same cores as the engine; and GRPO's rollout with
a judge that answers after a while, as one behind a network does, which needs none.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import Ratio, ratio, write
from tunesmith.config.load import load_recipe
from tunesmith.config.sections import ModelSection
from tunesmith.models.freeze import keep_lower_layers
from tunesmith.models.heads import RewardModel
from tunesmith.models.load import new_reward_model
from tunesmith.rewards.scorer import Scorer, TrainerState
from tunesmith.trainers import grpo, ppo, rollouts

_DELAY_S = 0.5
"""Seconds after which the judge answers, whatever it was asked."""


def reward_model() -> RewardModel:
    """A reward model as the demo trains it, with a head drawn at random."""
    model = new_reward_model(ModelSection(name="smollm2"))
    keep_lower_layers(model.model, 6)
    torch.nn.init.normal_(
        model.model.get_parameter("score.weight"), std=0.02, generator=torch.Generator().manual_seed(0)
    )
    return model


async def judge(completions: Sequence[str], **_: object) -> list[float]:
    """The share of distinct characters, late."""
    await asyncio.sleep(_DELAY_S)
    return [len(set(text)) / max(1, len(text)) for text in completions]


def state_of(trainer: Any, algorithm: Any, folder: str, **overrides: object) -> Any:
    """The demo's policy before its first step."""
    given = {"run.dir": folder, "run.steps": 1000, **overrides}
    cfg = load_recipe(algorithm, recipe=f"demo_{algorithm}", overrides=given).recipe
    return trainer.build(cfg, rewards=[judge])


def scorers(state: Any, rewards: Sequence[Any]) -> tuple[Scorer, Scorer]:
    """One that is asked meanwhile, one that is asked afterwards."""
    early, late = (
        Scorer(rewards, policy_tokenizer=state.tokenizer, while_drawing=meanwhile) for meanwhile in (True, False)
    )
    return early, late


def demo_step(folder: str, num_rounds: int) -> Ratio:
    """The whole PPO step of the demo; its weights move on from step to step."""
    state = state_of(ppo, "ppo", folder)
    early, late = scorers(state, [reward_model()])
    prompts = rollouts.prompts_of_step(state.cfg, state.prompts.train, 0)

    def step(scorer: Scorer) -> None:
        state.scorer = scorer
        ppo.step(state, prompts, 0)

    return ratio("demo_step_with_reward_model", lambda: step(early), lambda: step(late), num_rounds)


def rollout(name: str, rewards: Sequence[Any], folder: str, num_rounds: int) -> Ratio:
    """GRPO's rollout of sixteen prompts, two thirds of whose groups still wait for a slot when the first have ended."""
    wide = {"rollout.prompts_per_step": 16, "rollout.num_slots": 16, "rollout.max_new_tokens": 48}
    state = state_of(grpo, "grpo", folder, **wide)
    early, late = scorers(state, rewards)
    prompts = rollouts.prompts_of_step(state.cfg, state.prompts.train, 0)
    sampling, at = rollouts.sampling_params(state.cfg, "rollout", 0), TrainerState(0, 1)

    def draw(scorer: Scorer) -> None:
        rollouts.draw_scored(state.engine, scorer, state.cfg, prompts, sampling, at)

    return ratio(name, lambda: draw(early), lambda: draw(late), num_rounds)


def main() -> int:
    """Exit code 0; measures all three, the argument is the number of rounds."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        ratios = [
            demo_step(folder, num_rounds),
            rollout("rollout_with_reward_model", [reward_model()], folder, num_rounds),
            rollout("rollout_with_judge", [judge], folder, num_rounds),
        ]
    print(f"written to {write('overlap', ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
