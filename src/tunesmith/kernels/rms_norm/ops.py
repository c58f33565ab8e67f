"""`torch.ops.tunesmith.add_rms_norm` and its gradient: the Triton kernels as operators that torch.compile knows.

They record no gradient by themselves: `api.add_rms_norm` does, for all kernels in one way. Nothing waits for the device
or reads numbers of it, so they can stand in a CUDA graph. Triton is imported by the first call, not here.

Shape legend: R rows, H hidden; an x with heads is [R, heads, H].
"""

import torch

from tunesmith.kernels.arguments import empty_as


@torch.library.custom_op("tunesmith::add_rms_norm", mutates_args=())
def add_rms_norm(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed_RH, sum_RH, scale_R float32): as `torch_impl.add_rms_norm`, and what the gradient needs of each row, its
    1 / root mean square. Without a residual `sum_RH` is empty.
    """
    from tunesmith.kernels.rms_norm.triton_impl import forward

    normed_RH, sum_RH, scale_R = forward(x_RH, residual_RH, weight_H, epsilon, offset)
    return normed_RH, x_RH.new_empty(0) if sum_RH is None else sum_RH, scale_R


@torch.library.custom_op("tunesmith::add_rms_norm_gradient", mutates_args=())
def add_rms_norm_gradient(
    sum_RH: torch.Tensor,
    weight_H: torch.Tensor,
    scale_R: torch.Tensor,
    d_normed_RH: torch.Tensor,
    d_sum_RH: torch.Tensor | None,
    offset: float,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x and of the residual, gradient of the weight); the latter is empty unless `for_weight`."""
    from tunesmith.kernels.rms_norm.triton_impl import backward

    saved = sum_RH, weight_H, scale_R
    d_x_RH, d_weight_H = backward(saved, d_normed_RH, d_sum_RH, offset, for_weight=for_weight)
    return d_x_RH, weight_H.new_empty(0) if d_weight_H is None else d_weight_H


@add_rms_norm.register_fake
def _(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sum_RH = x_RH.new_empty(0) if residual_RH is None else empty_as(x_RH)
    return empty_as(x_RH), sum_RH, x_RH.new_empty(x_RH.shape[:-1].numel(), dtype=torch.float32)


@add_rms_norm_gradient.register_fake
def _(
    sum_RH: torch.Tensor, weight_H: torch.Tensor, scale_R: object, d_normed_RH: object, d_sum_RH: object, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_as(sum_RH), empty_as(weight_H) if rest[-1] else weight_H.new_empty(0)
