"""The policy loss in Triton: one program takes a block of tokens, writes their gradient and its own sums.

A second, tiny sum over the programs in float64 makes the result the same in every run. Shapes: B sequences, T
completion tokens, P programs, S sums.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens

NUM_SUMS = 9
_BLOCK = 1024
_KINDS = {"k1": 1, "k2": 2, "k3": 3}


def launch(num_tokens: int) -> LaunchPlan:
    """The launch for a batch of so many tokens, padding included."""
    return LaunchPlan(_BLOCK, 1, 4, grid=(ceil_div(num_tokens, _BLOCK),))


def sums_and_gradient(
    tokens: PolicyTokens, terms: PolicyTerms, weight_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums_S, d_logp_BT float32) of surrogate and KL term, weighted per row or by one weight.

    The sums are those of `algorithms.policy_loss.PolicyStats`, in its order, and last the weighted loss.
    """
    logp_BT, reference_BT = tokens.logp_BT.contiguous(), tokens.reference_logp_BT
    plan = launch(logp_BT.numel())
    d_logp_BT = torch.empty_like(logp_BT, dtype=torch.float32)
    sums_PS = logp_BT.new_zeros((*plan.grid, NUM_SUMS), dtype=torch.float32)
    if plan.grid[0]:
        with torch.cuda.device_of(logp_BT):
            cast(Any, policy_loss_kernel)[plan.grid](
                *(logp_BT, tokens.old_logp_BT.contiguous(), tokens.advantage_BT.contiguous()),
                tokens.mask_BT.bool().contiguous().view(torch.uint8),
                logp_BT if reference_BT is None else reference_BT.contiguous(),
                *(weight_R1, d_logp_BT, sums_PS, logp_BT.numel(), logp_BT.shape[1]),
                *(1 - terms.clip_low, 1 + terms.clip_high, terms.dual_clip or float("inf"), terms.kl_coef),
                IS_CISPO=terms.surrogate == "cispo",
                KL=0 if reference_BT is None else _KINDS[terms.kl],
                CORRECTS_KL=terms.corrects_kl,
                PER_ROW=len(weight_R1) > 1,
                NUM_SUMS=NUM_SUMS,
                BLOCK=plan.block,
                num_warps=plan.num_warps,
            )
    return sums_PS.sum(0, dtype=torch.float64), d_logp_BT


@triton.jit
def _k3(x):
    """exp(x) - 1 - x; near 0, where it would cancel, its own series, cut after x^9."""
    series = x * (1.0 / 362880) + 1.0 / 40320
    series = series * x + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.5, series * x * x, tl.exp(x) - 1.0 - x)


@triton.jit
def _surrogate(new, ratio, advantage, low, high, dual, IS_CISPO: tl.constexpr):
    """Loss of each token, its slope, and where the ratio is cut: low, high and dual, as 0 or 1."""
    is_high = (ratio > high) & (advantage > 0)
    is_low = (ratio < low) & (advantage < 0)
    is_dual = (ratio > dual) & (advantage < 0)
    if IS_CISPO:
        slope = -tl.where(ratio > high, high, ratio) * advantage
        loss = slope * new
        is_low = is_low & (low < 0)
        is_dual = is_dual & (low < 0)
    else:
        held = tl.where(is_high, high, tl.where(is_low, low, tl.where(is_dual, dual, ratio)))
        loss = -held * advantage
        # Where the ratio is infinite the product is not a number, which the optimizer is to see.
        slope = tl.where(is_high | is_low | is_dual, 0.0, -advantage) * ratio
    return loss, slope, is_low.to(tl.float32), is_high.to(tl.float32), is_dual.to(tl.float32)


@triton.jit
def _penalty(new, reference, ratio, KL: tl.constexpr, CORRECTS_KL: tl.constexpr):
    """KL estimate of each token and its slope."""
    difference = new - reference
    slope = difference
    if KL == 1:
        estimate = difference
    elif KL == 2:
        estimate = 0.5 * difference * difference
    else:
        estimate = _k3(-difference)
        slope = difference - estimate
    if CORRECTS_KL:
        if KL == 1:
            slope = tl.full(slope.shape, 1.0, tl.float32)
        slope = ratio * (estimate + slope)
        estimate = ratio * estimate
    return estimate, slope


@triton.jit
def policy_loss_kernel(
    logp,
    old_logp,
    advantage,
    mask,
    reference_logp,
    weight,
    d_logp,
    sums,
    num_tokens,
    num_columns,
    low,
    high,
    dual,
    kl_coef,
    IS_CISPO: tl.constexpr,
    KL: tl.constexpr,
    CORRECTS_KL: tl.constexpr,
    PER_ROW: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of tokens; all arrays are contiguous. KL: 0 for none, else the number of the estimator."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    counts = tl.load(mask + at, mask=inside, other=0) != 0
    new = tl.load(logp + at, mask=counts, other=0.0).to(tl.float32)
    old = tl.load(old_logp + at, mask=counts, other=0.0).to(tl.float32)
    gain = tl.load(advantage + at, mask=counts, other=0.0).to(tl.float32)
    if PER_ROW:
        share = tl.load(weight + at // num_columns, mask=inside, other=0.0)
    else:
        share = tl.load(weight)
    ratio = tl.exp(new - old)
    loss, slope, is_low, is_high, is_dual = _surrogate(new, ratio, gain, low, high, dual, IS_CISPO)
    out = sums + program * NUM_SUMS
    if KL > 0:
        other = tl.load(reference_logp + at, mask=counts, other=0.0).to(tl.float32)
        estimate, along = _penalty(new, other, ratio, KL, CORRECTS_KL)
        estimate = tl.where(counts, estimate, 0.0)
        slope += kl_coef * along
        tl.store(out + 8, tl.sum((loss + kl_coef * estimate) * share, 0))
    else:
        tl.store(out + 8, tl.sum(loss * share, 0))
    tl.store(d_logp + at, tl.where(counts, slope * share, 0.0), mask=inside)
    tl.store(out, tl.sum(counts.to(tl.float32), 0))
    tl.store(out + 1, tl.sum(loss, 0))
    tl.store(out + 2, tl.sum(0.5 * (new - old) * (new - old), 0))
    tl.store(out + 3, tl.sum(is_low, 0))
    tl.store(out + 4, tl.sum(is_high, 0))
    tl.store(out + 5, tl.sum(is_dual, 0))
    ratio = tl.where(counts, ratio, 0.0)
    tl.store(out + 6, tl.sum(ratio, 0))
    tl.store(out + 7, tl.sum(ratio * ratio, 0))
