import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.autograd import grad, gradcheck

from tunesmith.base.config.algorithms.grpo import GRPOSection
from tunesmith.base.config.algorithms.ppo import PPOSection
from tunesmith.base.config.policy_sections import KLSection, PolicyLossSection
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.learn.algorithms import policy_loss
from tunesmith.learn.algorithms.sums import merged

seeds = st.integers(0, 2**32 - 1)
clips = st.floats(0.01, 0.5)


def batch(seed, num_sequences=4, num_tokens=5, spread=0.4, dtype=torch.float64):
    """Log-probs, those of the rollout, advantages and a right-padded mask with at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    old_logp_BT = -3 * torch.rand(num_sequences, num_tokens, generator=generator, dtype=dtype)
    logp_BT = old_logp_BT + spread * torch.randn(num_sequences, num_tokens, generator=generator, dtype=dtype)
    advantage_BT = torch.randn(num_sequences, num_tokens, generator=generator, dtype=dtype)
    lengths_B = torch.randint(1, num_tokens + 1, (num_sequences,), generator=generator)
    mask_BT = torch.arange(num_tokens)[None] < lengths_B[:, None]
    return logp_BT.requires_grad_(), old_logp_BT, advantage_BT, mask_BT


def surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, denominator, cfg):
    """The objective without KL and entropy."""
    tokens = PolicyTokens(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    return policy_loss.policy_loss(tokens, policy_loss.terms_of(cfg, KLSection(), 0.0), denominator, 1.0)


def entropy_bonus(entropy_BT, mask_BT, num_tokens):
    """The entropy term of the objective, with coefficient 1."""
    zero_BT = torch.zeros_like(entropy_BT)
    tokens = PolicyTokens(zero_BT, zero_BT, zero_BT, mask_BT, entropy_BT=entropy_BT)
    return -policy_loss.policy_loss(tokens, PolicyTerms(entropy_coef=1.0), 1.0, num_tokens)[0]


def section(clip_low=0.2, clip_high=0.2, **options):
    return PolicyLossSection(clip_low=clip_low, clip_high=clip_high, **options)


def dppo_distance(logp, old_logp, kind):
    """Total variation or KL divergence of the two outcomes "this token" and "another"."""
    p, old_p = math.exp(logp), math.exp(old_logp)
    if kind == "dppo_tv":
        return (abs(p - old_p) + abs((1 - p) - (1 - old_p))) / 2
    return old_p * math.log(old_p / p) + (1 - old_p) * math.log((1 - old_p) / (1 - p))


def token_twin(logp, ratio, advantage, cfg):
    """Loss of one token, its derivatives by the ratio and by `logp` itself, and the side of the clip it lies beyond."""
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    is_high = advantage > 0 and ratio > high
    if cfg.surrogate == "cispo":
        weight = min(ratio, high)
        return -weight * advantage * logp, 0.0, -weight * advantage, "high" if is_high else ""
    if cfg.surrogate == "log_prob":
        return -advantage * logp, 0.0, -advantage, ""
    if cfg.surrogate in ("dppo_tv", "dppo_kl"):
        distance = dppo_distance(logp, logp - math.log(ratio), cfg.surrogate)
        is_high = advantage > 0 and ratio > 1 and distance > cfg.clip_high
        is_low = advantage < 0 and ratio < 1 and distance > cfg.clip_low
        return -ratio * advantage, 0.0 if is_high or is_low else -advantage, 0.0, is_high * "high" + is_low * "low"
    if cfg.surrogate == "sapo":
        steepness = cfg.temperature_positive if advantage > 0 else cfg.temperature_negative
        gate = 1 / (1 + math.exp(-steepness * (ratio - 1)))
        return -4 / steepness * gate * advantage, -4 * gate * (1 - gate) * advantage, 0.0, ""
    if is_high:
        return -high * advantage, 0.0, 0.0, "high"
    if advantage < 0 and ratio < low:
        return -low * advantage, 0.0, 0.0, "low"
    if advantage < 0 and cfg.dual_clip is not None and ratio > cfg.dual_clip:
        return -cfg.dual_clip * advantage, 0.0, 0.0, "dual"
    return -ratio * advantage, -advantage, 0.0, ""


def rows_of(*tensors_BT, mask_BT):
    """For each row one tuple of numbers for each token inside the mask."""
    return [
        list(zip(*(tensor[b][mask_BT[b]].tolist() for tensor in tensors_BT), strict=True)) for b in range(len(mask_BT))
    ]


def row_twin(row, cfg):
    """Losses, gradients by the log-probs, ratios and sides of the clip of the tokens of one completion."""
    log_ratios = [logp - old_logp for logp, old_logp, _ in row]
    total, count = math.fsum(log_ratios), len(row)
    if cfg.surrogate == "gmpo":
        return gmpo_twin(row, log_ratios, cfg)
    if cfg.importance_sampling_level == "token":
        ratios = [math.exp(number) for number in log_ratios]
    else:
        ratios = [math.exp(total / count if cfg.importance_sampling_level == "sequence" else total)] * count
    tokens = [token_twin(logp, ratio, advantage, cfg) for (logp, _, advantage), ratio in zip(row, ratios, strict=True)]
    shared = math.fsum(token[1] for token in tokens) / (count if cfg.importance_sampling_level == "sequence" else 1)
    is_own = cfg.importance_sampling_level == "token"
    slopes = [(token[1] if is_own else shared) * r + token[2] for token, r in zip(tokens, ratios, strict=True)]
    return [token[0] for token in tokens], slopes, ratios, [token[3] for token in tokens]


def gmpo_twin(row, log_ratios, cfg):
    """`row_twin` of the geometric mean; the sides are those of the single ratios."""
    bounded, own, sides = [], [], []
    for (_, _, advantage), number in zip(row, log_ratios, strict=True):
        is_high = advantage > 0 and number > cfg.clip_high
        is_low = advantage <= 0 and number < -cfg.clip_low
        bounded.append(cfg.clip_high if is_high else -cfg.clip_low if is_low else number)
        own.append(not (is_high or is_low))
        sides.append("high" if is_high else "low" if is_low else "")
    mean = math.exp(math.fsum(bounded) / len(row))
    slope = -math.fsum(mean * advantage for _, _, advantage in row) / len(row)
    losses = [-mean * advantage for _, _, advantage in row]
    return losses, [slope * is_own for is_own in own], [math.exp(number) for number in log_ratios], sides


def covariances(rows):
    """(A - mean A)(log p - mean log p) of the tokens of all rows, one after another; rows are (log p, ..., A)."""
    pairs = [(token[0], token[-1]) for row in rows for token in row]
    mean_logp = math.fsum(logp for logp, _ in pairs) / len(pairs)
    mean_advantage = math.fsum(advantage for _, advantage in pairs) / len(pairs)
    return [(advantage - mean_advantage) * (logp - mean_logp) for logp, advantage in pairs]


def divisors(rows, normalization, max_tokens):
    """What the losses of each row are divided by, if all rows are one micro-batch and one optimizer step."""
    num_tokens = sum(map(len, rows))
    return {
        "token": [num_tokens] * len(rows),
        "sequence": [len(row) * len(rows) for row in rows],
        "sequence_sum": [len(rows)] * len(rows),
        "constant": [len(rows) * max_tokens] * len(rows),
        "micro_batch": [num_tokens] * len(rows),
    }[normalization]


def tokens(*tensors_BT, mask_BT):
    """One tuple of numbers for each token inside the mask."""
    return list(zip(*(tensor[mask_BT].tolist() for tensor in tensors_BT), strict=True))


NORMALIZATIONS = ("token", "sequence", "sequence_sum", "constant", "micro_batch")
levels = st.sampled_from(["token", "sequence", "product"])
sections = st.one_of(
    st.builds(section, clips, clips, importance_sampling_level=levels, dual_clip=st.sampled_from([None, 1.6, 3.0])),
    st.builds(section, clips, clips, importance_sampling_level=levels, surrogate=st.just("cispo")),
    st.builds(
        section,
        importance_sampling_level=levels,
        surrogate=st.just("sapo"),
        temperature_positive=st.floats(0.3, 3),
        temperature_negative=st.floats(0.3, 3),
    ),
    st.builds(section, clips, clips, surrogate=st.sampled_from(["log_prob", "dppo_tv", "dppo_kl", "gmpo"])),
)


def whole_step(mask_BT, num_micro_batches=1):
    return policy_loss.UpdateSize(int(mask_BT.sum()), len(mask_BT), num_micro_batches)


@given(seed=seeds, cfg=sections, normalization=st.sampled_from(NORMALIZATIONS), max_tokens=st.integers(1, 100))
def test_every_loss_gradient_and_statistic_equals_the_twin(seed, cfg, normalization, max_tokens):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, spread=0.8)
    if cfg.surrogate.startswith("dppo"):  # these need probabilities below 1
        logp_BT, old_logp_BT = logp_BT.detach().clamp(max=-1e-3).requires_grad_(), old_logp_BT.clamp(max=-1e-3)
    if cfg.surrogate == "gmpo":  # whose completions have one advantage
        advantage_BT = advantage_BT[:, :1].expand_as(mask_BT)
    denominator = policy_loss.loss_denominator(normalization, mask_BT, whole_step(mask_BT), max_tokens)
    loss, stats = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, denominator, cfg)
    (gradient_BT,) = grad(loss, logp_BT)
    rows = rows_of(logp_BT, old_logp_BT, advantage_BT, mask_BT=mask_BT)
    twins = [row_twin(row, cfg) for row in rows]
    shares = divisors(rows, normalization, max_tokens)
    expected_loss = math.fsum(math.fsum(twin[0]) / share for twin, share in zip(twins, shares, strict=True))
    expected_slopes = [slope / share for twin, share in zip(twins, shares, strict=True) for slope in twin[1]]
    assert loss.item() == pytest.approx(expected_loss, abs=1e-10)
    assert gradient_BT[mask_BT].tolist() == pytest.approx(expected_slopes, abs=1e-10)
    assert not gradient_BT[~mask_BT].any()
    count = sum(map(len, rows))
    ratios, sides = [r for twin in twins for r in twin[2]], [side for twin in twins for side in twin[3]]
    low, high, dual = (sides.count(side) / count for side in ("low", "high", "dual"))
    mean_ratio = math.fsum(ratios) / count
    expected = {
        "loss/policy_avg": math.fsum(loss for twin in twins for loss in twin[0]) / count,
        "policy/approxkl_avg": math.fsum((logp - old) ** 2 / 2 for row in rows for logp, old, _ in row) / count,
        "policy/clipfrac_avg": low + high + dual,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/dual_mean": dual,
        "clip_ratio/region_mean": low + high + dual,
        "val/ratio": mean_ratio,
        "val/ratio_var": math.fsum((r - mean_ratio) ** 2 for r in ratios) / count,
    }
    assert stats.metrics() == pytest.approx(expected, abs=1e-10)


@given(seed=seeds, share=st.floats(0.01, 1), coef=st.floats(0.1, 3))
def test_kl_cov_penalises_the_tokens_of_highest_covariance(seed, share, coef):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, spread=0.8)
    cfg = section(surrogate="kl_cov", kl_cov_share=share, kl_cov_coef=coef)
    loss, stats = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, 7, cfg)
    rows = rows_of(logp_BT, old_logp_BT, advantage_BT, mask_BT=mask_BT)
    found = [token for row in rows for token in row]
    ranked = sorted(range(len(found)), key=covariances(rows).__getitem__, reverse=True)
    penalised = set(ranked[: max(1, int(share * len(found)))])
    losses, slopes = [], []
    for i, (logp, old_logp, advantage) in enumerate(found):
        ratio, weight = math.exp(logp - old_logp), coef * (i in penalised)
        losses.append(-ratio * advantage + weight * abs(logp - old_logp))
        slopes.append(-ratio * advantage + weight * math.copysign(1, logp - old_logp))
    assert loss.item() == pytest.approx(math.fsum(losses) / 7, abs=1e-10)
    assert grad(loss, logp_BT)[0][mask_BT].tolist() == pytest.approx([slope / 7 for slope in slopes], abs=1e-10)
    assert stats.metrics()["policy/clipfrac_avg"] == 0


def test_loss_passes_gradcheck():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    for level in ("token", "sequence", "product"):
        cfg = section(0.2, 0.3, importance_sampling_level=level, dual_clip=1.5)
        soft = section(surrogate="sapo", importance_sampling_level=level)
        for one in (cfg, soft):
            assert gradcheck(lambda x, c=one: surrogate(x, old_logp_BT, advantage_BT, mask_BT, 9, c)[0], (logp_BT,))
    assert gradcheck(lambda x: entropy_bonus(x, mask_BT, 9), (logp_BT,))


@given(seed=seeds, cfg=sections)
def test_the_first_pass_has_ratio_one_and_the_gradient_of_the_policy_gradient(seed, cfg):
    logp_BT, _, advantage_BT, mask_BT = batch(seed)
    num_tokens = int(mask_BT.sum())
    if cfg.importance_sampling_level == "sequence" or cfg.surrogate == "gmpo":  # a token has its completion's mean
        advantage_BT = advantage_BT[:, :1].expand_as(mask_BT)
    if cfg.importance_sampling_level == "product":  # and here the sum over its completion
        advantage_BT = advantage_BT.masked_fill(torch.arange(5) > 0, 0.0)
    loss, stats = surrogate(logp_BT, logp_BT.detach(), advantage_BT, mask_BT, num_tokens, cfg)
    metrics = stats.metrics()
    assert (metrics["val/ratio"], metrics["val/ratio_var"]) == (1.0, 0.0)
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0.0
    if cfg.importance_sampling_level == "product" and cfg.surrogate != "cispo":
        advantage_BT = advantage_BT[:, :1].expand_as(mask_BT)
    expected_BT = -(advantage_BT * mask_BT) / num_tokens
    torch.testing.assert_close(grad(loss, logp_BT)[0], expected_BT, atol=1e-14, rtol=0)


@given(
    seed=seeds,
    size=st.integers(1, 4),
    garbage=st.sampled_from([float("nan"), float("inf"), -1e30]),
    cfg=sections,
    normalization=st.sampled_from(NORMALIZATIONS[:4]),
)
def test_micro_batches_with_their_own_padding_add_up_to_the_full_batch(seed, size, garbage, cfg, normalization):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed)
    whole = whole_step(mask_BT)
    denominator = policy_loss.loss_denominator(normalization, mask_BT, whole, 9)
    loss, stats = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, denominator, cfg)
    (gradient_BT,) = grad(loss, logp_BT)
    micro_losses, micro_stats = [], []
    for rows in torch.arange(4).split(size):
        longest = int(mask_BT[rows].sum(1).max())
        padded = [
            torch.cat(
                [x[rows, :longest].masked_fill(~mask_BT[rows, :longest], garbage), torch.full((len(rows), 2), garbage)],
                1,
            )
            for x in (logp_BT, old_logp_BT, advantage_BT)
        ]
        mask = torch.cat([mask_BT[rows, :longest], torch.zeros(len(rows), 2, dtype=torch.bool)], 1)
        denominator = policy_loss.loss_denominator(normalization, mask, whole, 9)
        micro_loss, micro_stat = surrogate(*padded, mask, denominator, cfg)
        micro_losses.append(micro_loss)
        micro_stats.append(micro_stat)
    total = torch.stack(micro_losses).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-11)
    torch.testing.assert_close(grad(total, logp_BT)[0], gradient_BT, atol=1e-13, rtol=0)
    assert merged(micro_stats).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


@given(seed=seeds, size=st.integers(1, 4))
def test_a_mean_over_micro_batches_weighs_each_alike_whatever_its_tokens(seed, size):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed)
    parts = torch.arange(4).split(size)
    whole, cfg = whole_step(mask_BT, len(parts)), section()
    losses, means = [], []
    for rows in parts:
        tensors = [x[rows] for x in (logp_BT, old_logp_BT, advantage_BT, mask_BT)]
        denominator = policy_loss.loss_denominator("micro_batch", mask_BT[rows], whole, 9)
        losses.append(surrogate(*tensors, denominator, cfg)[0].item())
        means.append(surrogate(*tensors, int(mask_BT[rows].sum()), cfg)[0].item())
    assert sum(losses) == pytest.approx(sum(means) / len(means), abs=1e-12)


def test_completions_that_were_drawn_and_left_out_count_in_means_over_completions():
    mask_BT = torch.ones(2, 3, dtype=torch.bool)
    size = policy_loss.UpdateSize(num_tokens=6, num_sequences=8, num_micro_batches=1)
    assert policy_loss.loss_denominator("constant", mask_BT, size, 10) == 80
    assert policy_loss.loss_denominator("sequence_sum", mask_BT, size, 10) == 8
    assert policy_loss.loss_denominator("sequence", mask_BT, size, 10).tolist() == [[24], [24]]
    assert policy_loss.loss_denominator("token", mask_BT, size, 10) == 6


@given(seed=seeds, num_tokens=st.floats(1, 100))
def test_entropy_bonus_equals_its_twin_and_ignores_padding(seed, num_tokens):
    entropy_BT, _, _, mask_BT = batch(seed)
    dirty_BT = entropy_BT.detach().masked_fill(~mask_BT, float("nan")).requires_grad_()
    bonus = entropy_bonus(dirty_BT, mask_BT, num_tokens)
    assert bonus.item() == pytest.approx(math.fsum(entropy_BT[mask_BT].tolist()) / num_tokens, abs=1e-10)
    torch.testing.assert_close(grad(bonus, dirty_BT)[0], mask_BT.double() / num_tokens)


TRL_LOSSES = {
    "dapo": ("token", {}),
    "grpo": ("sequence", {}),
    "dr_grpo": ("constant", {}),
    "bnpo": ("micro_batch", {}),
    "luspo": ("sequence_sum", {}),
    "cispo": ("token", {"surrogate": "cispo"}),
}
"""TRL's loss types, and the settings that make them."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("loss_type", "level"),
    # TRL's luspo counts a completion's loss once where it has one ratio; ours has one loss for each token.
    [(name, level) for name in TRL_LOSSES for level in ("token", "sequence") if (name, level) != ("luspo", "sequence")],
)
def test_loss_gradient_and_clip_ratios_equal_trl(trl_grpo_loss, seed, level, loss_type):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=0.8)
    advantage_BT = advantage_BT[:, :1]
    normalization, options = TRL_LOSSES[loss_type]
    cfg = section(0.05, 0.08, importance_sampling_level=level, **options)
    num_tokens = int(mask_BT.sum())
    arguments = (logp_BT, old_logp_BT, advantage_BT.expand_as(mask_BT), mask_BT)
    # TRL's bound of cispo is the ratio itself.
    high = 1.08 if loss_type == "cispo" else 0.08
    trl = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 11}
    theirs, expected = trl_grpo_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, 0.05, high, **trl)
    denominator = policy_loss.loss_denominator(normalization, mask_BT, whole_step(mask_BT), 11)
    ours, stats = surrogate(*arguments, denominator, cfg)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)
    assert stats.metrics()["policy/clipfrac_avg"] > 0 or (loss_type, level) == ("cispo", "sequence")
    if level == "token" and loss_type == "cispo":
        assert stats.metrics()["clip_ratio/high_mean"] == pytest.approx(expected["cispo_clip_ratio"], abs=1e-6)
    elif level == "token":
        for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert stats.metrics()[name] == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_dual_clip_equals_trl_s_delta(trl_grpo_loss, seed):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=1.2)
    num_tokens = int(mask_BT.sum())
    arguments = (logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens)
    theirs, _ = trl_grpo_loss(*arguments, 0.2, 0.28, delta=1.7)
    ours, stats = surrogate(*arguments, section(0.2, 0.28, dual_clip=1.7))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)
    assert stats.metrics()["clip_ratio/dual_mean"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sapo_equals_trl(trl_grpo_loss, seed, level):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=0.8)
    advantage_BT, temperatures = advantage_BT[:, :1], {"temperature_positive": 0.8, "temperature_negative": 1.3}
    options = {"loss_type": "sapo", "importance_sampling_level": level, **temperatures}
    theirs, _ = trl_grpo_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, 1, 0.2, 0.2, **options)
    cfg = section(surrogate="sapo", importance_sampling_level=level, **temperatures)
    denominator = policy_loss.loss_denominator("sequence", mask_BT, whole_step(mask_BT), 11)
    ours, _ = surrogate(logp_BT, old_logp_BT, advantage_BT.expand_as(mask_BT), mask_BT, denominator, cfg)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_equals_trl(trl_gmpo_loss, seed):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=0.8)
    advantage_BT = advantage_BT[:, :1]
    theirs = trl_gmpo_loss(logp_BT, old_logp_BT, advantage_BT[:, 0], mask_BT, 0.3, 0.4)
    denominator = policy_loss.loss_denominator("sequence", mask_BT, whole_step(mask_BT), 11)
    cfg = section(0.3, 0.4, surrogate="gmpo")
    ours, stats = surrogate(logp_BT, old_logp_BT, advantage_BT.expand_as(mask_BT), mask_BT, denominator, cfg)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)
    assert stats.metrics()["policy/clipfrac_avg"] > 0


