"""Single GRPO steps for tests: a state, easy rewards, and a step whose gradients were compared with the oracle's."""

from collections.abc import Sequence
from typing import Any

import torch
from grpo_oracle import Oracle, Recorder, double
from recipes import PROMPTS, Started, groups_of

from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.learn.rewards.sources import RewardLike
from tunesmith.learn.trainers.api import StepResult


def low_ids(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary: easy to learn."""
    return [low_share(ids) for ids in completion_ids]


def low_share(ids: Sequence[int]) -> float:
    return sum(token < 130 for token in ids) / len(ids)


def build(cfg: GRPORecipe, *rewards: RewardLike) -> Started:
    return Started(cfg, prompts=PROMPTS, rewards=rewards or [low_ids])


def moved_apart(state: Started) -> None:
    """Move the policy away from its reference, so that the KL between them is not zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in state.policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def weights_of(state: Started) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in state.policy.module.parameters()]


def checked_step(state: Started, reward: Any, *, apart: bool = False) -> tuple[StepResult, Recorder]:
    """A step whose every gradient was found equal to that of the float64 oracle."""
    state.policy.module.generation_config.eos_token_id = list(range(3, 40))  # many, so that lengths differ
    reference = double(state.policy.module)
    if apart:
        moved_apart(state)
    old, recorder = double(state.policy.module), Recorder(state)
    result = state.step(state.data.train, 0)
    oracle = Oracle(state, groups_of(result), reward, reference, old)
    lengths = {len(completion.token_ids) for group in groups_of(result) for completion in group.completions}
    assert len(lengths) > 1, "with one length a mean over tokens would be one over completions"
    assert recorder.updates
    for update in recorder.updates:
        expected = oracle.gradients(update.weights)
        assert update.gradients.keys() == expected.keys()
        size = max(gradient.abs().max().item() for gradient in expected.values())
        assert size > 1e-3, "a gradient that is zero would prove nothing"
        for name, gradient in expected.items():
            torch.testing.assert_close(update.gradients[name].double(), gradient, atol=2e-5 * size, rtol=1e-3, msg=name)
    return result, recorder
