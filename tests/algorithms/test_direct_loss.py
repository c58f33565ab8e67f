import cmath
import math
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import grad, gradcheck

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.core.errors import InputError
from tunesmith.learn.algorithms import direct_loss
from tunesmith.learn.algorithms.direct_loss import PairLogps
from tunesmith.learn.algorithms.sums import merged

seeds = st.integers(0, 2**32 - 1)
SETTINGS = {
    "sigmoid": DPOSection(beta=0.3),
    "conservative": DPOSection(beta=0.3, label_smoothing=0.2),
    "robust": DPOSection(loss="robust", beta=0.3, label_smoothing=0.1),
    "hinge": DPOSection(loss="hinge", beta=0.3),
    "ipo": DPOSection(loss="ipo", beta=0.4),
    "sigmoid_norm": DPOSection(loss="sigmoid_norm", beta=0.4),
    "exo_pair": DPOSection(loss="exo_pair", beta=0.3, label_smoothing=0.1),
    "nca_pair": DPOSection(loss="nca_pair", beta=0.3),
    "bco_pair": DPOSection(loss="bco_pair", beta=0.3),
    "sppo_hard": DPOSection(loss="sppo_hard", beta=0.3),
    "apo_zero": DPOSection(loss="apo_zero", beta=0.3),
    "apo_down": DPOSection(loss="apo_down", beta=0.3),
    "discopop": DPOSection(loss="discopop", beta=0.3, discopop_tau=0.4),
    "simpo": DPOSection(loss="simpo", beta=2.0, simpo_gamma=0.8),
    "smoothed simpo": DPOSection(loss="simpo", beta=2.0, label_smoothing=0.2),
    "orpo": DPOSection(loss="orpo", beta=0.5),
    "rao_kupper": DPOSection(beta=0.3, ties="rao_kupper", tie_theta=2.5),
    "conservative rao_kupper": DPOSection(beta=0.3, ties="rao_kupper", label_smoothing=0.1),
}
WITH_TIES = {
    name: cfg if cfg.ties != "drop" else cfg.model_copy(update={"ties": "half"}) for name, cfg in SETTINGS.items()
}
few_examples = settings(max_examples=25)
"""For what runs once for each loss."""
every_loss = pytest.mark.parametrize("name", SETTINGS)


def batch(seed, num_pairs=6, dtype=torch.float64, ties=True):
    """Pairs whose log-probs lie where those of short texts do; a third of them are ties."""
    generator = torch.Generator().manual_seed(seed)
    length_SN = torch.randint(1, 9, (2, num_pairs), generator=generator)
    noise_SN = torch.rand(2, num_pairs, generator=generator, dtype=dtype)
    logp_SN = -length_SN * (0.05 + 2 * noise_SN)
    reference_SN = logp_SN + 4 * torch.randn(2, num_pairs, generator=generator, dtype=dtype)
    tie_N = torch.rand(num_pairs, generator=generator) < 0.3
    return PairLogps(logp_SN.requires_grad_(), length_SN, reference_SN, tie_N if ties else None)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def twin(name, cfg, logps, references, lengths):
    """Loss of a decided pair and its derivatives by the two log-probs, written through probabilities, in Python."""
    (a, b), (m, n), beta, e = logps, lengths, cfg.beta, cfg.label_smoothing
    d = beta * ((a - references[0]) - (b - references[1]))
    if name in ("sigmoid", "conservative"):
        p = sigmoid(d)
        slope = beta * (e * p - (1 - e) * (1 - p))
        return -(1 - e) * math.log(p) - e * math.log(1 - p), slope, -slope
    if name == "robust":
        p = sigmoid(d)
        slope = beta * (-(1 - e) * (1 - p) - e * p) / (1 - 2 * e)
        return (-(1 - e) * math.log(p) + e * math.log(1 - p)) / (1 - 2 * e), slope, -slope
    if name == "hinge":
        slope = -beta if d < 1 else 0.0
        return max(0.0, 1 - d), slope, -slope
    if name == "ipo":
        gap = (a - references[0]) / m - (b - references[1]) / n - 0.5 / beta
        return gap * gap, 2 * gap / m, -2 * gap / n
    if "simpo" in name:
        p = sigmoid(beta * (a / m - b / n) - cfg.simpo_gamma)
        slope = beta * (e * p - (1 - e) * (1 - p))
        return -(1 - e) * math.log(p) - e * math.log(1 - p), slope / m, -slope / n
    if name == "orpo":
        p, q = math.exp(a / m), math.exp(b / n)
        ratio = (p / (1 - p)) / (q / (1 - q))
        pull = beta / (1 + ratio)
        return -a / m + beta * math.log1p(1 / ratio), (-1 - pull / (1 - p)) / m, pull / (1 - q) / n
    return relative(name, cfg, (a - references[0]) * beta, (b - references[1]) * beta, lengths)


