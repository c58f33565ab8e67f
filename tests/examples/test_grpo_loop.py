"""The written-out GRPO loop raises its reward, and its loss is that of the package."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tunesmith as ts

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.nightly
def test_the_loop_raises_the_reward_of_every_prompt(output_of):
    printed = output_of("grpo_loop.py")
    rewards = [float(reward) for reward in re.findall(r"step \d+: reward ([\d.]+)", printed)]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    low, improved = re.search(r"\[([+\-.\d]+), .*, (\d+) of 8 prompts improved", printed).groups()
    assert float(low) > 0
    assert int(improved) >= 7


def test_its_loss_and_gradient_are_those_of_policy_loss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import grpo_loop

    monkeypatch.delitem(sys.modules, "grpo_loop")
    draw = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([5, 3, 4])
    mask_BT = torch.arange(5)[None, :] < lengths_B[:, None]
    old_BT, reference_BT, advantage_BT = (torch.randn(3, 5, generator=draw) * 0.3 * mask_BT for _ in range(3))
    sequences = ts.Sequences(torch.zeros(3, 6), lengths_B + 1, torch.ones(3), mask_BT, old_BT, old_BT)
    ours_BT, theirs_BT = (((old_BT + 0.2) * mask_BT).requires_grad_() for _ in range(2))

    loss, kl = grpo_loop.clipped_loss(ours_BT, sequences, advantage_BT, reference_BT, kl_coef=0.1)
    tokens = ts.PolicyTokens(theirs_BT, old_BT, advantage_BT, mask_BT, reference_BT)
    terms = ts.PolicyTerms(clip_high=0.28, kl_coef=0.1)
    expected, stats = ts.policy_loss(tokens, terms, 12.0, 12.0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours_BT.grad, theirs_BT.grad)
    assert kl.item() > 0
    assert stats.clipped_high.item() + stats.clipped_low.item() >= 0
