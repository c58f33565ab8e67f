"""The losses for preferences against TRL's own code, called on light stand-ins for its trainers' state."""

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import grad

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.learn.algorithms import direct_loss
from tunesmith.learn.algorithms.direct_loss import PairLogps

CLOSE = {"atol": 1e-5, "rtol": 0}


def accelerator():
    return SimpleNamespace(device="cpu", gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor)


def batch(seed=5, num_pairs=9):
    """Log-probs of single tokens `[2 N, T]` of right-padded completions behind one prompt token, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(1, 9, (2 * num_pairs,), generator=generator)
    mask_BT = torch.arange(8)[None] < length_B[:, None]
    logp_BT = -(0.05 + 2 * torch.rand(2 * num_pairs, 8, generator=generator)) * mask_BT
    reference_B = logp_BT.sum(1) + 4 * torch.randn(2 * num_pairs, generator=generator)
    return logp_BT.requires_grad_(), mask_BT, reference_B


def as_pairs(logp_BT, mask_BT, reference_B):
    shape = (2, len(logp_BT) // 2)
    return PairLogps(logp_BT.sum(1).reshape(shape), mask_BT.sum(1).reshape(shape), reference_B.reshape(shape))


def outputs(logp_BT):
    zeros_BT = torch.zeros_like(logp_BT)
    return SimpleNamespace(log_probs=logp_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool())


def completion_inputs(mask_BT):
    completion_mask = torch.cat([torch.zeros(len(mask_BT), 1), mask_BT], dim=1).long()
    ids = torch.ones_like(completion_mask)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": completion_mask}


@pytest.mark.parametrize(
    "cfg",
    [
        DPOSection(beta=0.3),
        DPOSection(loss="hinge", beta=0.3),
        DPOSection(loss="ipo", beta=0.4),
        DPOSection(loss="robust", beta=0.3, label_smoothing=0.1),
        DPOSection(loss="exo_pair", beta=0.3, label_smoothing=0.1),
        *(
            DPOSection(loss=loss, beta=0.3)
            for loss in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
        ),
    ],
    ids=lambda cfg: cfg.loss,
)
def test_losses_with_a_reference_equal_the_dpo_trainer(trl, cfg):
    logp_BT, mask_BT, reference_B = batch()
    reference = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference_B.chunk(2), strict=True))
    state = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=accelerator(),
        args=SimpleNamespace(discopop_tau=cfg.discopop_tau),
        aux_loss_enabled=False,
        beta=cfg.beta,
        f_divergence_type="reverse_kl",
        label_smoothing=cfg.label_smoothing,
        ld_alpha=None,
        loss_types=[cfg.loss],
        loss_weights=[1.0],
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        use_weighting=False,
    )
    inputs = {**completion_inputs(mask_BT), **reference}
    theirs = trl.DPOTrainer._compute_loss(state, lambda **_: outputs(logp_BT), inputs, return_outputs=False)
    ours, stats = direct_loss.paired(as_pairs(logp_BT, mask_BT, reference_B), cfg, num_pairs=9)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(grad(ours, logp_BT), grad(theirs, logp_BT), **CLOSE)
    expected = {name: values[0] for name, values in state._metrics["train"].items()}
    for name, value in stats.metrics().items():
        if name != "loss":
            assert value == pytest.approx(expected[name], abs=1e-5), name


@pytest.mark.parametrize(
    ("theirs_type", "cfg"),
    [
        ("simpo", DPOSection(loss="simpo", beta=2.0, simpo_gamma=0.8)),
        ("simpo", DPOSection(loss="simpo", beta=2.0, label_smoothing=0.2)),
        ("sigmoid", DPOSection(beta=0.3, label_smoothing=0.2)),
    ],
    ids=["simpo", "smoothed simpo", "conservative"],
)
def test_simpo_and_label_smoothing_equal_the_cpo_trainer(trl, theirs_type, cfg):
    """CPO's smoothed loss takes any log-probs: given those relative to a reference it is conservative DPO."""
    cpo = importlib.import_module("trl.experimental.cpo").CPOTrainer
    logp_BT, mask_BT, reference_B = batch()
    state = SimpleNamespace(
        accelerator=accelerator(),
        alpha=0.0,
        beta=cfg.beta,
        label_smoothing=cfg.label_smoothing,
        loss_type=theirs_type,
        simpo_gamma=cfg.simpo_gamma,
    )
    given_B = logp_BT.sum(1) / mask_BT.sum(1) if theirs_type == "simpo" else logp_BT.sum(1) - reference_B
    losses, chosen, rejected = cpo.cpo_loss(state, *given_B.chunk(2))
    ours, stats = direct_loss.paired(as_pairs(logp_BT, mask_BT, reference_B), cfg, num_pairs=9)
    torch.testing.assert_close(ours, losses.mean(), **CLOSE)
    torch.testing.assert_close(grad(ours, logp_BT), grad(losses.mean(), logp_BT), **CLOSE)
    assert stats.metrics()["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert stats.metrics()["rewards/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-5)


def test_the_odds_ratio_equals_the_orpo_trainer(trl):
    orpo = importlib.import_module("trl.experimental.orpo").ORPOTrainer
    cfg = DPOSection(loss="orpo", beta=0.5)
    logp_BT, mask_BT, reference_B = batch()
    mean_B = logp_BT.sum(1) / mask_BT.sum(1)
    state = SimpleNamespace(accelerator=accelerator(), beta=cfg.beta)
    negative, chosen, rejected, *_ = orpo.odds_ratio_loss(state, *mean_B.chunk(2))
    theirs = -mean_B[:9].mean() - negative.mean()  # the likelihood term is that of the completion, as in the paper
    ours, stats = direct_loss.paired(as_pairs(logp_BT, mask_BT, reference_B), cfg, num_pairs=9)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(grad(ours, logp_BT), grad(theirs, logp_BT), **CLOSE)
    assert stats.metrics()["rewards/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert stats.metrics()["rewards/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-5)


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_kto_and_its_kl_equal_the_kto_trainer(trl, shift):
    cfg = DPOSection(loss="kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)
    logp_BT, mask_BT, reference_B = batch()
    wanted_B = torch.rand(18, generator=torch.Generator().manual_seed(1)) < 0.4
    mismatched_B = reference_B - 3
    state = SimpleNamespace(
        _compute_kl_logps=lambda *_: mismatched_B + shift,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=accelerator(),
        aux_loss_enabled=False,
        beta=cfg.beta,
        calculate_KL=True,
        desirable_weight=cfg.desirable_weight,
        loss_type="kto",
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        undesirable_weight=cfg.undesirable_weight,
    )
    inputs = {**completion_inputs(mask_BT), "label": wanted_B, "ref_logps": reference_B, "ref_KL_logps": mismatched_B}
    theirs = trl.KTOTrainer._compute_loss(state, lambda **_: outputs(logp_BT), inputs, return_outputs=False)
    kl = direct_loss.mismatched_kl(mismatched_B + shift, mismatched_B)
    ours, stats = direct_loss.kto(logp_BT.sum(1), reference_B, wanted_B, cfg, kl=kl, num_completions=18)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(grad(ours, logp_BT), grad(theirs, logp_BT), **CLOSE)
    expected = {name: values[0] for name, values in state._metrics["train"].items()}
    assert kl == pytest.approx(expected["kl"], abs=1e-5)
    for name, value in stats.metrics().items():
        if name != "loss":
            assert value == pytest.approx(expected[name], abs=1e-5), name
