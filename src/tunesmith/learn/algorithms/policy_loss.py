"""The policy loss of PPO and GRPO: surrogate, KL term, entropy bonus, denominators, and importance weights.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. Denominators are those of the whole
optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from tunesmith.base.config.policy_sections import KLSection, Level, Normalization, PolicyLossSection
from tunesmith.base.config.sections import ImportanceSection
from tunesmith.base.core.seeds import permutation
from tunesmith.engine.kernels.masking import (
    Denominator,
    check_denominator,
    check_shapes,
    kept,
    shared_out,
    total,
    widened,
)
from tunesmith.engine.kernels.native import shared
from tunesmith.engine.kernels.policy_loss.api import fused_policy_loss
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.learn.algorithms.kl import penalty
from tunesmith.learn.algorithms.sums import Sums


@dataclass(frozen=True, slots=True)
class PolicyStats(Sums):
    """Sums over the tokens inside the mask; records of micro-batches add up."""

    num_tokens: Tensor
    loss: Tensor
    """Loss of each token, before the division by the global denominator."""
    approx_kl: Tensor
    """(log ratio)^2 / 2, k2 of the policy that drew the tokens."""
    clipped_low: Tensor
    """Tokens whose gradient is cut because the ratio is low and the advantage negative."""
    clipped_high: Tensor
    """Tokens whose gradient is cut, or weight bounded, because the ratio is high and the advantage positive."""
    clipped_dual: Tensor
    """Tokens whose gradient is cut because the ratio is above `dual_clip` and the advantage negative."""
    ratio: Tensor
    ratio_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means over tokens under TRL's names; empty without tokens. Waits for the device once."""
        sums = self.floats()
        num_tokens = sums.pop("num_tokens")
        if num_tokens == 0:
            return {}
        means = {name: value / num_tokens for name, value in sums.items()}
        num_clipped = means["clipped_low"] + means["clipped_high"] + means["clipped_dual"]
        return {
            "loss/policy_avg": means["loss"],
            "policy/approxkl_avg": means["approx_kl"],
            "policy/clipfrac_avg": num_clipped,
            "clip_ratio/low_mean": means["clipped_low"],
            "clip_ratio/high_mean": means["clipped_high"],
            "clip_ratio/dual_mean": means["clipped_dual"],
            "clip_ratio/region_mean": num_clipped,
            "val/ratio": means["ratio"],
            "val/ratio_var": max(0.0, means["ratio_square"] - means["ratio"] ** 2),
        }


@dataclass(frozen=True, slots=True)
class LeftOut(Sums):
    """The number of tokens, and of those that the settings of the recipe leave out of the surrogate."""

    num_tokens: Tensor
    left_out: Tensor

    def metrics(self) -> dict[str, float]:
        """The share of the tokens that is left out."""
        sums = self.floats()
        return {"policy/left_out_frac": sums["left_out"] / max(1.0, sums["num_tokens"])}


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """Size of one optimizer step, over all micro-batches and ranks.

    `num_sequences` may count completions that were drawn and left out: a constant denominator counts them too. `seed`
    is that of choices by chance within the step.
    """

    num_tokens: float
    num_sequences: float
    num_micro_batches: float
    seed: int = 0


def loss_denominator(normalization: Normalization, mask_BT: Tensor, size: UpdateSize, max_tokens: int) -> Denominator:
    """Denominator of the summed token losses of a micro-batch: a number, or one for each row `[B, 1]`.

    `token` is a mean over all tokens of the optimizer step (DAPO, arXiv 2503.14476, equation 12); `sequence` a mean
    over completions of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3); `sequence_sum` a mean over
    completions of the sum (a completion is one action: RLOO, arXiv 2402.14740); `constant` divides the sum by the
    number of completions times `max_tokens`, whatever was drawn (Dr. GRPO, arXiv 2503.20783); `micro_batch` is a mean
    over micro-batches of the mean over their tokens (TRL's `bnpo`).
    """
    match normalization:
        case "token":
            return size.num_tokens
        case "sequence":
            return mask_BT.sum(dim=1, keepdim=True).clamp(min=1) * size.num_sequences
        case "sequence_sum":
            return size.num_sequences
        case "constant":
            return size.num_sequences * max_tokens
        case "micro_batch":
            return mask_BT.sum().clamp(min=1) * size.num_micro_batches
        case _:
            assert_never(normalization)


