"""ODIN's terms against a twin in float64, and the loss of smoothed labels."""

import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad

from tunesmith.learn.algorithms.length_loss import correlation, odin
from tunesmith.learn.algorithms.preference_loss import bradley_terry

COEF, ORTHOGONAL = 0.7, 0.3


def twin_correlation(rewards: list[float], tokens: list[float]) -> float:
    means = fmean(rewards), fmean(tokens)
    products = [(r - means[0]) * (t - means[1]) for r, t in zip(rewards, tokens, strict=True)]
    variance = fmean((r - means[0]) ** 2 for r in rewards) + 0.01
    return fmean(products) / math.sqrt(variance * fmean((t - means[1]) ** 2 for t in tokens))


def twin(quality: list[float], head: list[float], tokens: list[float], weights: list[list[float]]) -> float:
    correlations = abs(twin_correlation(quality, tokens)) - twin_correlation(head, tokens)
    return COEF * correlations + ORTHOGONAL * abs(math.fsum(a * b for a, b in zip(*weights, strict=True)))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_terms_and_gradients_equal_a_twin_in_float64(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values_2B = torch.randn(2, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weights_2H = torch.randn(2, 4, generator=generator, dtype=torch.float64).requires_grad_()
    tokens_B = torch.tensor([3.0, 90.0, 17.0, 17.0, 240.0, 5.0], dtype=torch.float64)
    terms, sums = odin(*values_2B, tokens_B, *weights_2H, num_pairs=3, coef=COEF, orthogonal_coef=ORTHOGONAL)
    plain = values_2B.tolist(), weights_2H.tolist()
    assert terms.item() == pytest.approx(twin(*plain[0], tokens_B.tolist(), plain[1]), abs=1e-12)
    assert sums.floats() == pytest.approx(
        {
            "num_pairs": 3,
            "quality": 3 * twin_correlation(plain[0][0], tokens_B.tolist()),
            "length": 3 * twin_correlation(plain[0][1], tokens_B.tolist()),
            "product": 3 * math.fsum(a * b for a, b in zip(*plain[1], strict=True)),
        }
    )
    for tensor in (values_2B, weights_2H):
        (gradient,) = grad(terms, tensor, retain_graph=True)
        for place in [(0, 0), (0, 3), (1, 1), (1, 3)]:
            ends = []
            for step in (1e-6, -1e-6):
                moved = [values_2B.detach().clone(), weights_2H.detach().clone()]
                moved[0 if tensor is values_2B else 1][place] += step
                ends.append(twin(*moved[0].tolist(), tokens_B.tolist(), moved[1].tolist()))
            assert gradient[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


def test_heads_that_begin_at_zero_have_gradients_that_are_finite_and_lead_to_length() -> None:
    head_B, tokens_B = torch.zeros(4, requires_grad=True), torch.tensor([1.0, 2.0, 3.0, 10.0])
    (gradient_B,) = grad(correlation(head_B, tokens_B), head_B)
    assert torch.isfinite(gradient_B).all() and (gradient_B.argsort() == torch.arange(4)).all()
    assert correlation(torch.randn(4), torch.full((4,), 7.0)).item() == 0


def test_a_correlation_is_that_of_pearson_but_for_rewards_that_hardly_vary() -> None:
    tokens_B = torch.tensor([4.0, 9.0, 12.0, 40.0])
    reward_B = 3 * torch.randn(4, generator=torch.Generator().manual_seed(0))
    pearson = torch.corrcoef(torch.stack([reward_B, tokens_B]))[0, 1]
    torch.testing.assert_close(correlation(reward_B, tokens_B), pearson, atol=3e-3, rtol=0)
    assert abs(correlation(1e-3 * reward_B, tokens_B)) < 0.05


def test_smoothed_labels_cost_a_share_of_the_other_answer_and_ties_as_before() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen_B, rejected_B = torch.randn(2, 5, generator=generator, dtype=torch.float64).requires_grad_().unbind()
    margin_B, tie_B = torch.rand(5, generator=generator, dtype=torch.float64), torch.tensor([0, 0, 1, 0, 0]).bool()
    loss, _ = bradley_terry(chosen_B, rejected_B, margin_B, tie_B, num_pairs=5, label_smoothing=0.2)

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
    smoothed, _ = bradley_terry(best, torch.zeros_like(best), num_pairs=1, label_smoothing=0.2)
    assert grad(smoothed, best)[0].item() == pytest.approx(0, abs=1e-12), "the margin at which 0.8 of the votes agree"