def relative(name, cfg, x, y, lengths):
    """`twin` of the losses of two rewards `x` and `y`, with derivatives by a step along the imaginary axis."""

    def s(number):
        return 1 / (1 + cmath.exp(-number))

    def value(x, y):
        e, beta = cfg.label_smoothing, cfg.beta
        q, w = s(x - y), s((x - y) / cfg.discopop_tau)
        return {
            "sigmoid_norm": lambda: -cmath.log(s(x / lengths[0] - y / lengths[1])),
            "exo_pair": lambda: q * cmath.log(q / (1 - e)) + (1 - q) * cmath.log((1 - q) / e),
            "nca_pair": lambda: -cmath.log(s(x)) - 0.5 * cmath.log(1 - s(x)) - 0.5 * cmath.log(1 - s(y)),
            "bco_pair": lambda: -cmath.log(s(x)) - cmath.log(1 - s(y)),
            "sppo_hard": lambda: (x / beta - 0.5 / beta) ** 2 + (y / beta + 0.5 / beta) ** 2,
            "apo_zero": lambda: 1 - s(x) + s(y),
            "apo_down": lambda: s(x) + 1 - s(x - y),
            "discopop": lambda: -(1 - w) * cmath.log(s(x - y)) + w * cmath.exp(y - x),
        }[name]()

    step = 1e-30j
    slopes = (value(x + step, y).imag / 1e-30, value(x, y + step).imag / 1e-30)
    return value(x, y).real, cfg.beta * slopes[0], cfg.beta * slopes[1]


def rao_kupper_twin(cfg, logps, references, tie):
    """From the shares s, t of both sides: s / (s + theta t), t / (t + theta s), and what is left for a tie."""
    theta, e = cfg.tie_theta, cfg.label_smoothing
    s, t = (math.exp(cfg.beta * (logp - reference)) for logp, reference in zip(logps, references, strict=True))
    wins, loses = s / (s + theta * t), t / (t + theta * s)
    if tie:
        slope = cfg.beta * ((1 - loses) - (1 - wins))
        return -math.log(1 - wins - loses), slope, -slope
    slope = cfg.beta * (e * (1 - loses) - (1 - e) * (1 - wins))
    return -(1 - e) * math.log(wins) - e * math.log(loses), slope, -slope


def twins(name, cfg, pairs):
    """(loss, derivative by the chosen, by the rejected) of each pair, ties included."""
    found = []
    ties = [False] * pairs.logp_SN.shape[1] if pairs.tie_N is None else pairs.tie_N.tolist()
    columns = (pairs.logp_SN, pairs.reference_SN, pairs.length_SN)
    for index, tie in enumerate(ties):
        logps, references, lengths = ([x[side, index].item() for side in (0, 1)] for x in columns)
        if cfg.ties == "rao_kupper":
            found.append(rao_kupper_twin(cfg, logps, references, tie))
            continue
        one = twin(name, cfg, logps, references, lengths)
        other = twin(name, cfg, logps[::-1], references[::-1], lengths[::-1])
        half = ((one[0] + other[0]) / 2, (one[1] + other[2]) / 2, (one[2] + other[1]) / 2)
        found.append(half if tie else one)
    return found