def policy_loss(
    tokens: PolicyTokens, terms: PolicyTerms, denominator: Denominator, num_tokens: Denominator
) -> tuple[Tensor, PolicyStats]:
    """Scalar loss of PPO and GRPO, differentiable through `logp_BT` and `entropy_BT`, and detached statistics.

        loss = (sum surrogate + kl_coef sum kl) / denominator - entropy_coef sum entropy / num_tokens

    Sums are over the mask; the KL and entropy terms are left out where `tokens` has None. On a GPU one Triton kernel
    computes the first two terms where it can; on a CPU the loss is less than a thousandth of a step.

    Raises:
        InputError: shapes differ, or a denominator is not positive.
    """
    check_shapes(
        logp_BT=tokens.logp_BT,
        old_logp_BT=tokens.old_logp_BT,
        advantage_BT=tokens.advantage_BT,
        mask_BT=tokens.mask_BT,
        reference_logp_BT=tokens.reference_logp_BT,
        entropy_BT=tokens.entropy_BT,
    )
    check_denominator("denominator", denominator)
    check_denominator("num_tokens", num_tokens)
    bonus: Tensor | float = 0.0
    if tokens.entropy_BT is not None:
        bonus = terms.entropy_coef * (kept(tokens.entropy_BT, tokens.mask_BT.bool()).sum() / num_tokens)
    fused = fused_policy_loss(tokens, terms, denominator, kernels=shared("auto"))
    if fused is not None:
        return fused[0] - bonus, PolicyStats.unpack(fused[1])
    loss_BT, ratio_BT = surrogate(tokens, terms)
    loss = shared_out(loss_BT, denominator) - bonus
    if tokens.reference_logp_BT is not None:
        weight_BT = None
        if terms.corrects_kl:  # a node of its own: sharing `ratio_BT` would sum gradients in another order
            weight_BT = importance_ratio(tokens.logp_BT, tokens.old_logp_BT, tokens.mask_BT, terms.level)
        kl_BT = penalty(terms.kl, tokens.logp_BT, tokens.reference_logp_BT, tokens.mask_BT, weight_BT)
        loss = loss + terms.kl_coef * shared_out(kl_BT, denominator)
    return loss, _statistics(tokens, terms, loss_BT, ratio_BT)


