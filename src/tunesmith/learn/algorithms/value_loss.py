"""The clipped value loss of PPO.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. `num_tokens` is the number of such
tokens in the whole optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.engine.kernels.masking import Denominator, check_denominator, check_shapes, kept, total
from tunesmith.learn.algorithms.sums import Sums


@dataclass(frozen=True, slots=True)
class ValueStats(Sums):
    """Sums over the tokens inside the mask; records of micro-batches add up."""

    num_tokens: Tensor
    loss: Tensor
    """Loss of each token, factor 1/2 included, before the division by the global denominator."""
    clipped: Tensor
    """Tokens where the clipped prediction has the larger error and counts in the loss."""
    value: Tensor
    returns: Tensor
    returns_square: Tensor
    error: Tensor
    """Return minus value."""
    error_square: Tensor

    def metrics(self) -> dict[str, float]:
        """Means over tokens, under TRL's names where it has one; empty without tokens. Waits for the device once.

        `val/explained_variance` is 1 - Var(return - value) / Var(return); it is left out where all returns are equal.
        """
        sums = self.floats()
        num_tokens = sums.pop("num_tokens")
        if num_tokens == 0:
            return {}
        means = {name: value / num_tokens for name, value in sums.items()}
        metrics = {
            "loss/value_avg": means["loss"],
            "val/clipfrac_avg": means["clipped"],
            "val/mean": means["value"],
            "val/return_mean": means["returns"],
            "val/error": means["error_square"],
        }
        return_variance = means["returns_square"] - means["returns"] ** 2
        # Below this the difference of the two terms is rounding, not variance.
        if return_variance > 1e-12 * means["returns_square"]:
            error_variance = means["error_square"] - means["error"] ** 2
            metrics["val/explained_variance"] = 1 - error_variance / return_variance
        return metrics


def clipped(
    value_BT: Tensor,
    old_value_BT: Tensor,
    return_BT: Tensor,
    mask_BT: Tensor,
    num_tokens: Denominator,
    clip: float | None,
) -> tuple[Tensor, ValueStats]:
    """Scalar loss, differentiable through `value_BT` alone, and detached statistics.

    `old_value_BT` are the values at the time of the rollout, `return_BT` what `gae` gave. The larger of the two errors
    counts:

        loss = 1/2 sum max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / num_tokens,

    as in the PPO of OpenAI baselines and of TRL. `clip=None` switches the clipping off. Raises `InputError` if shapes
    differ or `num_tokens` is not positive.
    """
    check_shapes(value_BT=value_BT, old_value_BT=old_value_BT, return_BT=return_BT, mask_BT=mask_BT)
    check_denominator("num_tokens", num_tokens)
    mask_BT = mask_BT.bool()
    value_BT, return_BT = kept(value_BT, mask_BT), kept(return_BT.detach(), mask_BT)
    old_value_BT = kept(old_value_BT.detach(), mask_BT)
    square_BT = (value_BT - return_BT).square()
    move_BT = value_BT - old_value_BT
    held_BT = move_BT if clip is None else move_BT.clamp(-clip, clip)
    # Where nothing is held back the prediction itself is taken: old + (value - old) would round.
    near_BT = torch.where(held_BT == move_BT, value_BT, old_value_BT + held_BT)
    near_square_BT = (near_BT - return_BT).square()
    loss_BT = 0.5 * torch.maximum(square_BT, near_square_BT)
    error_BT = (return_BT - value_BT).detach().double()
    return loss_BT.sum() / num_tokens, ValueStats(
        num_tokens=total(mask_BT),
        loss=total(loss_BT),
        clipped=total(near_square_BT > square_BT),
        value=total(value_BT),
        returns=total(return_BT),
        returns_square=total(return_BT.double().square()),
        error=total(error_BT),
        error_square=total(error_BT.square()),
    )