def test_a_token_of_weight_zero_is_clipped_in_gmpo_as_the_others_are():
    log_ratio_BT = torch.tensor([[0.9, -0.1, 0.0]], dtype=torch.float64)
    cfg = section(0.2, 0.4, surrogate="gmpo")
    found = []
    for weight in (0.0, 1e-12):
        advantage_BT = torch.tensor([[weight, 1.0, 1.0]], dtype=torch.float64)
        mask_BT = torch.ones_like(advantage_BT, dtype=torch.bool)
        found.append(surrogate(log_ratio_BT, torch.zeros_like(log_ratio_BT), advantage_BT, mask_BT, 3.0, cfg)[0].item())
    assert found == pytest.approx([-2 * math.exp(0.1) / 3] * 2, abs=1e-9)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_a_probability_that_rounds_to_one_has_a_finite_divergence(kind):
    logp_BT = torch.tensor([[0.0, -40.0, 0.0]], requires_grad=True)
    old_logp_BT, ones_BT = torch.tensor([[0.0, 0.0, -40.0]]), torch.ones(1, 3)
    tokens = PolicyTokens(logp_BT, old_logp_BT, torch.tensor([[1.0, -1.0, 1.0]]), ones_BT.bool())
    low_BT, high_BT, _ = policy_loss.beyond(tokens, PolicyTerms(kind), (logp_BT - old_logp_BT).exp())
    assert low_BT.tolist() == [[False, True, False]] and high_BT.tolist() == [[False, False, True]]


