"""Linear maps over weights in 8 bits: the definition.

Shape legend: R rows, I inputs, O outputs, B blocks of inputs, K inputs of a block.
"""

import torch
from torch.nn.functional import pad

BLOCK = 64
"""Inputs with one scale."""

_MOST, _SMALLEST = 127.0, 1e-30
"""The largest number in 8 bits; a block of numbers that are all smaller than the second is taken as 0."""


def quantized(x_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -127 to 127 `[R, B, K]` and the scales `[R, B, 1]` that they are to be multiplied with, both
    in float32; the last block is filled up with zeros. Symmetric, rounded to nearest, ties to even. A block with a
    number that is not finite has the scale NaN.
    """
    x_RBK = pad(x_RI.float(), (0, -x_RI.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_RB1 = x_RBK.abs().amax(2, keepdim=True)
    # Not a number divided by a tensor, which torch computes as a product with the reciprocal, rounded twice.
    inverse_RB1 = torch.where(largest_RB1 > _SMALLEST, torch.full_like(largest_RB1, _MOST) / largest_RB1, 0.0)
    bad_RB1 = (x_RBK * 0).sum(2, keepdim=True)
    return (x_RBK * inverse_RB1).round(), largest_RB1 / _MOST + bad_RB1


def dequantized(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight `[O, I]` that its 8 bits stand for, in float32."""
    whole_OBK, scale_OB1 = quantized(weight_OI)
    return (whole_OBK * scale_OB1).flatten(1)[:, : weight_OI.shape[1]]


def linear(
    x_RI: torch.Tensor, whole_OBK: torch.Tensor, scale_OB1: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """x weight^T + bias `[R, O]` in x's dtype, of the weight that `quantized` made; `whole_OBK` may be int8.

    Sums of whole numbers within a block are exact in float32, whatever their order: they stay below 2^24.
    """
    whole_RBK, scale_RB1 = quantized(x_RI)
    y_RO = x_RI.new_zeros(len(x_RI), len(whole_OBK), dtype=torch.float32)
    for block in range(whole_OBK.shape[1]):
        sum_RO = whole_RBK[:, block] @ whole_OBK[:, block].float().t()
        y_RO += sum_RO * (scale_OB1[:, block].t() * scale_RB1[:, block])
    return (y_RO if bias_O is None else y_RO + bias_O.float()).to(x_RI.dtype)