@every_loss
@few_examples
@given(seed=seeds, num_pairs=st.floats(1, 100))
def test_loss_and_gradients_equal_the_twin(name, seed, num_pairs):
    cfg, pairs = WITH_TIES[name], batch(seed)
    loss, stats = direct_loss.paired(pairs, cfg, num_pairs=num_pairs)
    (gradient_SN,) = grad(loss, pairs.logp_SN)
    expected = twins(name, cfg, pairs)
    assert loss.item() == pytest.approx(math.fsum(t[0] for t in expected) / num_pairs, abs=1e-10)
    assert stats.metrics()["loss"] == pytest.approx(fmean(t[0] for t in expected), abs=1e-10)
    for side in (0, 1):
        assert gradient_SN[side].tolist() == pytest.approx([t[side + 1] / num_pairs for t in expected], abs=1e-10)


@every_loss
@few_examples
@given(seed=seeds)
def test_metrics_are_means_over_the_decided_pairs(name, seed):
    cfg, pairs = WITH_TIES[name], batch(seed)
    _, stats = direct_loss.paired(pairs, cfg, num_pairs=6)
    decided = [index for index, tie in enumerate(pairs.tie_N.tolist()) if not tie]
    base_SN = pairs.reference_SN if cfg.needs_reference else torch.zeros(2, 6)
    scale_SN = torch.ones(2, 6) if cfg.needs_reference else pairs.length_SN
    chosen, rejected = (cfg.beta * (pairs.logp_SN - base_SN) / scale_SN).detach()[:, decided].tolist()
    expected = (
        {
            "rewards/chosen": fmean(chosen),
            "rewards/rejected": fmean(rejected),
            "rewards/margins": fmean(chosen) - fmean(rejected),
            "rewards/accuracies": fmean(a > b for a, b in zip(chosen, rejected, strict=True)),
            "logps/chosen": pairs.logp_SN[0, decided].mean().item(),
            "logps/rejected": pairs.logp_SN[1, decided].mean().item(),
        }
        if decided
        else {}
    )
    found = stats.metrics()
    found.pop("loss")
    assert found == pytest.approx(expected, abs=1e-9)


@every_loss
def test_loss_passes_gradcheck(name):
    pairs = batch(1)

    def loss(logp_SN):
        given_pairs = PairLogps(logp_SN, pairs.length_SN, pairs.reference_SN, pairs.tie_N)
        return direct_loss.paired(given_pairs, WITH_TIES[name], num_pairs=6)[0]

    assert gradcheck(loss, (pairs.logp_SN,))


@every_loss
@few_examples
@given(seed=seeds, size=st.integers(1, 6))
def test_micro_batches_add_up_to_the_full_batch(name, seed, size):
    cfg, pairs = WITH_TIES[name], batch(seed)
    loss, stats = direct_loss.paired(pairs, cfg, num_pairs=6)
    parts = [
        direct_loss.paired(
            PairLogps(pairs.logp_SN[:, rows], pairs.length_SN[:, rows], pairs.reference_SN[:, rows], pairs.tie_N[rows]),
            cfg,
            num_pairs=6,
        )
        for rows in torch.arange(6).split(size)
    ]
    total = torch.stack([part[0] for part in parts]).sum()
    assert total.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(grad(total, pairs.logp_SN), grad(loss, pairs.logp_SN), atol=1e-13, rtol=0)
    assert merged(part[1] for part in parts).metrics() == pytest.approx(stats.metrics(), abs=1e-12)


@every_loss
@few_examples
@given(seed=seeds)
def test_the_order_of_a_tie_means_nothing(name, seed):
    pairs = batch(seed)
    pairs = PairLogps(pairs.logp_SN, pairs.length_SN, pairs.reference_SN, torch.ones(6, dtype=torch.bool))
    one, _ = direct_loss.paired(pairs, WITH_TIES[name], num_pairs=6)
    other, _ = direct_loss.paired(pairs.swapped(), WITH_TIES[name], num_pairs=6)
    assert one.item() == pytest.approx(other.item(), abs=1e-12)
    torch.testing.assert_close(grad(one, pairs.logp_SN), grad(other, pairs.logp_SN), atol=1e-13, rtol=0)