def learnt(advantage_BT, mask_BT, cfg, **scores):
    zero_BT = torch.zeros_like(advantage_BT)
    given = {
        "logp_BT": zero_BT,
        "old_logp_BT": scores.get("logp_BT", zero_BT),
        "drawn_logp_BT": zero_BT,
        "entropy_BT": zero_BT,
        **scores,
    }
    return policy_loss.learnt_advantages(advantage_BT, mask_BT, cfg, **given)


@given(seed=seeds, share=st.floats(0.05, 0.99))
def test_the_tokens_of_highest_entropy_are_learnt(seed, share):
    _, _, advantage_BT, mask_BT = batch(seed)
    entropy_BT = torch.rand(mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    found_BT = learnt(advantage_BT, mask_BT, section(top_entropy_share=share), entropy_BT=entropy_BT)
    ranked = sorted(entropy_BT[mask_BT].tolist())
    place = (1 - share) * (len(ranked) - 1)  # the quantile, interpolated between its neighbours
    low, high = ranked[math.floor(place)], ranked[math.ceil(place)]
    least = low + (high - low) * (place - math.floor(place))
    for entropy, advantage, found in tokens(entropy_BT, advantage_BT, found_BT, mask_BT=mask_BT):
        if abs(entropy - least) > 1e-6:
            assert found == (advantage if entropy > least else 0)


@given(seed=seeds, share=st.floats(0.01, 0.9), low=st.floats(-1, 0.2), width=st.floats(0.05, 2))
def test_clip_cov_leaves_out_some_of_the_tokens_whose_covariance_is_within_the_bounds(seed, share, low, width):
    logp_BT, _, advantage_BT, mask_BT = batch(seed, 4, 9)
    cfg = section(clip_cov_share=share, clip_cov_low=low, clip_cov_high=low + width)
    found_BT, again_BT = (learnt(advantage_BT, mask_BT, cfg, logp_BT=logp_BT, seed=3) for _ in range(2))
    assert torch.equal(found_BT, again_BT)
    rows = rows_of(logp_BT, advantage_BT, mask_BT=mask_BT)
    within = [low < one < low + width for one in covariances(rows)]
    is_cut = [a != 0 and found == 0 for a, found in tokens(advantage_BT, found_BT, mask_BT=mask_BT)]
    assert sum(is_cut) == min(sum(within), max(1, int(share * len(within))))
    assert all(inside for inside, cut in zip(within, is_cut, strict=True) if cut)
    assert all(found in (0, a) for a, found in tokens(advantage_BT, found_BT, mask_BT=mask_BT))
    others = [learnt(advantage_BT, mask_BT, cfg, logp_BT=logp_BT, seed=seed) for seed in range(20)]
    if 0 < sum(is_cut) < sum(within):
        assert not all(torch.equal(other_BT, found_BT) for other_BT in others)


@given(seed=seeds, limit=st.floats(0.01, 0.5))
def test_completions_that_fell_off_the_policy_and_were_bad_are_left_out(seed, limit):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed)
    scores = {"logp_BT": logp_BT, "drawn_logp_BT": old_logp_BT}
    found_BT = learnt(advantage_BT, mask_BT, section(off_policy_mask=limit), **scores)
    for b, row in enumerate(rows_of(logp_BT, old_logp_BT, advantage_BT, found_BT, mask_BT=mask_BT)):
        fallen = math.fsum(old_logp - logp for logp, old_logp, _, _ in row) / len(row)
        assert [one[3] for one in row] == [a if a >= 0 or fallen <= limit else 0 for _, _, a, _ in row], b


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{"top_entropy_share": 0.4}, {"off_policy_mask": 0.01}])
def test_what_is_left_out_equals_trl(trl_grpo_loss, seed, options):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=0.5)
    advantage_BT, num_tokens = advantage_BT[:, :1], int(mask_BT.sum())
    entropy_BT = torch.rand(mask_BT.shape, generator=torch.Generator().manual_seed(seed))
    trl = {"top_entropy_quantile": options.get("top_entropy_share", 1.0)}
    trl |= {"off_policy_mask_threshold": options.get("off_policy_mask"), "entropy_BT": entropy_BT}
    theirs, _ = trl_grpo_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens, 0.2, 0.2, **trl)
    cfg = section(**options)
    scores = {"logp_BT": logp_BT, "drawn_logp_BT": old_logp_BT, "entropy_BT": entropy_BT}
    kept_BT = learnt(advantage_BT.expand_as(mask_BT), mask_BT, cfg, **scores)
    assert ((kept_BT == 0) & mask_BT).any()
    ours, _ = surrogate(logp_BT, old_logp_BT, kept_BT, mask_BT, num_tokens, cfg)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_the_product_of_a_completion_s_ratios_gives_the_loss_of_trl_s_rloo(trl_rloo_loss, seed):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(seed, 6, 7, dtype=torch.float32, spread=0.2)
    theirs, expected = trl_rloo_loss(logp_BT, old_logp_BT, advantage_BT[:, 0], mask_BT, 0.05, 0.08)
    cfg = section(0.05, 0.08, importance_sampling_level="product")
    denominator = policy_loss.loss_denominator("sequence", mask_BT, whole_step(mask_BT), 9)
    advantage_BT = advantage_BT[:, :1].expand_as(mask_BT)
    ours, _ = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, denominator, cfg)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    torch.testing.assert_close(grad(ours, logp_BT)[0], grad(theirs, logp_BT)[0], atol=1e-5, rtol=0)
    assert expected["clip_ratio/region_mean"] > 0


