"""The clipped policy loss of PPO and the entropy bonus.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. `num_tokens` is the number of such
tokens in the whole optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.algorithms.sums import Denominator, Sums, check_denominator, check_shapes, kept, total
from tunesmith.core.errors import InputError


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
    """Tokens whose gradient is cut because the ratio is high and the advantage positive."""
    ratio: Tensor
    ratio_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means over tokens under TRL's names; empty without tokens. Waits for the device once."""
        sums = self.floats()
        num_tokens = sums.pop("num_tokens")
        if num_tokens == 0:
            return {}
        means = {name: value / num_tokens for name, value in sums.items()}
        num_clipped = means["clipped_low"] + means["clipped_high"]
        return {
            "loss/policy_avg": means["loss"],
            "policy/approxkl_avg": means["approx_kl"],
            "policy/clipfrac_avg": num_clipped,
            "clip_ratio/low_mean": means["clipped_low"],
            "clip_ratio/high_mean": means["clipped_high"],
            "clip_ratio/region_mean": num_clipped,
            "val/ratio": means["ratio"],
            "val/ratio_var": max(0.0, means["ratio_square"] - means["ratio"] ** 2),
        }


def clipped(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    num_tokens: Denominator,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, PolicyStats]:
    """Scalar loss, differentiable through `logp_BT` alone, and detached statistics.

    `old_logp_BT` are the log-probs under the policy that drew the tokens. Equation 7 of Schulman et al. 2017 (arXiv
    1707.06347), with the two sides of the clip set apart as in DAPO (arXiv 2503.14476):

        ratio = exp(logp - old_logp)
        loss = -sum min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) / num_tokens.

    Log-probs are not clamped: a ratio beyond the range of floats gives a non-finite gradient, which the optimizer
    refuses and reports. Raises `InputError` if shapes differ, a clip is out of range or `num_tokens` is not positive.
    """
    check_shapes(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    check_denominator("num_tokens", num_tokens)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise InputError(
            f"clip_low is {clip_low} and clip_high {clip_high}; allowed are 0 <= clip_low <= 1 and clip_high >= 0."
        )
    mask_BT = mask_BT.bool()
    advantage_BT = kept(advantage_BT.detach(), mask_BT)
    log_ratio_BT = kept(logp_BT, mask_BT) - kept(old_logp_BT.detach(), mask_BT)
    ratio_BT = log_ratio_BT.exp()
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    # With advantage 0 outside the mask, the loss there is 0 and so is its gradient.
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, clipped_ratio_BT * advantage_BT)
    return loss_BT.sum() / num_tokens, PolicyStats(
        num_tokens=total(mask_BT),
        loss=total(loss_BT),
        approx_kl=total(0.5 * log_ratio_BT.detach().square()),
        clipped_low=total((ratio_BT < 1 - clip_low) & (advantage_BT < 0)),
        clipped_high=total((ratio_BT > 1 + clip_high) & (advantage_BT > 0)),
        ratio=total(kept(ratio_BT, mask_BT)),
        ratio_square=total(kept(ratio_BT, mask_BT).detach().double().square()),
    )


def entropy_bonus(entropy_BT: Tensor, mask_BT: Tensor, num_tokens: Denominator) -> Tensor:
    """Sum of the entropies inside the mask over `num_tokens`, in nats: a differentiable scalar.

    Subtract it from the loss, times its coefficient. The bonuses of the micro-batches add up to the mean entropy of the
    optimizer step's tokens.
    """
    check_shapes(entropy_BT=entropy_BT, mask_BT=mask_BT)
    check_denominator("num_tokens", num_tokens)
    return kept(entropy_BT, mask_BT.bool()).sum() / num_tokens