@given(difference=st.floats(-20, 20), theta=st.floats(1.01, 50))
def test_the_three_outcomes_of_rao_and_kupper_have_probability_one(difference, theta):
    cfg = DPOSection(beta=1.0, ties="rao_kupper", tie_theta=theta)

    def probability(first, second, tie):
        logp_SN = torch.tensor([[first], [second]], dtype=torch.float64)
        pairs = PairLogps(logp_SN, torch.ones(2, 1), torch.zeros_like(logp_SN), torch.tensor([tie]))
        return math.exp(-direct_loss.paired(pairs, cfg, num_pairs=1)[0].item())

    outcomes = probability(difference, 0, False), probability(0, difference, False), probability(difference, 0, True)
    assert math.fsum(outcomes) == pytest.approx(1, abs=1e-9)
    assert probability(0, 0, True) == pytest.approx((theta - 1) / (theta + 1), abs=1e-9)


def test_without_smoothing_and_ties_the_names_meet():
    pairs = batch(3, ties=False)
    plain, _ = direct_loss.paired(pairs, DPOSection(beta=0.3), num_pairs=6)
    half, _ = direct_loss.paired(pairs, DPOSection(beta=0.3, ties="half"), num_pairs=6)
    assert plain.item() == half.item()


def test_certain_tokens_keep_the_odds_finite():
    logp_SN = torch.tensor([[0.0, -1e-9], [-1e-9, 0.0]], requires_grad=True)
    pairs = PairLogps(logp_SN, torch.ones(2, 2))
    loss, _ = direct_loss.paired(pairs, DPOSection(loss="orpo"), num_pairs=2)
    assert math.isfinite(loss.item())
    assert grad(loss, logp_SN)[0].isfinite().all()


def test_far_apart_rewards_stay_finite():
    logp_SN = torch.tensor([[-1e5, 0.0], [0.0, -1e5]], requires_grad=True)
    reference_SN, tie_N = torch.zeros(2, 2), torch.tensor([False, True])
    for ties in ("half", "rao_kupper"):
        pairs = PairLogps(logp_SN, torch.ones(2, 2), reference_SN, tie_N)
        loss, _ = direct_loss.paired(pairs, DPOSection(beta=1.0, ties=ties), num_pairs=2)
        assert math.isfinite(loss.item())
        assert grad(loss, logp_SN)[0].isfinite().all()


def test_statistics_are_detached_and_bf16_is_widened():
    pairs = batch(0, dtype=torch.float32)
    pairs = PairLogps(pairs.logp_SN.bfloat16(), pairs.length_SN, pairs.reference_SN.bfloat16())
    loss, stats = direct_loss.paired(pairs, DPOSection(), num_pairs=torch.tensor(6))
    assert loss.dtype == torch.float32 and loss.requires_grad and not stats.pack().requires_grad


def test_no_gradient_reaches_the_reference():
    pairs = batch(0)
    reference_SN = pairs.reference_SN.clone().requires_grad_()
    loss, _ = direct_loss.paired(PairLogps(pairs.logp_SN, pairs.length_SN, reference_SN), DPOSection(), num_pairs=6)
    assert grad(loss, reference_SN, allow_unused=True) == (None,)


def test_bad_input_is_refused():
    good = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"length_SN \(3,\)"):
        direct_loss.paired(PairLogps(good, good[0], good), DPOSection(), num_pairs=3)
    with pytest.raises(InputError, match=r"tie_N \(2, 3\)"):
        direct_loss.paired(PairLogps(good, good, good, good), DPOSection(), num_pairs=3)
    with pytest.raises(InputError, match="num_pairs is 0"):
        direct_loss.paired(PairLogps(good, good, good), DPOSection(), num_pairs=0)