def test_the_entropy_bonus_equals_trl(trl_grpo_loss):
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(1, 6, 7, dtype=torch.float32)
    entropy_BT, num_tokens = logp_BT.square(), int(mask_BT.sum())
    arguments = (logp_BT, old_logp_BT, advantage_BT, mask_BT, num_tokens)
    theirs, expected = trl_grpo_loss(*arguments, 0.2, 0.28, entropy_BT=entropy_BT, entropy_coef=0.05)
    policy, _ = surrogate(*arguments, section(0.2, 0.28))
    bonus = entropy_bonus(entropy_BT, mask_BT, num_tokens)
    assert policy.item() == pytest.approx(expected["policy_loss"], abs=1e-5)
    assert bonus.item() == pytest.approx(expected["entropy"], abs=1e-5)
    assert (policy - 0.05 * bonus).item() == pytest.approx(theirs.item(), abs=1e-5)


def test_statistics_are_detached_and_nothing_but_logp_gets_a_gradient():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    old_logp_BT.requires_grad_()
    advantage_BT.requires_grad_()
    cfg = section(importance_sampling_level="sequence")
    loss, stats = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT.long(), torch.tensor(9.0), cfg)
    loss.backward()
    assert logp_BT.grad is not None and old_logp_BT.grad is None and advantage_BT.grad is None
    assert not stats.pack().requires_grad


