import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.base.config.policy_sections import KLSection, PolicyLossSection
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.policy_loss.records import PolicyTokens
from tunesmith.learn.algorithms import kl, policy_loss

seeds = st.integers(0, 2**32 - 1)
ESTIMATORS = ("k1", "k2", "k3")


def batch(seed, num_sequences=3, num_tokens=5):
    """Log-probs of policy and reference, fp64, and a right-padded mask with at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    logp_BT, ref_logp_BT = -torch.rand(2, num_sequences, num_tokens, generator=generator, dtype=torch.float64) * 3
    lengths_B = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    return logp_BT.requires_grad_(), ref_logp_BT, torch.arange(num_tokens)[None] < lengths_B[:, None]


def twin(estimator, logp, ref_logp):
    """Value of one token, and the derivative of its penalty by `logp`."""
    ratio = math.exp(ref_logp) / math.exp(logp)
    return {
        "k1": (math.log(1 / ratio), logp - ref_logp),  # the derivative of k2, by intent
        "k2": (math.log(ratio) ** 2 / 2, logp - ref_logp),
        "k3": (ratio - 1 - math.log(ratio), 1 - ratio),
    }[estimator]


@given(seed=seeds, estimator=st.sampled_from(ESTIMATORS), num_tokens=st.floats(1, 100))
def test_penalty_and_gradient_equal_the_twin(seed, estimator, num_tokens):
    logp_BT, ref_logp_BT, mask_BT = batch(seed)
    loss = kl.penalty(estimator, logp_BT, ref_logp_BT, mask_BT).sum() / num_tokens
    (gradient_BT,) = grad(loss, logp_BT)
    expected = 0.0
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        value, slope = twin(estimator, logp_BT[b, t].item(), ref_logp_BT[b, t].item())
        inside = mask_BT[b, t].item()
        expected += value * inside / num_tokens
        assert gradient_BT[b, t].item() == pytest.approx(slope * inside / num_tokens, abs=1e-10)
        estimate = kl.estimate(estimator, logp_BT, ref_logp_BT)[b, t].item()
        assert estimate == pytest.approx(value, abs=1e-10)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


@given(seed=seeds, estimator=st.sampled_from(ESTIMATORS), num_tokens=st.floats(1, 100))
def test_a_penalty_weighted_by_the_ratio_has_the_value_and_gradient_of_the_product(seed, estimator, num_tokens):
    logp_BT, ref_logp_BT, mask_BT = batch(seed)
    old_logp_BT = logp_BT.detach() + 0.3 * torch.randn_like(ref_logp_BT)
    ratio_BT = policy_loss.importance_ratio(logp_BT, old_logp_BT, mask_BT, "token")
    loss = kl.penalty(estimator, logp_BT, ref_logp_BT, mask_BT, ratio_BT).sum() / num_tokens
    (gradient_BT,) = grad(loss, logp_BT)
    expected = 0.0
    for b, t in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        difference = logp_BT[b, t].item() - ref_logp_BT[b, t].item()
        value, slope = {
            "k1": (difference, 1.0),
            "k2": (difference**2 / 2, difference),
            "k3": (math.exp(-difference) - 1 + difference, 1 - math.exp(-difference)),
        }[estimator]
        ratio = math.exp(logp_BT[b, t].item() - old_logp_BT[b, t].item())
        inside = mask_BT[b, t].item()
        expected += ratio * value * inside / num_tokens
        assert gradient_BT[b, t].item() == pytest.approx(ratio * (value + slope) * inside / num_tokens, abs=1e-10)
    assert loss.item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_pass_gradcheck(estimator):
    logp_BT, ref_logp_BT, _ = batch(0)
    assert gradcheck(lambda logp, ref: kl.estimate(estimator, logp, ref), (logp_BT, ref_logp_BT.requires_grad_()))


@pytest.fixture
def categorical():
    """Logits of a policy and log-probs of a reference over nine tokens: expectations are exact sums."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits_V, torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)


