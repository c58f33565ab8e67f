import math
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.base.core.errors import InputError
from tunesmith.learn.algorithms import preference_loss
from tunesmith.learn.algorithms.sums import merged

seeds = st.integers(0, 2**32 - 1)
coefficients = st.just(0.0) | st.floats(0.001, 1)


def batch(seed, num_pairs=6, dtype=torch.float64):
    """Rewards of both sides, margins and ties."""
    generator = torch.Generator().manual_seed(seed)
    chosen_B, rejected_B = (2 * torch.randn(num_pairs, generator=generator, dtype=dtype) for _ in range(2))
    margin_B = torch.rand(num_pairs, generator=generator, dtype=dtype)
    tie_B = torch.rand(num_pairs, generator=generator) < 0.3
    return chosen_B.requires_grad_(), rejected_B.requires_grad_(), margin_B, tie_B


def twin(chosen, rejected, margin, tie, center_coef):
    """Loss of one pair and its derivatives by the two rewards, through probabilities."""
    d = chosen - rejected
    wins = 1 / (1 + math.exp(-(d if tie else d - margin)))
    loss = -0.5 * math.log(wins) - 0.5 * math.log(1 - wins) if tie else -math.log(wins)
    pull = wins - (0.5 if tie else 1.0)
    centering = 2 * center_coef * (chosen + rejected)
    return loss + center_coef * (chosen + rejected) ** 2, centering + pull, centering - pull


@given(seed=seeds, center_coef=coefficients, num_pairs=st.floats(1, 100))
def test_loss_gradients_and_statistics_equal_the_twin(seed, center_coef, num_pairs):
    chosen_B, rejected_B, margin_B, tie_B = batch(seed)
    loss, stats = preference_loss.bradley_terry(
        chosen_B, rejected_B, margin_B, tie_B, num_pairs=num_pairs, center_coef=center_coef
    )
    gradients = grad(loss, (chosen_B, rejected_B))
    chosen, rejected, margins, ties = (x.tolist() for x in (chosen_B, rejected_B, margin_B, tie_B))
    twins = [twin(*pair, center_coef) for pair in zip(chosen, rejected, margins, ties, strict=True)]
    assert loss.item() == pytest.approx(math.fsum(t[0] for t in twins) / num_pairs, abs=1e-10)
    for side in (0, 1):
        assert gradients[side].tolist() == pytest.approx([t[side + 1] / num_pairs for t in twins], abs=1e-10)
    decided = [c - r for c, r, tie in zip(chosen, rejected, ties, strict=True) if not tie]
    expected = {
        "loss": fmean(t[0] for t in twins),
        "mean_reward": fmean(chosen + rejected),
        "std_reward": pstdev(chosen + rejected),
        "tie_fraction": fmean(ties),
    }
    if decided:
        expected |= {"accuracy": fmean(d > 0 for d in decided), "margin": fmean(decided)}
    assert stats.metrics() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("center_coef", [0.0, 0.1])
def test_loss_passes_gradcheck(center_coef):
    chosen_B, rejected_B, margin_B, tie_B = batch(0)

    def loss(chosen, rejected):
        return preference_loss.bradley_terry(chosen, rejected, margin_B, tie_B, num_pairs=6, center_coef=center_coef)[0]

    assert gradcheck(loss, (chosen_B, rejected_B))