def test_bf16_log_probs_give_an_fp32_loss():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = (x.bfloat16() if x.is_floating_point() else x for x in batch(0))
    assert surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT, 9, section())[0].dtype == torch.float32


def test_a_batch_without_tokens_has_no_loss_and_no_metrics():
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(0)
    loss, stats = surrogate(logp_BT, old_logp_BT, advantage_BT, mask_BT & False, 9, section())
    assert loss.item() == 0 and stats.metrics() == {}


def test_bad_input_is_refused():
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"advantage_BT \(2,\)"):
        surrogate(good, good, torch.zeros(2), good, 6, section())
    with pytest.raises(InputError, match="denominator is 0"):
        surrogate(good, good, good, good, 0, section())


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match=r"dual_clip is 1\.1, not above 1 \+ clip_high, 1\.2"):
        section(dual_clip=1.1)
    with pytest.raises(ValidationError, match="dual_clip belongs to surrogate clip"):
        section(surrogate="cispo", dual_clip=3.0)
    with pytest.raises(ValidationError, match="bias_correction weighs the KL in the loss"):
        KLSection(bias_correction=True)
    with pytest.raises(ValidationError, match=r"lam is 0\.95.*critic is none; set lam: 1\.0"):
        PPOSection(critic="none")
    with pytest.raises(ValidationError, match=r"set kl\.place: loss"):
        GRPOSection.model_validate(
            {"multi_objective_aggregation": "normalize_then_sum", "kl": {"place": "reward", "estimator": "k1"}}
        )