def expected_gradient(estimator, logits_V, ref_logp_V):
    """Mean gradient of the penalty over tokens drawn from the policy."""
    logp_V = logits_V.log_softmax(0)
    probability_V, everything = logp_V.exp().detach(), torch.ones(1, 1, dtype=torch.bool)
    terms = [
        p * kl.penalty(estimator, logp.view(1, 1), ref.view(1, 1), everything).sum()
        for p, logp, ref in zip(probability_V, logp_V, ref_logp_V, strict=True)
    ]
    return grad(torch.stack(terms).sum(), logits_V)[0]


def test_in_the_loss_k1_and_k2_follow_the_reverse_kl_and_k3_the_forward_kl(categorical):
    logits_V, ref_logp_V = categorical
    logp_V = logits_V.log_softmax(0)
    (reverse_V,) = grad((logp_V.exp() * (logp_V - ref_logp_V)).sum(), logits_V, retain_graph=True)
    (forward_V,) = grad((ref_logp_V.exp() * (ref_logp_V - logp_V)).sum(), logits_V)
    torch.testing.assert_close(expected_gradient("k1", logits_V, ref_logp_V), reverse_V, atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_gradient("k2", logits_V, ref_logp_V), reverse_V, atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_gradient("k3", logits_V, ref_logp_V), forward_V, atol=1e-12, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_by_the_ratio_k1_and_k3_follow_the_reverse_kl_of_a_policy_that_has_moved_on(categorical, estimator):
    logits_V, ref_logp_V = categorical
    logp_V = logits_V.log_softmax(0)
    old_logp_V = (logits_V.detach() + torch.linspace(-1, 1, 9, dtype=torch.float64)).log_softmax(0)
    (reverse_V,) = grad((logp_V.exp() * (logp_V - ref_logp_V)).sum(), logits_V, retain_graph=True)
    everything = torch.ones(9, 1, dtype=torch.bool)
    ratio_V1 = policy_loss.importance_ratio(logp_V[:, None], old_logp_V[:, None], everything, "token")
    # The mean over the tokens that the old policy draws.
    penalty_V1 = kl.penalty(estimator, logp_V[:, None], ref_logp_V[:, None], everything, ratio_V1)
    loss = (penalty_V1 * old_logp_V.exp()[:, None]).sum()
    torch.testing.assert_close(grad(loss, logits_V)[0], reverse_V, atol=1e-12, rtol=0)


def test_in_the_reward_k1_follows_the_reverse_kl(categorical):
    logits_V, ref_logp_V = categorical
    logp_V = logits_V.log_softmax(0)
    (reverse_V,) = grad((logp_V.exp() * (logp_V - ref_logp_V)).sum(), logits_V, retain_graph=True)
    mask_BT = torch.ones(9, 1, dtype=torch.bool)
    kl_BT = kl.k1(logp_V, ref_logp_V)[:, None]
    reward_V = kl.penalised_reward(torch.zeros(9, dtype=torch.float64), kl_BT, mask_BT, 1.0)[:, 0]
    assert not reward_V.requires_grad
    (gradient_V,) = grad((logp_V.exp().detach() * -reward_V * logp_V).sum(), logits_V)
    torch.testing.assert_close(gradient_V, reverse_V, atol=1e-12, rtol=0)


def test_k1_alone_would_have_no_gradient_on_average(categorical):
    logits_V, ref_logp_V = categorical
    logp_V = logits_V.log_softmax(0)
    (gradient_V,) = grad((logp_V.exp().detach() * kl.k1(logp_V, ref_logp_V)).sum(), logits_V)
    assert gradient_V.abs().max() < 1e-12


def test_k1_and_k3_have_the_mean_of_the_exact_kl(categorical):
    logits_V, ref_logp_V = categorical
    logp_V = logits_V.detach().log_softmax(0)
    exact = torch.nn.functional.kl_div(ref_logp_V, logp_V, log_target=True, reduction="sum").item()
    for estimator in ("k1", "k3"):
        mean = (logp_V.exp() * kl.estimate(estimator, logp_V, ref_logp_V)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-12)


@given(
    differences=st.lists(st.floats(-20, 20), min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_k2_and_k3_are_never_negative(differences, dtype):
    logp_T = torch.tensor(differences, dtype=dtype)
    zero_T = torch.zeros_like(logp_T)
    assert (kl.k2(logp_T, zero_T) >= 0).all()
    assert (kl.k3(logp_T, zero_T) >= -torch.finfo(dtype).eps * logp_T.abs()).all()


def test_k3_keeps_its_digits_near_zero():
    logp_T = torch.tensor([1e-3, -1e-3])
    assert kl.k3(logp_T, torch.zeros(2)).tolist() == pytest.approx([0.5e-6, 0.5e-6], rel=2e-3)


@given(seed=seeds, estimator=st.sampled_from(ESTIMATORS))
def test_padding_neither_counts_nor_leaks(seed, estimator):
    logp_BT, ref_logp_BT, mask_BT = batch(seed)
    dirty_BT = logp_BT.detach().masked_fill(~mask_BT, float("nan")).requires_grad_()
    clean = kl.penalty(estimator, logp_BT, ref_logp_BT, mask_BT).sum()
    dirty = kl.penalty(estimator, dirty_BT, ref_logp_BT.masked_fill(~mask_BT, float("-inf")), mask_BT).sum()
    assert clean.item() == dirty.item()
    assert torch.equal(grad(clean, logp_BT)[0], grad(dirty, dirty_BT)[0])
    assert torch.equal(kl.per_sequence(dirty_BT, mask_BT), kl.per_sequence(logp_BT.masked_fill(~mask_BT, 3.0), mask_BT))


@given(seed=seeds, coef=st.floats(0, 2))
def test_penalised_reward_puts_the_score_on_the_last_token(seed, coef):
    logp_BT, ref_logp_BT, mask_BT = batch(seed)
    kl_BT = kl.k1(logp_BT, ref_logp_BT)
    score_B = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    reward_BT = kl.penalised_reward(score_B, kl_BT.masked_fill(~mask_BT, float("nan")), mask_BT, coef)
    for b, length in enumerate(mask_BT.sum(1).tolist()):
        expected = [-coef * kl_BT[b, t].item() for t in range(length)] + [0.0] * (5 - length)
        expected[length - 1] += score_B[b].item()
        assert reward_BT[b].tolist() == pytest.approx(expected, abs=1e-10)


def test_a_row_without_tokens_gets_no_score():
    mask_BT = torch.tensor([[False, False], [True, False]])
    reward_BT = kl.penalised_reward(torch.tensor([5.0, 7.0]), torch.zeros(2, 2), mask_BT, 0.1)
    assert reward_BT.tolist() == [[0.0, 0.0], [7.0, 0.0]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_k3_in_the_loss_equals_trl_with_and_without_its_bias_correction(trl_grpo_loss, seed, level):
    logp_BT, ref_logp_BT, mask_BT = batch(seed, 4, 6)
    logp_BT, ref_logp_BT = logp_BT.detach().float().requires_grad_(), ref_logp_BT.float()
    old_logp_BT, advantage_BT = logp_BT.detach() + 0.1, torch.randn(4, 6)
    num_tokens = int(mask_BT.sum())
    arguments = (logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens)
    corrected = {"beta": 0.3, "ref_logp_BT": ref_logp_BT, "use_bias_correction_kl": level is not None}
    corrected["importance_sampling_level"] = level or "token"
    theirs, metrics = trl_grpo_loss(*arguments, 0.2, 0.2, **corrected)
    ratio_BT = level and policy_loss.importance_ratio(logp_BT, old_logp_BT, mask_BT, level)
    penalty = kl.penalty("k3", logp_BT, ref_logp_BT, mask_BT, ratio_BT).sum() / num_tokens
    settings = PolicyLossSection(importance_sampling_level=level or "token")
    tokens = PolicyTokens(*arguments[:4])
    ours = (
        policy_loss.policy_loss(tokens, policy_loss.terms_of(settings, KLSection(), 0.0), num_tokens, 1.0)[0]
        + 0.3 * penalty
    )
    assert penalty.item() == pytest.approx(metrics["kl"], abs=1e-5)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)


def test_bad_input_is_refused():
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match="different shapes"):
        kl.estimate("k1", good, torch.zeros(3))
    with pytest.raises(InputError, match="different shapes"):
        kl.penalised_reward(torch.zeros(3), good, good, 0.1)
    with pytest.raises(InputError, match="'k4'; choose one of k1, k2, k3"):
        kl.estimate("k4", good, good)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="different shapes"):
        kl.penalty("k2", good, good, torch.zeros(3))
