"""The definition of add and RMSNorm, in torch alone.

Shape legend: R rows, H hidden.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Normed:
    """`normed_RH`: the input of the next layer; `sum_RH`: the residual stream, the sum before it was normalised."""

    normed_RH: torch.Tensor
    sum_RH: torch.Tensor


def add_rms_norm(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, epsilon: float
) -> Normed:
    """x + residual, rounded to the dtype of x, and that over its root mean square, times the weight.

    The mean and the division are in float32 (float64 for float64), and their result is rounded before the product with
    the weight, as in transformers' Llama. Zhang and Sennrich, Root mean square layer normalization (2019).
    """
    sum_RH = x_RH if residual_RH is None else x_RH + residual_RH
    wide_RH = sum_RH.double() if sum_RH.dtype == torch.float64 else sum_RH.float()
    unit_RH = wide_RH * torch.rsqrt(wide_RH.pow(2).mean(-1, keepdim=True) + epsilon)
    return Normed(weight_H * unit_RH.to(sum_RH.dtype), sum_RH)
