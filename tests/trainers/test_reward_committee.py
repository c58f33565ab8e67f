"""Votes that all heads contradict are left out of a step."""

import math
from pathlib import Path

import pytest
import torch
from recipes import Started, pairs, reward_recipe

from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import ConfigError
from tunesmith.learn.algorithms.preference_loss import uncontradicted


def test_a_pair_is_left_out_if_every_head_is_sure_of_the_other_answer() -> None:
    odds = math.log(0.8 / 0.2)
    margin_NK = torch.tensor([[-odds - 0.1, -odds - 2], [-odds - 0.1, 3.0], [-odds + 0.1, -9.0], [-9.0, -9.0], [1, 2]])
    tie_N = torch.tensor([False, False, False, True, False])
    weight_N, left_out = uncontradicted(margin_NK, tie_N, 0.8)
    assert weight_N.tolist() == [0, 1, 1, 1, 1]
    assert left_out.metrics() == {"left_out": 0.2}
    assert (left_out + left_out).metrics() == {"left_out": 0.2}


def test_a_step_learns_nothing_of_what_is_left_out_and_only_from_the_given_share_on(tmp_path: Path) -> None:
    section = {"heads": {"count": 3, "bootstrap": "none"}, "committee": {"confidence": 0.6, "after": 0.5}}
    state = Started(reward_recipe(tmp_path, reward_model=section, pairs={"heldout_fraction": 0.0}), pairs=pairs())
    assert state.learner.first_filtered == math.ceil(0.5 * state.task.num_steps)
    some = state.data.train[:4]
    loss = state.learner.micro_batch_loss(some, 4, trains=True)
    assert "left_out" not in loss[1].metrics()
    state.learner.first_filtered = 0
    ids_BT = torch.tensor([[*ids, *[0] * 60][:60] for pair in some for ids in pair.sequences])
    lengths_B = torch.tensor([len(ids) for pair in some for ids in pair.sequences])
    with torch.no_grad():
        margin_NK = -state.model.heads(ids_BT, lengths_B).unflatten(0, (4, 2)).diff(dim=1)[:, 0]
    most = -math.log(0.6 / 0.4)
    expected = [bool((row <= most).all()) for row in margin_NK]
    with torch.no_grad():  # all heads say that the rejected answer of the first pair is better
        score = state.model.model.score
        score.weight.copy_(score.weight[:1].expand_as(score.weight))
        chosen, rejected = state.model.heads(ids_BT[:2], lengths_B[:2])
        score.weight.mul_(-10 * (chosen - rejected)[0].sign() / (chosen - rejected)[0].abs())
        margin_NK = -state.model.heads(ids_BT, lengths_B).unflatten(0, (4, 2)).diff(dim=1)[:, 0]
    expected = [bool((row <= most).all()) for row in margin_NK]
    assert expected[0]
    loss, stats = state.learner.micro_batch_loss(some, 4, trains=True)
    assert stats.metrics()["left_out"] == sum(expected) / 4
    kept = [pair for pair, is_out in zip(some, expected, strict=True) if not is_out]
    plain = state.learner.micro_batch_loss(kept, 4, trains=True)[0] if kept else torch.tensor(0.0)
    torch.testing.assert_close(loss, plain)
    assert "left_out" not in state.learner.micro_batch_loss(some, 4)[1].metrics(), "evaluations leave nothing out"


def test_one_head_is_no_committee() -> None:
    with pytest.raises(ConfigError, match=r"reward_model\.heads\.count is 1"):
        load_recipe("reward", overrides={"reward_model.committee.confidence": 0.8})
