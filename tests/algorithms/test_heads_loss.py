"""Several heads: their loss against a twin in float64, and the bootstrap samples that they learn."""

import math
from functools import partial
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad

from tunesmith.learn.algorithms.preference_loss import bootstrap_weights, bradley_terry, heads_loss, plackett_luce

seeds = st.integers(0, 2**32 - 1)


def of_pairs(tie_N, margin_N, num_pairs, center_coef, reward_N2, weight_N):
    chosen_N, rejected_N = reward_N2.unbind(1)
    return bradley_terry(
        chosen_N, rejected_N, margin_N, tie_N, num_pairs=num_pairs, center_coef=center_coef, weight_B=weight_N
    )


def twin(chosen, rejected, margin, tie, center_coef):
    """The loss of one pair by one head, through probabilities."""
    wins = 1 / (1 + math.exp(-(chosen - rejected - (0 if tie else margin))))
    loss = -0.5 * math.log(wins) - 0.5 * math.log(1 - wins) if tie else -math.log(wins)
    return loss + center_coef * (chosen + rejected) ** 2


@given(seed=seeds, center_coef=st.sampled_from([0.0, 0.3]), num_heads=st.integers(2, 5))
def test_loss_and_gradients_equal_the_twin_of_each_head_on_its_own_sample(seed, center_coef, num_heads):
    generator = torch.Generator().manual_seed(seed)
    reward_N2H = 2 * torch.randn(5, 2, num_heads, generator=generator, dtype=torch.float64)
    margin_N = torch.rand(5, generator=generator, dtype=torch.float64)
    tie_N = torch.rand(5, generator=generator) < 0.3
    weight_NH = bootstrap_weights([f"prompt {n}" for n in range(5)], num_heads, seed).double()
    rank_N2 = torch.stack([torch.ones(5).long(), 2 - tie_N.long()], 1)
    reward_N2H.requires_grad_()
    loss_of = partial(of_pairs, tie_N, margin_N, 7, center_coef)
    loss, stats = heads_loss(reward_N2H, rank_N2, weight_NH, loss_of)

    def of_twin(values):
        terms = [
            weight_NH[n, h].item() * twin(*values[n][:, h].tolist(), margin_N[n].item(), bool(tie_N[n]), center_coef)
            for n in range(5)
            for h in range(num_heads)
        ]
        return math.fsum(terms) / 7 / num_heads

    assert loss.item() == pytest.approx(of_twin(reward_N2H.detach()), abs=1e-10)
    (gradient_N2H,) = grad(loss, reward_N2H)
    for place in [(0, 0, 0), (3, 1, num_heads - 1), (4, 0, 1)]:
        ends = []
        for step in (1e-5, -1e-5):
            moved = reward_N2H.detach().clone()
            moved[place] += step
            ends.append(of_twin(moved))
        assert gradient_N2H[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)
    metrics = stats.metrics()
    assert metrics["loss"] == pytest.approx(7 * loss.item() / 5)
    decided = [n for n in range(5) if not tie_N[n]]
    margins = [(reward_N2H[n, 0] - reward_N2H[n, 1]).tolist() for n in decided]
    if decided:
        assert metrics["margin_spread"] == pytest.approx(fmean(map(stdev, margins)))
        assert metrics["margin"] == pytest.approx(fmean(map(fmean, margins)))
    else:
        assert "margin_spread" not in metrics


def test_a_head_learns_nothing_from_pairs_that_are_not_in_its_sample():
    reward_N2H = torch.randn(3, 2, 2, dtype=torch.float64).requires_grad_()
    weight_NH = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    rank_N2 = torch.tensor([[1, 2]] * 3)
    loss, _ = heads_loss(reward_N2H, rank_N2, weight_NH, partial(of_pairs, None, None, 3, 0.1))
    (gradient_N2H,) = grad(loss, reward_N2H)
    assert (gradient_N2H.abs().sum(1) > 0).tolist() == (weight_NH > 0).tolist()
    ones, _ = heads_loss(reward_N2H, rank_N2, torch.ones(3, 2).double(), partial(of_pairs, None, None, 3, 0.1))
    none, _ = heads_loss(reward_N2H, rank_N2, None, partial(of_pairs, None, None, 3, 0.1))
    assert ones.item() == pytest.approx(none.item(), abs=1e-15)


def test_rankings_are_learnt_by_each_head_and_their_padding_has_no_spread():
    rank_RK = torch.tensor([[1, 2, 2], [2, 1, 0]])
    reward_RKH = torch.randn(2, 3, 4, dtype=torch.float64)
    reward_RKH[1, 2] = float("nan")
    weight_RH = torch.tensor([[1.0, 0, 2, 3], [1, 1, 0, 2]], dtype=torch.float64)

    def loss_of(reward_RK, weight_R):
        return plackett_luce(reward_RK, rank_RK, num_rankings=2, weight_R=weight_R)

    loss, stats = heads_loss(reward_RKH, rank_RK, weight_RH, loss_of)
    alone = [
        weight_RH[r, h] * plackett_luce(reward_RKH[r : r + 1, :, h], rank_RK[r : r + 1], num_rankings=2)[0]
        for r in range(2)
        for h in range(4)
    ]
    assert loss.item() == pytest.approx(sum(alone).item() / 4)
    both = [(0, 0, 1), (0, 0, 2), (1, 1, 0)]
    spreads = [(reward_RKH[r, a] - reward_RKH[r, b]).std().item() for r, a, b in both]
    assert stats.metrics()["margin_spread"] == pytest.approx(fmean(spreads))
    assert (stats + stats).metrics() == pytest.approx(stats.metrics())


def test_bootstrap_weights_are_poisson_with_mean_1_and_a_function_of_seed_key_and_head():
    keys = [f"prompt {n}" for n in range(4000)]
    weight_RH = bootstrap_weights(keys, 4, seed=3)
    assert weight_RH.mean(0).tolist() == pytest.approx([1.0] * 4, abs=0.07)
    for number in range(4):
        share = (weight_RH == number).float().mean().item()
        assert share == pytest.approx(math.exp(-1) / math.factorial(number), abs=0.02)
    assert torch.corrcoef(weight_RH.T).fill_diagonal_(0).abs().max() < 0.06
    assert torch.equal(bootstrap_weights([keys[7], keys[7]], 4, seed=3), weight_RH[[7, 7]])
    assert not torch.equal(bootstrap_weights(keys, 4, seed=4), weight_RH)
