"""A mixture of experts over packed tokens: one definition for the trainer and for the rollout engine.

Shape legend: T tokens, E experts, C chosen experts of a token, R = T C rows of experts, H hidden, I intermediate size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunesmith.engine.kernels.gated.api import gated
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.architecture import Experts, Projection, Stack

Linear = Callable[[Projection, torch.Tensor], Sequence[torch.Tensor]]
"""The outputs of a projection for an input `[rows, in]`, each `[rows, size]`."""

LinearOfExperts = Callable[[Stack, torch.Tensor, Sequence[int]], torch.Tensor]
"""The outputs `[rows, out]` for inputs `[rows, in]`: the first `counts[0]` are the first expert's, and so on."""


def mixture(
    experts: Experts, x_TH: torch.Tensor, linear: Linear, linear_of_experts: LinearOfExperts, kernels: Kernels
) -> torch.Tensor:
    """The weighed sum of the chosen experts' outputs `[T, H]`; an expert computes all rows that chose it at once.

    Row by row the sums are in one order, the router's, so no row depends on the others.
    """
    (logits_TE,) = linear(experts.router, x_TH)
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    weight_TE = logits_TE.softmax(-1, dtype=wide)
    weight_TC, chosen_TC = weight_TE.topk(experts.num_chosen, dim=-1)
    if experts.normalises:
        first_T, *others_T = weight_TC.unbind(1)
        weight_TC = weight_TC / sum(others_T, first_T)[:, None]
    chosen_R = chosen_TC.flatten()
    order_R = chosen_R.argsort(stable=True)
    back_R = order_R.argsort()
    counts = chosen_R.bincount(minlength=logits_TE.shape[1]).tolist()
    x_RH = _Reordered.apply(x_TH[:, None].expand(-1, experts.num_chosen, -1).flatten(0, 1), order_R, back_R)
    inner_RI = _gated_by(experts, linear_of_experts(experts.gate_up, x_RH, counts), kernels)
    y_RH = _Reordered.apply(linear_of_experts(experts.down, inner_RI, counts), back_R, order_R)
    first_TH, *others = (y_RH.unflatten(0, (-1, experts.num_chosen)) * weight_TC[..., None]).unbind(1)
    return sum(others, first_TH).to(x_TH.dtype)


def _gated_by(experts: Experts, inner_RI: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """The input of `experts.down`."""
    gate_RI, up_RI = inner_RI.unflatten(1, (-1, 2)).unbind(2) if experts.is_interleaved else inner_RI.chunk(2, 1)
    if experts.limit is None:
        return gated(gate_RI, up_RI, experts.activation, kernels=kernels)
    gate_RI = gate_RI.clamp(max=experts.limit) * experts.alpha
    up_RI = (up_RI.clamp(-experts.limit, experts.limit) + 1) / experts.alpha
    return gated(gate_RI, up_RI, "silu", kernels=kernels)


class _Reordered(torch.autograd.Function):
    """Rows in another order. The gradient goes the way back, so nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x_RH: torch.Tensor, order_R: torch.Tensor, back_R: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back_R)
        return x_RH[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (back_R,) = ctx.saved_tensors
        return grads[0][back_R], None, None
