"""The policy losses of PPO and GRPO, what their sums are divided by, and the entropy bonus.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. Denominators are those of the whole
optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from tunesmith.algorithms.sums import Denominator, Sums, check_denominator, check_shapes, kept, shared_out, total
from tunesmith.config.policy_sections import PolicyLossSection

Level = Literal["token", "sequence", "product"]
Normalization = Literal["token", "sequence", "sequence_sum", "constant", "micro_batch"]


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
class UpdateSize:
    """How much one optimizer step learns from, over all micro-batches and ranks.

    `num_sequences` may count completions that were drawn and left out: a constant denominator counts them too.
    """

    num_tokens: float
    num_sequences: float
    num_micro_batches: float


def loss_denominator(normalization: Normalization, mask_BT: Tensor, size: UpdateSize, max_tokens: int) -> Denominator:
    """What the summed losses of the tokens of a micro-batch are divided by: a number, or one for each row `[B, 1]`.

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


def importance_ratio(logp_BT: Tensor, old_logp_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Probability under the new policy over that under the old one, `[B, T]`, differentiable through `logp_BT` alone.

    Of each token, 1 outside the mask; or every token of a row has the row's: the geometric mean over its tokens with
    `sequence` (GSPO, Zheng et al. 2025, arXiv 2507.18071, equation 7), their product with `product`, which is the ratio
    of the whole completion.
    """
    mask_BT = mask_BT.bool()
    log_ratio_BT = kept(logp_BT, mask_BT) - kept(old_logp_BT.detach(), mask_BT)
    if level == "token":
        return log_ratio_BT.exp()
    log_ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True)
    if level == "sequence":
        log_ratio_B1 = log_ratio_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio_B1.exp().expand_as(log_ratio_BT)


def surrogate(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    denominator: Denominator,
    settings: PolicyLossSection,
) -> tuple[Tensor, PolicyStats]:
    """Scalar loss, differentiable through `logp_BT` alone, and detached statistics.

    `old_logp_BT` are the log-probs under the policy that drew the tokens, r the `importance_ratio` at the level of
    `settings`. `clip` is equation 7 of Schulman et al. 2017 (arXiv 1707.06347), with the two sides of the clip set
    apart as in DAPO (arXiv 2503.14476); with `dual_clip`, r in its first term is at most that, which matters where A is
    negative (Ye et al. 2020, arXiv 1912.09729). `cispo` is the loss of MiniMax-M1 (arXiv 2506.13585) without a lower
    bound, sg for no gradient:

        clip:  loss = -sum min(min(r, dual_clip) A, clip(r, 1 - clip_low, 1 + clip_high) A) / denominator
        cispo: loss = -sum sg(min(r, 1 + clip_high)) A logp / denominator

    Log-probs are not clamped: a ratio beyond the range of floats gives a non-finite gradient, which the optimizer
    refuses and reports. Raises `InputError` if shapes differ or `denominator` is not positive.
    """
    check_shapes(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    check_denominator("denominator", denominator)
    mask_BT = mask_BT.bool()
    low, high, dual = 1 - settings.clip_low, 1 + settings.clip_high, settings.dual_clip
    advantage_BT = kept(advantage_BT.detach(), mask_BT)
    ratio_BT = importance_ratio(logp_BT, old_logp_BT, mask_BT, settings.importance_sampling_level)
    # With advantage 0 outside the mask, the loss there is 0 and so is its gradient.
    if settings.surrogate == "cispo":
        loss_BT = -ratio_BT.detach().clamp(max=high) * advantage_BT * kept(logp_BT, mask_BT)
    else:
        free_BT = ratio_BT if dual is None else ratio_BT.clamp(max=dual)
        loss_BT = -torch.minimum(free_BT * advantage_BT, ratio_BT.clamp(low, high) * advantage_BT)
    ratio_BT, is_cispo = ratio_BT.detach(), settings.surrogate == "cispo"
    log_ratio_BT = kept(logp_BT.detach(), mask_BT) - kept(old_logp_BT.detach(), mask_BT)
    return shared_out(loss_BT, denominator), PolicyStats(
        num_tokens=total(mask_BT),
        loss=total(loss_BT),
        approx_kl=total(0.5 * log_ratio_BT.square()),
        clipped_low=total((ratio_BT < low) & (advantage_BT < 0) & (not is_cispo)),
        clipped_high=total((ratio_BT > high) & (advantage_BT > 0)),
        clipped_dual=total((ratio_BT > (float("inf") if dual is None else dual)) & (advantage_BT < 0)),
        ratio=total(kept(ratio_BT, mask_BT)),
        ratio_square=total(kept(ratio_BT, mask_BT).double().square()),
    )


def entropy_bonus(entropy_BT: Tensor, mask_BT: Tensor, num_tokens: Denominator) -> Tensor:
    """Sum of the entropies inside the mask over `num_tokens`, in nats: a differentiable scalar.

    Subtract it from the loss, times its coefficient. The bonuses of the micro-batches add up to the mean entropy of the
    optimizer step's tokens.
    """
    check_shapes(entropy_BT=entropy_BT, mask_BT=mask_BT)
    check_denominator("num_tokens", num_tokens)
    return kept(entropy_BT, mask_BT.bool()).sum() / num_tokens