def surrogate(tokens: PolicyTokens, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
    """Surrogate loss and importance ratio of each token, `[B, T]`, differentiable through `logp_BT`.

    With r the ratio, A the advantage and sg for no gradient:

        clip:  -min(min(r, dual_clip) A, clip(r, 1 - clip_low, 1 + clip_high) A)
        cispo: -sg(min(r, 1 + clip_high)) A logp
        sapo:  -4 / t sigmoid(t (r - 1)) A,  t = temperature_positive where A > 0, else temperature_negative
        log_prob: -A logp
        dppo_tv, dppo_kl: -r A, without gradient where the token is `beyond` its bounds
        gmpo:  -exp(mean over the completion of min(log r, clip_high) or, where A < 0, max(log r, -clip_low)) A
        kl_cov: -r A, plus kl_cov_coef |log r| for the share kl_cov_share of tokens with the highest `covariances`

    `clip` is equation 7 of Schulman et al. 2017 (arXiv 1707.06347), with two clip bounds as in DAPO (arXiv 2503.14476);
    `dual_clip` matters where A is negative (Ye et al. 2020, arXiv 1912.09729). `cispo` is the loss of MiniMax-M1 (arXiv
    2506.13585) without a lower bound. `sapo` is that of Gao et al. 2025 (arXiv 2511.20347): at ratio 1 its gradient is
    that of `clip`, and it fades on both sides instead of ending. `log_prob` is REINFORCE (Williams 1992), and with
    advantages of a group GPG (Chu et al. 2025, arXiv 2504.02546); with advantage 1 it is the loss of SFT. `dppo_*` are
    those of Qi et al. 2026 (arXiv 2602.04879), `gmpo` that of Zhao et al. 2025 (arXiv 2507.20673), `kl_cov` that of Cui
    et al. 2025 (arXiv 2505.22617). Log-probs are not clamped: a ratio beyond the range of floats gives a gradient that
    is not finite, which the optimizer refuses and reports.
    """
    mask_BT = tokens.mask_BT.bool()
    low, high, dual = 1 - terms.clip_low, 1 + terms.clip_high, terms.dual_clip
    # Advantage 0 outside the mask makes the loss and its gradient 0 there.
    advantage_BT = kept(tokens.advantage_BT.detach(), mask_BT)
    ratio_BT = importance_ratio(tokens.logp_BT, tokens.old_logp_BT, mask_BT, terms.level)
    match terms.surrogate:
        case "clip":
            bounded_BT = ratio_BT if dual is None else ratio_BT.clamp(max=dual)
            gain_BT = torch.minimum(bounded_BT * advantage_BT, ratio_BT.clamp(low, high) * advantage_BT)
        case "cispo":
            gain_BT = ratio_BT.detach().clamp(max=high) * advantage_BT * kept(tokens.logp_BT, mask_BT)
        case "sapo":
            positive, negative = ratio_BT.new_tensor((terms.temperature_positive, terms.temperature_negative))
            t_BT = torch.where(advantage_BT > 0, positive, negative)
            gain_BT = 4 / t_BT * torch.sigmoid(t_BT * (ratio_BT - 1)) * advantage_BT
        case "log_prob":
            gain_BT = advantage_BT * kept(tokens.logp_BT, mask_BT)
        case "dppo_tv" | "dppo_kl":
            low_BT, high_BT, _ = beyond(tokens, terms, ratio_BT)
            gain_BT = torch.where(low_BT | high_BT, ratio_BT.detach(), ratio_BT) * advantage_BT
        case "gmpo":
            log_ratio_BT = kept(tokens.logp_BT, mask_BT) - kept(tokens.old_logp_BT.detach(), mask_BT)
            up_BT, down_BT = log_ratio_BT.clamp(max=terms.clip_high), log_ratio_BT.clamp(min=-terms.clip_low)
            # The sign is the completion's: an importance weight of 0 takes a token's gradient, not its sign.
            bounded_BT = torch.where(advantage_BT.sum(dim=1, keepdim=True) > 0, up_BT, down_BT)
            mean_B1 = bounded_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
            gain_BT = mean_B1.exp() * advantage_BT
        case "kl_cov":
            covariance_BT = covariances(advantage_BT, tokens.logp_BT, mask_BT).masked_fill(~mask_BT, -math.inf)
            num = max(1, int(terms.kl_cov_share * int(mask_BT.sum())))
            highest_BT = torch.zeros_like(mask_BT)
            highest_BT.view(-1)[covariance_BT.flatten().argsort(descending=True, stable=True)[:num]] = True
            log_ratio_BT = kept(tokens.logp_BT, mask_BT) - kept(tokens.old_logp_BT.detach(), mask_BT)
            penalty_BT = terms.kl_cov_coef * log_ratio_BT.abs()
            gain_BT = ratio_BT * advantage_BT - kept(penalty_BT, highest_BT & mask_BT)
        case _:
            assert_never(terms.surrogate)
    return -gain_BT, ratio_BT


def beyond(tokens: PolicyTokens, terms: PolicyTerms, ratio_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose gradient is cut, or weight bounded, `[B, T]` each: because the ratio is low and the advantage
    negative, because it is high and the advantage positive, and because it is above `dual_clip`.

    `dppo_tv` measures |p - p_old| of the token's probability, `dppo_kl` the KL divergence of the two outcomes "this
    token" and "another" (Qi et al. 2026, arXiv 2602.04879).
    """
    mask_BT = tokens.mask_BT.bool()
    ratio_BT, advantage_BT = ratio_BT.detach(), kept(tokens.advantage_BT.detach(), mask_BT)
    logp_BT, old_logp_BT = (kept(x_BT.detach(), mask_BT) for x_BT in (tokens.logp_BT, tokens.old_logp_BT))
    low, high = 1 - terms.clip_low, 1 + terms.clip_high
    dual = math.inf if terms.dual_clip is None else terms.dual_clip
    match terms.surrogate:
        case "clip":
            is_low_BT, is_high_BT = ratio_BT < low, ratio_BT > high
        case "cispo":
            is_low_BT, is_high_BT = torch.zeros_like(mask_BT), ratio_BT > high
        case "gmpo":
            is_low_BT, is_high_BT = ratio_BT.log() < -terms.clip_low, ratio_BT.log() > terms.clip_high
        case "dppo_tv" | "dppo_kl":
            distance_BT = (logp_BT.exp() - old_logp_BT.exp()).abs()
            if terms.surrogate == "dppo_kl":
                least = torch.finfo(logp_BT.dtype).tiny  # a probability that rounds to 1 leaves nothing for the rest
                rest_BT, old_rest_BT = ((-x_BT.expm1()).clamp(min=least) for x_BT in (logp_BT, old_logp_BT))
                distance_BT = old_logp_BT.exp() * (old_logp_BT - logp_BT) + old_rest_BT * (old_rest_BT / rest_BT).log()
            is_low_BT = (ratio_BT < 1) & (distance_BT > terms.clip_low)
            is_high_BT = (ratio_BT > 1) & (distance_BT > terms.clip_high)
        case _:
            is_low_BT = is_high_BT = torch.zeros_like(mask_BT)
    falls_BT = advantage_BT < 0
    return is_low_BT & falls_BT, is_high_BT & (advantage_BT > 0), (ratio_BT > dual) & falls_BT


def covariances(advantage_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(A - mean A)(log p - mean log p) of each token, `[B, T]`, no gradient; means over the mask, outside of it 0.

    Tokens whose covariance is high are those by which the entropy of the policy falls (Cui et al. 2025, arXiv
    2505.22617, equation 10).
    """
    advantage_BT, logp_BT = kept(advantage_BT.detach(), mask_BT), kept(logp_BT.detach(), mask_BT)
    num_tokens = mask_BT.sum().clamp(min=1)
    product_BT = (advantage_BT - advantage_BT.sum() / num_tokens) * (logp_BT - logp_BT.sum() / num_tokens)
    return kept(product_BT, mask_BT)


def learnt_advantages(
    advantage_BT: Tensor,
    mask_BT: Tensor,
    section: PolicyLossSection,
    *,
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    drawn_logp_BT: Tensor,
    entropy_BT: Tensor,
    seed: int = 0,
) -> Tensor:
    """Advantages of the tokens that the recipe learns, `[B, T]`, 0 for the others.

    `top_entropy_share` keeps the tokens of the micro-batch with the highest entropies (Wang et al. 2025, arXiv
    2506.01939), by the quantile that TRL takes. `off_policy_mask` leaves out completions with negative advantages whose
    mean of log p_old - log p exceeds it: `drawn_logp_BT` are the engine's log-probs at that time (DeepSeek-V3.2,
    arXiv 2512.02556). `clip_cov_share` leaves out that share of the tokens of the micro-batch, one at least, drawn by
    `seed` from those whose covariance is within its bounds and which the clip does not cut already (Clip-Cov, Cui et
    al. 2025, arXiv 2505.22617).
    """
    mask_BT = mask_BT.bool()
    if section.clip_cov_share > 0:
        covariance_BT = covariances(advantage_BT, logp_BT, mask_BT)
        terms = PolicyTerms(
            section.surrogate,
            section.importance_sampling_level,
            section.clip_low,
            section.clip_high,
            section.dual_clip,
        )
        ratio_BT = importance_ratio(logp_BT, old_logp_BT, mask_BT, terms.level)
        cuts = beyond(PolicyTokens(logp_BT, old_logp_BT, advantage_BT, mask_BT), terms, ratio_BT)
        within_BT = mask_BT & ~(cuts[0] | cuts[1] | cuts[2])
        within_BT &= (covariance_BT > section.clip_cov_low) & (covariance_BT < section.clip_cov_high)
        within_N = torch.nonzero(within_BT.flatten()).flatten()
        num = max(1, int(section.clip_cov_share * int(mask_BT.sum())))
        cut_BT = torch.zeros_like(mask_BT)
        cut_BT.view(-1)[within_N[permutation(seed, 0, len(within_N))[:num]]] = True
        advantage_BT = kept(advantage_BT, ~cut_BT)
    if section.top_entropy_share < 1 and mask_BT.any():
        entropy_BT = widened(entropy_BT.detach())
        least = torch.quantile(entropy_BT[mask_BT], 1 - section.top_entropy_share)
        advantage_BT = kept(advantage_BT, entropy_BT >= least)
    if section.off_policy_mask is not None:
        fallen_BT = kept(drawn_logp_BT.detach(), mask_BT) - kept(logp_BT.detach(), mask_BT)
        fallen_B1 = fallen_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        advantage_BT = kept(advantage_BT, (advantage_BT >= 0) | (fallen_B1 <= section.off_policy_mask))
    return advantage_BT


def importance_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Probability under the new policy over that under the old one, `[B, T]`, differentiable through `logp_BT` alone.

    Per token, 1 outside the mask; or, at the levels of a completion, the same for every token of a row.
    """
    mask_BT = mask_BT.bool()
    log_ratio_BT = kept(logp_BT, mask_BT) - kept(old_logp_BT.detach(), mask_BT)
    if level == "token":
        return log_ratio_BT.exp()
    log_ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    if level == "sequence":
        log_ratio_B1 = log_ratio_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio_B1.exp().expand_as(log_ratio_BT)


def _statistics(tokens: PolicyTokens, terms: PolicyTerms, loss_BT: Tensor, ratio_BT: Tensor) -> PolicyStats:
    mask_BT = tokens.mask_BT.bool()
    clipped = [total(cut_BT) for cut_BT in beyond(tokens, terms, ratio_BT)]
    log_ratio_BT = kept(tokens.logp_BT.detach(), mask_BT) - kept(tokens.old_logp_BT.detach(), mask_BT)
    ratio_BT = kept(ratio_BT.detach(), mask_BT)
    return PolicyStats(
        num_tokens=total(mask_BT),
        loss=total(loss_BT),
        approx_kl=total(0.5 * log_ratio_BT.square()),
        clipped_low=clipped[0],
        clipped_high=clipped[1],
        clipped_dual=clipped[2],
        ratio=total(ratio_BT),
        ratio_square=total(ratio_BT.double().square()),
    )


def terms_of(settings: PolicyLossSection, kl: KLSection, kl_coef: float) -> PolicyTerms:
    """The terms of the loss from the sections of a recipe; with coefficient 0 there is no KL term."""
    return PolicyTerms(
        surrogate=settings.surrogate,
        level=settings.importance_sampling_level,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        temperature_positive=settings.temperature_positive,
        temperature_negative=settings.temperature_negative,
        kl_cov_share=settings.kl_cov_share,
        kl_cov_coef=settings.kl_cov_coef,
        kl=kl.estimator,
        kl_coef=kl_coef,
        corrects_kl=kl.bias_correction,
        entropy_coef=settings.entropy_coef,
    )


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights; `weight_BT` multiplies the advantage of each token: float32, detached, 0 outside the mask.

    `ratio_N` are the weights of the N tokens, or completions, as they are used, and `is_cut_N` says which were outside
    [floor, cap]; `logp_difference_N` is |log pi - log mu| of each token, in nats.
    """

    weight_BT: Tensor
    ratio_N: Tensor
    is_cut_N: Tensor
    logp_difference_N: Tensor


def importance_metrics(corrections: Sequence[Correction]) -> dict[str, float]:
    """Figures over all `corrections` under TRL's names, and the share of weights that were cut; empty if the engine
    was exact: all log-probs are equal, or there are no tokens.
    """
    if not any(part.logp_difference_N.any() for part in corrections):
        return {}
    ratio_N = torch.cat([part.ratio_N for part in corrections])
    difference_N = torch.cat([part.logp_difference_N for part in corrections])
    is_cut_N = torch.cat([part.is_cut_N for part in corrections])
    return {
        "sampling/sampling_logp_difference/mean": difference_N.mean().item(),
        "sampling/sampling_logp_difference/max": difference_N.max().item(),
        "sampling/importance_sampling_ratio/min": ratio_N.min().item(),
        "sampling/importance_sampling_ratio/mean": ratio_N.mean().item(),
        "sampling/importance_sampling_ratio/max": ratio_N.max().item(),
        "sampling/importance_sampling_ratio/cut_share": is_cut_N.float().mean().item(),
    }


def importance_correction(
    train_logp_BT: Tensor, sampled_logp_BT: Tensor, mask_BT: Tensor, settings: ImportanceSection
) -> Correction:
    """Importance weights pi / mu for tokens drawn from mu, not from the policy pi that is trained.

    mu differs from pi where engine and trainer round differently, and wherever top-p, top-k, min-p, a repetition
    penalty or a logit bias shapes the distribution. Weights cut to a range trade a little bias for variance: truncated
    importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
    after Ionides 2008).

    `train_logp_BT` is log pi, of the trainer's own forward before the update and at the sampling temperature.
    `sampled_logp_BT` is log mu, after filters and penalty (`Completion.logps`): then the mean over mu of weight x f is,
    before the cut, the sum of pi f over the support of mu. Where a filter keeps a mass Z of the vocabulary, a weight is
    Z; the unfiltered log-probs (`Completion.raw_logps`) would correct rounding only.

    Per token, or one weight for a completion: with `level: sequence` the product of its tokens' (unbiased, of greater
    variance: a filter makes it vanish with length), with `geometric` their geometric mean (biased, comparable between
    lengths). `truncate` moves a weight into [floor, cap], `mask` sets one
    outside of it to 0, `off` makes each weight 1 and only measures.

    Raises:
        InputError: if shapes differ.
    """
    check_shapes(train_logp_BT=train_logp_BT, sampled_logp_BT=sampled_logp_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    log_ratio_BT = kept(train_logp_BT.detach(), mask_BT) - kept(sampled_logp_BT.detach(), mask_BT)
    if settings.level == "token":
        log_ratio_BL, counts_BL = log_ratio_BT, mask_BT
    else:
        log_ratio_BL = log_ratio_BT.sum(dim=1, keepdim=True, dtype=torch.float64)
        counts_BL = mask_BT.any(dim=1, keepdim=True)
        if settings.level == "geometric":
            log_ratio_BL = log_ratio_BL / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    ratio_BL = log_ratio_BL.exp()
    is_cut_BL = counts_BL & ((ratio_BL > settings.cap) | (ratio_BL < settings.floor))
    if settings.mode == "truncate":
        ratio_BL = ratio_BL.clamp(settings.floor, settings.cap)
    elif settings.mode == "mask":
        ratio_BL = ratio_BL.masked_fill(is_cut_BL, 0.0)
    else:
        is_cut_BL = torch.zeros_like(is_cut_BL)
    weight_BL = torch.ones_like(ratio_BL) if settings.mode == "off" else ratio_BL
    return Correction(
        weight_BT=weight_BL.expand_as(mask_BT).masked_fill(~mask_BT, 0.0).float(),
        ratio_N=ratio_BL[counts_BL].float(),
        is_cut_N=is_cut_BL[counts_BL],
        logp_difference_N=log_ratio_BT[mask_BT].abs(),
    )
