"""The definition of the policy loss, by autograd; and the same with its gradient written out, as the kernels have it.

Shapes: B sequences, T completion tokens, S sums. `mask_BT` is true where a token counts. What stands outside of it,
NaN included, reaches neither loss nor gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.kernels.masking import Denominator, kept, shared_out, total
from tunesmith.kernels.policy_loss.records import Estimator, Level, PolicySums, PolicyTerms, PolicyTokens


def importance_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Probability under the new policy over that under the old one, `[B, T]`, differentiable through `logp_BT` alone.

    Of each token, 1 outside the mask; or every token of a row has the row's.
    """
    mask_BT = mask_BT.bool()
    log_ratio_BT = kept(logp_BT, mask_BT) - kept(old_logp_BT.detach(), mask_BT)
    if level == "token":
        return log_ratio_BT.exp()
    log_ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    if level == "sequence":
        log_ratio_B1 = log_ratio_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio_B1.exp().expand_as(log_ratio_BT)


def k1(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """The log-ratio of each token: unbiased, of either sign. As a loss its gradient has mean 0: no restraint."""
    return logp_BT - ref_logp_BT


def k2(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """Half the squared log-ratio of each token: never negative, biased in value, unbiased in gradient as a loss."""
    return 0.5 * (logp_BT - ref_logp_BT).square()


def k3(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """exp(-d) - 1 + d of each token: never negative, unbiased, of lower variance than k1."""
    difference_BT = ref_logp_BT - logp_BT
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference nearly agree: where training starts.
    return torch.expm1(difference_BT) - difference_BT


ESTIMATORS: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Of the KL to the reference policy, after Schulman 2020, "Approximating KL divergence"."""


def penalty(
    estimator: Estimator, logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor, ratio_BT: Tensor | None = None
) -> Tensor:
    """The KL estimate of each token as a loss, `[B, T]`, 0 outside the mask, times `ratio_BT` if it is given.

    The gradient flows through `logp_BT` and the ratio. Without one k1 carries k2's gradient, as its own has mean 0.
    """
    mask_BT = mask_BT.bool()
    logp_BT, ref_logp_BT = kept(logp_BT, mask_BT), kept(ref_logp_BT.detach(), mask_BT)
    kl_BT = ESTIMATORS[estimator](logp_BT, ref_logp_BT)
    if ratio_BT is not None:
        return kept(ratio_BT, mask_BT) * kl_BT
    if estimator == "k1":
        guide_BT = k2(logp_BT, ref_logp_BT)
        kl_BT = kl_BT.detach() + (guide_BT - guide_BT.detach())
    return kl_BT


def surrogate(tokens: PolicyTokens, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """Loss of each token and its ratio, `[B, T]`, both differentiable; the equations are those of
    `algorithms.policy_loss.surrogate`.
    """
    mask_BT = tokens.mask_BT.bool()
    low, high, dual = 1 - terms.clip_low, 1 + terms.clip_high, terms.dual_clip
    advantage_BT = kept(tokens.advantage_BT.detach(), mask_BT)
    ratio_BT = importance_ratio(tokens.logp_BT, tokens.old_logp_BT, mask_BT, terms.level)
    # With advantage 0 outside the mask, the loss there is 0 and so is its gradient.
    if terms.surrogate == "cispo":
        return -ratio_BT.detach().clamp(max=high) * advantage_BT * kept(tokens.logp_BT, mask_BT), ratio_BT
    free_BT = ratio_BT if dual is None else ratio_BT.clamp(max=dual)
    return -torch.minimum(free_BT * advantage_BT, ratio_BT.clamp(low, high) * advantage_BT), ratio_BT


def sums_of(tokens: PolicyTokens, terms: PolicyTerms, loss_BT: Tensor, ratio_BT: Tensor, kl_BT: Tensor) -> PolicySums:
    """The sums over tokens, given what `surrogate` found and the KL of each token, zeros outside the mask."""
    mask_BT, is_cispo = tokens.mask_BT.bool(), terms.surrogate == "cispo"
    low, high = 1 - terms.clip_low, 1 + terms.clip_high
    dual = float("inf") if terms.dual_clip is None else terms.dual_clip
    ratio_BT, advantage_BT = ratio_BT.detach(), kept(tokens.advantage_BT.detach(), mask_BT)
    log_ratio_BT = kept(tokens.logp_BT.detach(), mask_BT) - kept(tokens.old_logp_BT.detach(), mask_BT)
    entropy_BT = tokens.entropy_BT
    return PolicySums(
        num_tokens=total(mask_BT),
        loss=total(loss_BT),
        approx_kl=total(0.5 * log_ratio_BT.square()),
        clipped_low=total((ratio_BT < low) & (advantage_BT < 0) & (not is_cispo)),
        clipped_high=total((ratio_BT > high) & (advantage_BT > 0)),
        clipped_dual=total((ratio_BT > dual) & (advantage_BT < 0)),
        ratio=total(kept(ratio_BT, mask_BT)),
        ratio_square=total(kept(ratio_BT, mask_BT).double().square()),
        kl=total(kl_BT),
        entropy=total(mask_BT.new_zeros(()) if entropy_BT is None else kept(entropy_BT, mask_BT)),
    )


def policy_loss(
    tokens: PolicyTokens, terms: PolicyTerms, denominator: Denominator, entropy_denominator: Denominator
) -> tuple[Tensor, PolicySums]:
    """Scalar loss, differentiable through `logp_BT` and `entropy_BT`, and detached sums; plain autograd.

        loss = (sum surrogate + kl_coef sum kl) / denominator - entropy_coef sum entropy / entropy_denominator

    `denominator` may be one number for each row, `[B, 1]`.
    """
    loss_BT, ratio_BT = surrogate(tokens, terms)
    mask_BT, kl_BT = tokens.mask_BT.bool(), torch.zeros_like(loss_BT)
    loss = shared_out(loss_BT, denominator)
    if tokens.entropy_BT is not None:
        loss = loss - terms.entropy_coef * (kept(tokens.entropy_BT, mask_BT).sum() / entropy_denominator)
    if tokens.reference_logp_BT is not None:
        by_BT = None
        if terms.corrects_kl:
            by_BT = importance_ratio(tokens.logp_BT, tokens.old_logp_BT, mask_BT, terms.level)
        kl_BT = penalty(terms.kl, tokens.logp_BT, tokens.reference_logp_BT, mask_BT, by_BT)
        loss = loss + terms.kl_coef * shared_out(kl_BT, denominator)
    return loss, sums_of(tokens, terms, loss_BT, ratio_BT, kl_BT)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """`weighted`: the sum of surrogate and KL of each token times its row's weight; the sums of `PolicySums` in their
    order; and the gradient of `weighted`, `[B, T]`.
    """

    weighted: Tensor
    sums_S: Tensor
    d_logp_BT: Tensor


def evaluated(tokens: PolicyTokens, terms: PolicyTerms, weight_B1: Tensor) -> Evaluated:
    """What one pass gives, without autograd; `weight_B1` is one over the denominator.

    With r the ratio and A the advantage, the surrogate's derivative with respect to log r is -A r, and 0 where a clip
    holds the ratio; that of cispo with respect to logp is -min(r, 1 + clip_high) A. KL: d k2 / dlogp = d, and
    d k3 / dlogp = 1 - exp(-d), with d = logp - reference_logp.
    """
    mask_BT = tokens.mask_BT.bool()
    loss_BT, ratio_BT = surrogate(tokens, terms)
    advantage_BT = kept(tokens.advantage_BT, mask_BT)
    along_ratio_BT, direct_BT = torch.zeros_like(loss_BT), torch.zeros_like(loss_BT)
    if terms.surrogate == "cispo":
        direct_BT = -ratio_BT.clamp(max=1 + terms.clip_high) * advantage_BT
    else:
        is_cut_BT = (ratio_BT > 1 + terms.clip_high) & (advantage_BT > 0)
        is_cut_BT |= (ratio_BT < 1 - terms.clip_low) & (advantage_BT < 0)
        if terms.dual_clip is not None:
            is_cut_BT |= (ratio_BT > terms.dual_clip) & (advantage_BT < 0)
        along_ratio_BT = (-advantage_BT).masked_fill(is_cut_BT, 0.0) * ratio_BT
    kl_BT = torch.zeros_like(loss_BT)
    if tokens.reference_logp_BT is not None:
        logp_BT, reference_BT = kept(tokens.logp_BT, mask_BT), kept(tokens.reference_logp_BT, mask_BT)
        kl_BT, slope_BT = ESTIMATORS[terms.kl](logp_BT, reference_BT), logp_BT - reference_BT
        if terms.kl == "k3":
            slope_BT = -torch.expm1(reference_BT - logp_BT)
        if terms.corrects_kl:
            slope_BT = torch.ones_like(slope_BT) if terms.kl == "k1" else slope_BT
            kl_BT = kept(ratio_BT, mask_BT) * kl_BT
            slope_BT = kept(ratio_BT, mask_BT) * slope_BT
            along_ratio_BT = along_ratio_BT + terms.kl_coef * kl_BT
        direct_BT = direct_BT + terms.kl_coef * slope_BT
    along_ratio_BT = along_ratio_BT * weight_B1
    if terms.level != "token":
        along_ratio_BT = along_ratio_BT.sum(1, keepdim=True).expand_as(mask_BT)
    if terms.level == "sequence":
        along_ratio_BT = along_ratio_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    sums = sums_of(tokens, terms, loss_BT, ratio_BT, kl_BT)
    return Evaluated(
        ((loss_BT + terms.kl_coef * kl_BT) * weight_B1).sum(),
        torch.stack([getattr(sums, name) for name in PolicySums.__dataclass_fields__]),
        kept(along_ratio_BT + direct_BT * weight_B1, mask_BT),
    )
