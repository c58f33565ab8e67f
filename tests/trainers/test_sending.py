"""Batches on their way to the device: trainers learn the same from what came by one copy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import PROMPTS, Started, grpo_recipe, ppo_recipe

from tunesmith.engine.batch.targets import LearntSequence, pack_targets
from tunesmith.engine.batch.upload import Uploader
from tunesmith.learn.trainers import grpo, ppo, setup


def low_ids(completion_ids: Any, **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize(("trainer", "recipe"), [(grpo, grpo_recipe), (ppo, ppo_recipe)])
def test_a_step_learns_the_same_bits_from_what_was_sent(
    trainer: Any, recipe: Callable[..., Any], tmp_path: Path
) -> None:
    learnt = []
    for uploader in (None, Uploader("cpu")):
        state = Started(recipe(tmp_path, run={"steps": 1}), prompts=PROMPTS, rewards=[low_ids])
        assert state.uploader is None  # on a CPU a copy would gain nothing
        state.learner.uploader = uploader
        state.step(state.batch(0), 0)
        learnt.append([parameter.detach().clone() for parameter in state.policy.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*learnt, strict=True))


def test_what_is_no_tensor_stays_as_it_is() -> None:
    targets = pack_targets(
        [LearntSequence("a", (3, 4, 5, 6), (range(2, 4),)), LearntSequence("b", (7, 8), (range(1, 2),))]
    )
    assert setup.sent(targets, None) is targets
    received = setup.sent(targets, Uploader("cpu"))
    assert received.lengths == targets.lengths
    for name in ("ids_T", "state_N", "chosen_N"):
        assert torch.equal(getattr(received, name), getattr(targets, name))
    places = {getattr(received, name).untyped_storage().data_ptr() for name in ("ids_T", "state_N", "chosen_N")}
    assert len(places) == 1