def labels(seed, size=7, dtype=torch.float64):
    """Log-probs of single completions, of the reference, and which of them are wanted."""
    generator = torch.Generator().manual_seed(seed)
    logp_B, reference_B = (-5 + 3 * torch.randn(size, generator=generator, dtype=dtype) for _ in range(2))
    return logp_B.requires_grad_(), reference_B, torch.rand(size, generator=generator) < 0.5


@given(seed=seeds, kl=st.floats(0, 3))
def test_kto_equals_its_twin(seed, kl):
    cfg = DPOSection(loss="kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
    logp_B, reference_B, wanted_B = labels(seed)
    loss, stats = direct_loss.kto(logp_B, reference_B, wanted_B, cfg, kl=kl, num_completions=5)
    values, slopes = [], []
    for logp, reference, wanted in zip(logp_B.tolist(), reference_B.tolist(), wanted_B.tolist(), strict=True):
        sign, weight = (1, 1.3) if wanted else (-1, 0.7)
        value = sigmoid(sign * 0.4 * (logp - reference - kl))
        values.append(weight * (1 - value))
        slopes.append(-sign * weight * 0.4 * value * (1 - value) / 5)
    assert loss.item() == pytest.approx(math.fsum(values) / 5, abs=1e-10)
    assert grad(loss, logp_B)[0].tolist() == pytest.approx(slopes, abs=1e-10)
    metrics = stats.metrics()
    assert metrics["loss"] == pytest.approx(fmean(values), abs=1e-10)
    assert "rewards/accuracies" not in metrics
    for side, mask_B in (("chosen", wanted_B), ("rejected", ~wanted_B)):
        if mask_B.any():
            reward = 0.4 * (logp_B - reference_B).detach()[mask_B].mean().item()
            assert metrics[f"rewards/{side}"] == pytest.approx(reward, abs=1e-10)
            assert metrics[f"logps/{side}"] == pytest.approx(logp_B.detach()[mask_B].mean().item(), abs=1e-10)


def test_kto_passes_gradcheck_and_its_micro_batches_add_up():
    cfg = DPOSection(loss="kto")
    logp_B, reference_B, wanted_B = labels(2)

    def part(rows):
        return direct_loss.kto(logp_B[rows], reference_B[rows], wanted_B[rows], cfg, kl=0.3, num_completions=7)[0]

    assert gradcheck(
        lambda logp: direct_loss.kto(logp, reference_B, wanted_B, cfg, kl=0.3, num_completions=7)[0], logp_B
    )
    assert (part(slice(0, 3)) + part(slice(3, 7))).item() == pytest.approx(part(slice(0, 7)).item(), abs=1e-14)


@given(seed=seeds, limit=st.floats(1, 5))
def test_truncated_importance_weights_and_the_loss_with_them_equal_their_twin(seed, limit):
    cfg = DPOSection(loss="kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
    logp_B, reference_B, wanted_B = labels(seed)
    drawn_B = logp_B.detach() + torch.linspace(-2, 2, 7, dtype=torch.float64)
    weight_B = direct_loss.importance(logp_B, drawn_B, limit)
    twin = [min(math.exp(p - q), limit) for p, q in zip(logp_B.tolist(), drawn_B.tolist(), strict=True)]
    assert weight_B.tolist() == pytest.approx(twin, rel=1e-12) and not weight_B.requires_grad
    options = {"kl": 0.2, "num_completions": 1}
    loss, _ = direct_loss.kto(logp_B, reference_B, wanted_B, cfg, **options, weight_B=weight_B)
    alone = [
        direct_loss.kto(logp_B[i : i + 1], reference_B[i : i + 1], wanted_B[i : i + 1], cfg, **options)[0].item()
        for i in range(7)
    ]
    assert loss.item() == pytest.approx(math.fsum(w * one for w, one in zip(twin, alone, strict=True)), abs=1e-10)


def test_the_kl_of_mismatched_completions_is_a_mean_cut_at_zero():
    assert direct_loss.mismatched_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0])) == pytest.approx(1.5)
    assert direct_loss.mismatched_kl(torch.tensor([-3.0, -5.0]), torch.tensor([-2.0, -4.0])) == 0.0