def test_terms_out_of_range_are_refused():
    for options, said in (
        ({"clip_low": 1.0}, "clip_low is 1.0; it must lie between 0 and 1"),
        ({"dual_clip": 1.1}, "dual_clip is 1.1; it must be above 1.2"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "dual_clip is 3.0 with surrogate cispo"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0; it must be 0 or more"),
    ):
        with pytest.raises(InputError, match=said):
            PolicyTerms(**options)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_beyond_the_range_of_floats_gives_a_gradient_that_is_refused(advantage):
    logp_BT = torch.tensor([[1e4, -1.0]]).requires_grad_()
    tokens = (logp_BT, torch.tensor([[-1.0, -1.0]]), torch.full((1, 2), advantage), torch.ones(1, 2))
    (gradient_BT,) = grad(surrogate(*tokens, 2.0, section())[0], logp_BT)
    assert not gradient_BT[0, 0].isfinite() and gradient_BT[0, 1].isfinite()


def test_nan_inside_the_mask_reaches_the_loss():
    logp_BT, old_logp_BT, advantage_BT, _ = batch(0)
    terms = PolicyTerms(kl_coef=0.1, entropy_coef=0.01)
    tensors_BT = [logp_BT.detach(), old_logp_BT, advantage_BT, logp_BT.detach(), logp_BT.detach().abs()]
    for place in range(5):
        dirty_BT = [x.clone() for x in tensors_BT]
        dirty_BT[place][1, 0] = float("nan")
        new, old, advantage, reference, entropy = dirty_BT
        tokens = PolicyTokens(new, old, advantage, torch.ones(4, 5), reference, entropy)
        assert policy_loss.policy_loss(tokens, terms, 1.0, 1.0)[0].isnan()


def test_clip_cov_draws_none_of_the_tokens_that_the_clip_cuts():
    """As in verl: such a token has no gradient, and would use up the share."""
    logp_BT, old_logp_BT, advantage_BT, mask_BT = batch(3, 6, 9, spread=0.8)
    cfg = section(0.1, 0.1, clip_cov_share=0.9, clip_cov_low=-9, clip_cov_high=9)
    found_BT = learnt(advantage_BT, mask_BT, cfg, logp_BT=logp_BT.detach(), old_logp_BT=old_logp_BT)
    ratio_BT = (logp_BT - old_logp_BT).exp()
    is_clipped_BT = ((advantage_BT > 0) & (ratio_BT > 1.1)) | ((advantage_BT < 0) & (ratio_BT < 0.9))
    assert (is_clipped_BT & mask_BT).any()
    assert torch.equal(found_BT[is_clipped_BT & mask_BT], advantage_BT[is_clipped_BT & mask_BT])
    assert not found_BT[~is_clipped_BT & mask_BT].all()