@given(seed=seeds, size=st.integers(1, 6))
def test_micro_batches_add_up_to_the_full_batch(seed, size):
    everything = batch(seed)
    loss, stats = preference_loss.bradley_terry(*everything, num_pairs=6, center_coef=0.1)
    gradients = grad(loss, everything[:2])
    parts = [
        preference_loss.bradley_terry(*(x[rows] for x in everything), num_pairs=6, center_coef=0.1)
        for rows in torch.arange(6).split(size)
    ]
    total = torch.stack([part[0] for part in parts]).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    for ours, theirs in zip(grad(total, everything[:2]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=0)
    assert merged(part[1] for part in parts).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


@given(seed=seeds)
def test_a_tie_does_not_depend_on_the_order_of_its_two_sides_nor_on_its_margin(seed):
    first_B, second_B, margin_B, _ = batch(seed)
    tie_B = torch.ones(6, dtype=torch.bool)
    one = preference_loss.bradley_terry(first_B, second_B, margin_B, tie_B, num_pairs=6)[0]
    other = preference_loss.bradley_terry(second_B, first_B, margin_B * float("nan"), tie_B, num_pairs=6)[0]
    assert one.item() == pytest.approx(other.item(), abs=1e-14)
    for a, b in zip(grad(one, (first_B, second_B)), grad(other, (first_B, second_B)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-15, rtol=0)


def test_a_tie_is_least_costly_at_equal_rewards():
    equal = torch.tensor([1.5], requires_grad=True)
    loss, stats = preference_loss.bradley_terry(equal, torch.tensor([1.5]), tie_B=torch.tensor([True]), num_pairs=1)
    assert loss.item() == pytest.approx(math.log(2))
    assert grad(loss, equal)[0].item() == 0
    assert set(stats.metrics()) == {"loss", "mean_reward", "std_reward", "tie_fraction"}


def test_equal_rewards_do_not_count_as_correct():
    _, stats = preference_loss.bradley_terry(torch.zeros(2), torch.tensor([0.0, -1.0]), num_pairs=2)
    assert stats.metrics()["accuracy"] == 0.5


def test_far_apart_rewards_stay_finite():
    chosen_B = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss, _ = preference_loss.bradley_terry(chosen_B, torch.zeros(2), tie_B=torch.tensor([False, True]), num_pairs=2)
    assert loss.item() == pytest.approx((1e4 + 0.5e4) / 2)
    assert grad(loss, chosen_B)[0].tolist() == pytest.approx([-0.5, 0.25])


@pytest.mark.parametrize("center_coef", [None, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_loss_gradients_accuracy_and_margin_equal_trl(trl_reward_loss, with_margin, center_coef):
    chosen_B, rejected_B, margin_B, _ = batch(7, num_pairs=9, dtype=torch.float32)
    margin_B = margin_B if with_margin else None
    theirs, expected = trl_reward_loss(chosen_B, rejected_B, margin_B, center_coef)
    ours, stats = preference_loss.bradley_terry(
        chosen_B, rejected_B, margin_B, num_pairs=9, center_coef=center_coef or 0.0
    )
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    for a, b in zip(grad(ours, (chosen_B, rejected_B)), grad(theirs, (chosen_B, rejected_B)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    for name in ("accuracy", "margin", "mean_reward"):
        assert stats.metrics()[name] == pytest.approx(expected[name], abs=1e-5)


def test_statistics_are_detached_and_bf16_is_widened():
    chosen_B, rejected_B, _, _ = batch(0, dtype=torch.float32)
    loss, stats = preference_loss.bradley_terry(chosen_B.bfloat16(), rejected_B.bfloat16(), num_pairs=torch.tensor(6))
    assert loss.dtype == torch.float32 and loss.requires_grad and not stats.pack().requires_grad


def test_bad_input_is_refused():
    good = torch.zeros(2)
    with pytest.raises(InputError, match=r"margin_B \(2, 1\)"):
        preference_loss.bradley_terry(good, good, good[:, None], num_pairs=2)
    with pytest.raises(InputError, match="num_pairs is 0"):
        preference_loss.bradley_terry(good, good, num_pairs=0)


def test_smoothed_labels_cost_a_share_of_the_other_answer_and_ties_as_before() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen_B, rejected_B = torch.randn(2, 5, generator=generator, dtype=torch.float64).requires_grad_().unbind()
    margin_B, tie_B = torch.rand(5, generator=generator, dtype=torch.float64), torch.tensor([0, 0, 1, 0, 0]).bool()
    loss, _ = preference_loss.bradley_terry(chosen_B, rejected_B, margin_B, tie_B, num_pairs=5, label_smoothing=0.2)

    def of(sign: int) -> torch.Tensor:
        wanted_B = chosen_B - rejected_B - torch.where(tie_B, 0.0, margin_B)
        decided_B = torch.log1p(torch.exp(-sign * wanted_B))
        return torch.where(tie_B, 0.5 * decided_B + 0.5 * torch.log1p(torch.exp(sign * wanted_B)), decided_B).mean()

    expected = 0.8 * of(1) + 0.2 * of(-1)
    torch.testing.assert_close(loss, expected)
    for side in (chosen_B, rejected_B):
        ours, plain = (grad(one, side, retain_graph=True)[0] for one in (loss, expected))
        torch.testing.assert_close(ours, plain)
    best = torch.tensor([math.log(0.8 / 0.2)], dtype=torch.float64, requires_grad=True)
    smoothed, _ = preference_loss.bradley_terry(best, torch.zeros_like(best), num_pairs=1, label_smoothing=0.2)
    assert grad(smoothed, best)[0].item() == pytest.approx(0, abs=1e-12), "the margin at which 0.8 of the votes agree"
