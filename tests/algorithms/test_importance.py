"""Importance weights: what they are token by token, and what they correct in the mean."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.config.sections import ImportanceSection
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.sample import torch_impl
from tunesmith.engine.kernels.sample.torch_impl import SampleSettings
from tunesmith.learn.algorithms.policy_loss import importance_correction, importance_metrics

MODES = ("off", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")
NO_CUT = ImportanceSection(cap=1e30)


def batch(seed, num_sequences=4, num_tokens=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sampled_BT = -3 * torch.rand(num_sequences, num_tokens, generator=generator, dtype=dtype)
    train_BT = sampled_BT + torch.randn(num_sequences, num_tokens, generator=generator, dtype=dtype)
    lengths_B = torch.randint(0, num_tokens + 1, (num_sequences,), generator=generator)
    return train_BT, sampled_BT, torch.arange(num_tokens)[None] < lengths_B[:, None]


def twin_weight(log_ratio, settings):
    """Weight of one token or completion, and whether it was cut."""
    ratio = math.exp(log_ratio)
    if settings.mode == "off":
        return 1.0, False
    if settings.floor <= ratio <= settings.cap:
        return ratio, False
    return (0.0 if settings.mode == "mask" else min(max(ratio, settings.floor), settings.cap)), True


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**32 - 1), cap=st.floats(0.5, 4), floor=st.floats(0, 0.49))
def test_weights_and_figures_equal_the_twin(mode, level, seed, cap, floor):
    settings = ImportanceSection(mode=mode, level=level, cap=cap, floor=floor)
    train_BT, sampled_BT, mask_BT = batch(seed)
    found = importance_correction(train_BT, sampled_BT, mask_BT, settings)
    ratios, cuts = [], []
    for row, mask_T in enumerate(mask_BT.tolist()):
        differences = [float(train_BT[row, t] - sampled_BT[row, t]) for t, counts in enumerate(mask_T) if counts]
        logs = differences
        if level != "token" and differences:
            logs = [math.fsum(differences) / (len(differences) if level == "geometric" else 1)]
        weighed = [twin_weight(log, settings) for log in logs]
        weights = weighed if level == "token" else weighed * len(differences)
        ratios += [math.exp(log) if mode == "off" else weight for log, (weight, _) in zip(logs, weighed, strict=True)]
        cuts += [cut for _, cut in weighed]
        expected = [weight for weight, _ in weights] + [0.0] * (len(mask_T) - len(weights))
        assert found.weight_BT[row].tolist() == pytest.approx(expected, rel=1e-6)
    metrics = importance_metrics([found])
    if not ratios:
        assert metrics == {}
        return
    named = {"min": min(ratios), "max": max(ratios), "mean": math.fsum(ratios) / len(ratios)}
    named["cut_share"] = sum(cuts) / len(cuts)
    for name, value in named.items():
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(value, rel=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(
        (train_BT - sampled_BT)[mask_BT].abs().max().item()
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_equal_log_probs_weigh_exactly_one(mode, level):
    _, sampled_BT, mask_BT = batch(0, dtype=torch.float32)
    found = importance_correction(sampled_BT, sampled_BT, mask_BT, ImportanceSection(mode=mode, level=level))
    assert torch.equal(found.weight_BT, mask_BT.float())
    assert not found.is_cut_N.any() and found.logp_difference_N.max() == 0
    assert importance_metrics([found]) == {}


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_ratio_that_is_the_floor_or_the_cap_is_not_cut(mode):
    log_ratio_BT = torch.tensor([[math.log(2.0), -math.log(3.0)]], dtype=torch.float64)
    cap, floor = log_ratio_BT.exp()[0].tolist()
    settings = ImportanceSection(mode=mode, cap=cap, floor=floor)
    found = importance_correction(log_ratio_BT, torch.zeros(1, 2), torch.ones(1, 2), settings)
    assert not found.is_cut_N.any() and found.weight_BT[0].tolist() == pytest.approx([cap, floor])


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 4, "bias": {0: 2.0}}]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_mean_over_a_filtered_draw_is_the_policys_sum_over_what_can_be_drawn(filters, level):
    generator = torch.Generator().manual_seed(1)
    logits_TV = torch.randn(2, 6, generator=generator).double()
    settings = SampleSettings.same(2, temperature=0.7, **filters)
    mu_TV = torch_impl.distribution(logits_TV, settings)
    pi_TV = (logits_TV + 0.1 * torch.randn(2, 6, generator=generator)).div(0.7).log_softmax(-1)
    drawn = [pair for pair in product(range(6), repeat=2) if all(mu_TV[t, v].isfinite() for t, v in enumerate(pair))]
    assert len(drawn) < 36
    mu_BT = torch.tensor([[mu_TV[t, v] for t, v in enumerate(pair)] for pair in drawn])
    pi_BT = torch.tensor([[pi_TV[t, v] for t, v in enumerate(pair)] for pair in drawn])
    weight_BT = importance_correction(
        pi_BT, mu_BT, torch.ones_like(mu_BT, dtype=torch.bool), NO_CUT.model_copy(update={"level": level})
    ).weight_BT.double()
    f_B = torch.randn(len(drawn), generator=generator).double()
    mean = (mu_BT.sum(1).exp() * (weight_BT[:, 0] if level == "sequence" else weight_BT.prod(1)) * f_B).sum()
    torch.testing.assert_close(mean, (pi_BT.sum(1).exp() * f_B).sum(), rtol=1e-5, atol=1e-7)


def test_the_weight_of_a_token_drawn_from_a_nucleus_is_the_mass_of_the_nucleus():
    logits_BV = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).double()
    mu_BV = torch_impl.distribution(logits_BV, SampleSettings.same(1, top_p=0.7))
    pi_BV = logits_BV.log_softmax(-1)
    mass = pi_BV[mu_BV.isfinite()].exp().sum()
    weight = importance_correction(pi_BV[:, :1], mu_BV[:, :1], torch.ones(1, 1), ImportanceSection()).weight_BT
    torch.testing.assert_close(weight[0, 0].double(), mass, rtol=1e-6, atol=0)


def test_a_ratio_beyond_the_range_of_floats_is_cut():
    train_BT, sampled_BT, mask_BT = torch.tensor([[0.0, -1.0]]), torch.tensor([[-200.0, -1.0]]), torch.ones(1, 2)
    for mode, weight in (("truncate", 2.0), ("mask", 0.0)):
        found = importance_correction(train_BT, sampled_BT, mask_BT, ImportanceSection(mode=mode))
        assert found.weight_BT.tolist() == [[weight, 1.0]]
        assert importance_metrics([found])["sampling/importance_sampling_ratio/cut_share"] == 0.5


def test_padding_counts_for_nothing_whatever_stands_there():
    train_BT, sampled_BT, mask_BT = batch(3)
    mask_BT[0, -1] = False
    spoilt_BT = train_BT.masked_fill(~mask_BT, float("nan"))
    for level in LEVELS:
        settings = ImportanceSection(level=level)
        clean, spoilt = (importance_correction(t, sampled_BT, mask_BT, settings) for t in (train_BT, spoilt_BT))
        assert torch.equal(clean.weight_BT, spoilt.weight_BT)
        assert importance_metrics([clean]) == importance_metrics([spoilt])


def test_weights_carry_no_gradient():
    train_BT, sampled_BT, mask_BT = batch(4)
    assert not importance_correction(
        train_BT.requires_grad_(), sampled_BT, mask_BT, ImportanceSection()
    ).weight_BT.requires_grad


def test_differing_shapes_are_refused():
    train_BT, sampled_BT, mask_BT = batch(5)
    with pytest.raises(InputError, match="different shapes"):
        importance_correction(train_BT, sampled_BT[:, :1], mask_BT, ImportanceSection())


def test_figures_equal_trls_own(trl_importance):
    train_BT, sampled_BT, mask_BT = batch(6, dtype=torch.float32)
    mask_BT[:, 0] = mask_BT[0] = True
    for mode, level in product(("truncate", "mask"), ("token", "sequence")):
        settings = ImportanceSection(mode=mode, level=level, cap=1.5, floor=0.5)
        found = importance_correction(train_BT, sampled_BT, mask_BT, settings)
        weight_BT, metrics = trl_importance(train_BT, sampled_BT, mask_BT, f"{level}_{mode}", 1.5, 0.5)
        torch.testing.assert_close(found.weight_BT, weight_BT.expand_as(mask_BT) * mask_BT)
        ours = importance_metrics([found])
        assert {name: ours[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
