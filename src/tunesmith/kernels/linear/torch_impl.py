"""The definition of a linear map in bfloat16 whose bits are known: which sums are made, and in which order.

Shape legend: R rows, I inputs, O outputs.
"""

import torch

from tunesmith.kernels.arguments import without_autocast


@without_autocast
def linear(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, block: int, *, dtype: torch.dtype
) -> torch.Tensor:
    """x weight^T + bias `[R, O]`, rounded once to the dtype of x.

    The products of `block` inputs are summed in `dtype`, then the sums of the blocks from first to last, then the bias.
    Within a block the order is left open; the native kernel takes pair after pair.
    """
    total_RO = torch.zeros(len(x_RI), len(weight_OI), dtype=dtype)
    for x_RK, weight_OK in zip(x_RI.split(block, 1), weight_OI.split(block, 1), strict=True):
        total_RO = total_RO + x_RK.to(dtype) @ weight_OK.to(dtype).T
    if bias_O is not None:
        total_RO = total_RO + bias_O.to(dtype)
    return total_RO.to(x_RI.dtype)
