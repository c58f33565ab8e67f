"""The policy losses of PPO and GRPO, what their sums are divided by, and the entropy bonus.

Shapes: B sequences, T completion tokens. `mask_BT` is true where a token counts. Denominators are those of the whole
optimizer step, so that the losses and gradients of its micro-batches add up to those of one batch.
"""

from dataclasses import dataclass, fields
from typing import Literal, assert_never

import torch
from torch import Tensor

from tunesmith.algorithms.sums import Denominator, Sums, check_denominator, check_shapes, kept, shared_out
from tunesmith.config.algorithm_sections import KLSection, PolicyLossSection
from tunesmith.kernels.native import shared
from tunesmith.kernels.policy_loss import api as kernel
from tunesmith.kernels.policy_loss import torch_impl
from tunesmith.kernels.policy_loss.records import Level as Level
from tunesmith.kernels.policy_loss.records import PolicySums, PolicyTerms, PolicyTokens
from tunesmith.kernels.policy_loss.torch_impl import importance_ratio as importance_ratio

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
    tokens, terms = PolicyTokens(logp_BT, old_logp_BT, advantage_BT, mask_BT), terms_of(settings)
    loss_BT, ratio_BT = torch_impl.surrogate(tokens, terms)
    sums = torch_impl.sums_of(tokens, terms, loss_BT, ratio_BT, torch.zeros_like(loss_BT))
    return shared_out(loss_BT, denominator), _stats(sums)


def objective(
    tokens: PolicyTokens, terms: PolicyTerms, denominator: Denominator, num_tokens: Denominator
) -> tuple[Tensor, PolicyStats]:
    """`surrogate`, less the entropy bonus, plus the KL penalty: scalar loss and detached statistics of the surrogate.

    The terms whose tensors `tokens` has; `denominator` is that of surrogate and KL, `num_tokens` that of the bonus. On
    a CPU it is the definition, whose bits runs are compared by: the kernel would save less than a thousandth of a step.
    On a GPU it is one pass instead of some sixty launches. Raises `InputError` as `surrogate` does.
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
    if tokens.logp_BT.device.type == "cpu":
        loss, sums = torch_impl.policy_loss(tokens, terms, denominator, num_tokens)
    else:
        loss, sums = kernel.policy_loss(tokens, terms, denominator, num_tokens, kernels=shared("auto"))
    return loss, _stats(sums)


def terms_of(settings: PolicyLossSection, kl: KLSection | None = None, kl_coef: float = 0.0) -> PolicyTerms:
    """The terms of the loss as the recipe has them; without a coefficient there is no KL in it."""
    return PolicyTerms(
        surrogate=settings.surrogate,
        level=settings.importance_sampling_level,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        kl="k3" if kl is None else kl.estimator,
        kl_coef=kl_coef,
        corrects_kl=kl is not None and kl.bias_correction,
        entropy_coef=settings.entropy_coef,
    )


def _stats(sums: PolicySums) -> PolicyStats:
    return PolicyStats(**{field.name: getattr(sums, field.name) for field in fields(PolicyStats)})


def entropy_bonus(entropy_BT: Tensor, mask_BT: Tensor, num_tokens: Denominator) -> Tensor:
    """Sum of the entropies inside the mask over `num_tokens`, in nats: a differentiable scalar.

    Subtract it from the loss, times its coefficient. The bonuses of the micro-batches add up to the mean entropy of the
    optimizer step's tokens.
    """
    check_shapes(entropy_BT=entropy_BT, mask_BT=mask_BT)
    check_denominator("num_tokens", num_tokens)
    return kept(entropy_BT, mask_BT.bool()).sum() / num_tokens
