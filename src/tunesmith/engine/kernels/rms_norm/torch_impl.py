"""The definition of add and RMSNorm, in torch alone; its gradients are those of autograd.

Shape legend: R rows, H hidden.
"""

from dataclasses import dataclass

import torch

from tunesmith.engine.kernels.arguments import step_of

LONGEST = 8192
"""Longest row that Triton keeps in registers: 16 numbers for each of 512 threads."""


@dataclass(frozen=True, slots=True)
class Normed:
    """`normed_RH`: the input of the next layer; `sum_RH`: the residual stream, the sum before it was normalised."""

    normed_RH: torch.Tensor
    sum_RH: torch.Tensor


def add_rms_norm(
    x_RH: torch.Tensor,
    residual_RH: torch.Tensor | None,
    weight_H: torch.Tensor,
    epsilon: float,
    offset: float = 0.0,
) -> Normed:
    """x + residual, rounded to the dtype of x, and that over its root mean square, times the weight.

    The mean and the division are in float32 (float64 for float64). Without an offset their result is rounded before the
    product with the weight, as in transformers' Llama. With one, the product with (offset + weight) is in float32 too
    and is rounded once, as in transformers' Gemma, whose offset is 1.
    Zhang and Sennrich, Root mean square layer normalization (2019).
    """
    sum_RH = x_RH if residual_RH is None else x_RH + residual_RH
    wide = torch.float64 if sum_RH.dtype == torch.float64 else torch.float32
    wide_RH = sum_RH.to(wide)
    unit_RH = wide_RH * torch.rsqrt(wide_RH.pow(2).mean(-1, keepdim=True) + epsilon)
    if offset == 0:
        return Normed(weight_H * unit_RH.to(sum_RH.dtype), sum_RH)
    return Normed((unit_RH * (offset + weight_H.to(wide))).to(sum_RH.dtype), sum_RH)


def layout_of(x_RH: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Sizes and strides for the kernels: (rows, columns, rows of a group, stride of groups, stride in a group).

    A matrix has groups of one row; the heads of a token are a group.
    """
    if x_RH.dim() == 2:
        return x_RH.shape[0], x_RH.shape[1], 1, step_of(x_RH, 0), 0
    return x_RH.shape[0] * x_RH.shape[1], x_RH.shape[2], x_RH.shape[1], step_of(x_RH, 0), step_of(x_RH, 1)
