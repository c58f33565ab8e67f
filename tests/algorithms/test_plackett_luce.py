"""The loss of rankings against the likelihood written out, order by order."""

import itertools
import math
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import MAX_TIED
from tunesmith.learn.algorithms.preference_loss import bradley_terry, plackett_luce
from tunesmith.learn.algorithms.sums import merged

seeds = st.integers(0, 2**32 - 1)
RANKS = st.lists(st.integers(1, 3), min_size=2, max_size=5)
RANKINGS = st.lists(RANKS, min_size=1, max_size=4)


def batch(seed, rankings):
    """Rewards `[R, K]`, NaN in the padding, and the places."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, rankings))
    rank_RK = torch.tensor([[*ranks, *[0] * (width - len(ranks))] for ranks in rankings])
    reward_RK = 2 * torch.randn(rank_RK.shape, generator=generator, dtype=torch.float64)
    return reward_RK.masked_fill(rank_RK == 0, torch.nan).requires_grad_(), rank_RK


def orders(ranks):
    """Every order of the completions that the places allow, best first."""
    groups = [[k for k, rank in enumerate(ranks) if rank == place] for place in sorted(set(ranks))]
    for parts in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield [k for part in parts for k in part]


def twin(rewards, ranks, center_coef=0.0):
    """Mean over the allowed orders of the negative log-likelihood, through probabilities; and the centering."""
    costs = []
    for order in orders(ranks):
        left = [math.exp(rewards[k]) for k in order]
        costs.append(-math.log(math.prod(left[i] / math.fsum(left[i:]) for i in range(len(order)))))
    pairs = [(a + b) ** 2 for a, b in itertools.combinations(rewards, 2)]
    return fmean(costs) + center_coef * fmean(pairs)


@given(seed=seeds, rankings=RANKINGS, center_coef=st.just(0.0) | st.floats(0.001, 1), num_rankings=st.floats(1, 100))
def test_loss_and_statistics_equal_the_twin(seed, rankings, center_coef, num_rankings):
    reward_RK, rank_RK = batch(seed, rankings)
    loss, stats = plackett_luce(reward_RK, rank_RK, num_rankings=num_rankings, center_coef=center_coef)
    rows = [row[: len(ranks)] for row, ranks in zip(reward_RK.tolist(), rankings, strict=True)]
    twins = [twin(row, ranks, center_coef) for row, ranks in zip(rows, rankings, strict=True)]
    assert loss.item() == pytest.approx(math.fsum(twins) / num_rankings, abs=1e-9)
    decided, num_pairs = [], 0
    for row, ranks in zip(rows, rankings, strict=True):
        for a, b in itertools.permutations(range(len(ranks)), 2):
            num_pairs += a < b
            decided += [row[a] - row[b]] if ranks[a] < ranks[b] else []
    every = [reward for row in rows for reward in row]
    expected = {
        "loss": fmean(twins),
        "mean_reward": fmean(every),
        "std_reward": pstdev(every),
        "tie_fraction": 1 - len(decided) / num_pairs,
    }
    if decided:
        expected |= {"accuracy": fmean(d > 0 for d in decided), "margin": fmean(decided)}
    assert stats.metrics() == pytest.approx(expected, abs=1e-8)


@given(seed=seeds, ties=st.lists(st.booleans(), min_size=1, max_size=5), center_coef=st.sampled_from([0.0, 0.3]))
def test_two_completions_give_bradley_terry_ties_included(seed, ties, center_coef):
    reward_RK, rank_RK = batch(seed, [[1, 1] if tie else [1, 2] for tie in ties])
    ours, stats = plackett_luce(reward_RK, rank_RK, num_rankings=len(ties), center_coef=center_coef)
    theirs, expected = bradley_terry(
        reward_RK[:, 0], reward_RK[:, 1], tie_B=torch.tensor(ties), num_pairs=len(ties), center_coef=center_coef
    )
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(grad(ours, reward_RK)[0], grad(theirs, reward_RK)[0], atol=1e-14, rtol=0)
    assert stats.metrics() == pytest.approx(expected.metrics(), abs=1e-12)


@pytest.mark.parametrize("center_coef", [0.0, 0.1])
def test_loss_passes_gradcheck_and_the_padding_has_no_gradient(center_coef):
    reward_RK, rank_RK = batch(0, [[1, 2, 3, 4], [2, 1], [1, 2, 2, 2], [1, 1, 1]])

    def loss(reward_RK):
        return plackett_luce(reward_RK, rank_RK, num_rankings=4, center_coef=center_coef)[0]

    finite_RK = reward_RK.detach().nan_to_num(0.0).requires_grad_()
    assert gradcheck(loss, (finite_RK,))
    gradient_RK = grad(loss(reward_RK), reward_RK)[0]
    assert gradient_RK[rank_RK == 0].tolist() == [0.0] * 3
    assert gradient_RK.isfinite().all()


@given(seed=seeds, size=st.integers(1, 4))
def test_micro_batches_add_up_to_the_full_batch(seed, size):
    rankings = [[1, 2, 3], [1, 1, 2], [2, 1, 3], [1, 2, 2]]
    reward_RK, rank_RK = batch(seed, rankings)
    loss, stats = plackett_luce(reward_RK, rank_RK, num_rankings=4, center_coef=0.1)
    parts = [
        plackett_luce(reward_RK[rows], rank_RK[rows], num_rankings=4, center_coef=0.1)
        for rows in torch.arange(4).split(size)
    ]
    total = torch.stack([part[0] for part in parts]).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(grad(total, reward_RK)[0], grad(loss, reward_RK)[0], atol=1e-14, rtol=0)
    assert merged(part[1] for part in parts).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


@given(seed=seeds, shift=st.floats(-5, 5))
def test_only_differences_count_and_the_order_of_the_columns_does_not(seed, shift):
    reward_RK, rank_RK = batch(seed, [[1, 2, 2, 3]])
    loss = plackett_luce(reward_RK, rank_RK, num_rankings=1)[0].item()
    turned = torch.tensor([2, 0, 3, 1])
    other = plackett_luce(reward_RK[:, turned] + shift, rank_RK[:, turned], num_rankings=1)[0].item()
    assert other == pytest.approx(loss, abs=1e-10)


def test_far_apart_rewards_stay_finite():
    reward_RK = torch.tensor([[-1e4, 0.0, 1e4]], requires_grad=True)
    loss, _ = plackett_luce(reward_RK, torch.tensor([[1, 2, 3]]), num_rankings=1)
    assert loss.item() == pytest.approx(3e4)
    assert grad(loss, reward_RK)[0].tolist() == [pytest.approx([-1.0, -1.0, 2.0])]


def test_bad_input_is_refused():
    reward_RK, rank_RK = torch.zeros(1, 9), torch.arange(1, 10)[None]
    with pytest.raises(InputError, match=r"rank_RK \(1, 8\)"):
        plackett_luce(reward_RK, rank_RK[:, :8], num_rankings=1)
    with pytest.raises(InputError, match="num_rankings is 0"):
        plackett_luce(reward_RK, rank_RK, num_rankings=0)
    with pytest.raises(InputError, match="Ranking 0 has fewer than two"):
        plackett_luce(reward_RK, (rank_RK == 1).long(), num_rankings=1)
    with pytest.raises(InputError, match=f"9 completions of one place; at most {MAX_TIED} may tie"):
        plackett_luce(reward_RK, torch.ones_like(rank_RK), num_rankings=1)
