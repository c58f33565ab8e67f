"""The policy loss fused into one Triton kernel, for GPUs; `algorithms.policy_loss` is the definition.

Shapes: B sequences, T completion tokens, S sums, R rows of the weights (B or 1).
"""

from typing import Any

import torch
from torch import Tensor

from tunesmith.engine.kernels.masking import Denominator
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.policy_loss.records import PolicyTerms, PolicyTokens


def fused_policy_loss(
    tokens: PolicyTokens, terms: PolicyTerms, denominator: Denominator, *, kernels: Kernels
) -> tuple[Tensor, Tensor] | None:
    """(surrogate plus KL term over `denominator`, sums_S in the order of `PolicyStats`); None if Triton cannot run.

    A float32 scalar with a gradient to `logp_BT`, and detached float64 sums. One kernel replaces some sixty launches:
    it writes the gradient too, which the backward pass only scales. Fused are `clip` and `cispo` of ratios per token.
    """
    floats = (tokens.logp_BT, tokens.old_logp_BT, tokens.advantage_BT, tokens.reference_logp_BT)
    wide = [tensor for tensor in floats if tensor is not None and tensor.dtype == torch.float64]
    if terms.level != "token" or terms.surrogate not in ("clip", "cispo"):
        return None
    if kernels.picked("policy_loss", (*wide, tokens.logp_BT)[0]) != "triton":
        return None
    if isinstance(denominator, Tensor):
        weight_R1 = denominator.detach().float().reciprocal().reshape(-1, 1)
    else:
        weight_R1 = tokens.logp_BT.new_full((1, 1), 1.0 / denominator, dtype=torch.float32)
    return _Fused.apply(tokens.logp_BT, tokens, terms, weight_R1)  # type: ignore[return-value]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp_BT: Tensor, tokens: PolicyTokens, terms: PolicyTerms, weight_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        from tunesmith.engine.kernels.policy_loss import triton_impl

        sums_S, d_logp_BT = triton_impl.sums_and_gradient(tokens, terms, weight_R1)
        ctx.save_for_backward(d_logp_BT)
        ctx.dtype = logp_BT.dtype
        stats_S = sums_S[:-1].clone()
        ctx.mark_non_differentiable(stats_S)
        return sums_S[-1].float(), stats_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_logp_BT,) = ctx.saved_tensors
        return (d_logp_BT * grads[0]).to(ctx.dtype), None, None, None
