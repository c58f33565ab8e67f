"""Add and RMSNorm, in C++ or in torch; without gradients.

Shape legend: R rows, H hidden.
"""

import ctypes

import torch

from tunesmith.core.errors import InputError
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.rms_norm import reference
from tunesmith.kernels.rms_norm.reference import Normed


def add_rms_norm(
    x_RH: torch.Tensor,
    residual_RH: torch.Tensor | None,
    weight_H: torch.Tensor,
    epsilon: float,
    *,
    kernels: Kernels,
) -> Normed:
    """The residual stream x + residual and its RMSNorm, bfloat16 or float32, as `reference.add_rms_norm` defines them.

    Natively, a row's result depends on that row alone, to the bit, and sums run in another order than torch's, so a
    result may be rounded to its neighbour. There is no gradient: call it where none is recorded.

    Raises:
        InputError: shapes or dtypes do not fit, or a gradient would be lost.
        NativeUnavailableError: native kernels were chosen and cannot be had.
    """
    _check(x_RH, residual_RH, weight_H)
    library = kernels.library("rms_norm", x_RH.device)
    if library is None:
        return reference.add_rms_norm(x_RH, residual_RH, weight_H, epsilon)
    x_RH, weight_H = x_RH.contiguous(), weight_H.contiguous()
    residual_RH = None if residual_RH is None else residual_RH.contiguous()
    normed_RH, sum_RH = torch.empty_like(x_RH), x_RH if residual_RH is None else torch.empty_like(x_RH)
    library.add_rms_norm(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x_RH, residual_RH if residual_RH is not None else x_RH)),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight_H, normed_RH, sum_RH)),
        ctypes.c_int64(x_RH.shape[0]),
        ctypes.c_int64(x_RH.shape[1]),
        ctypes.c_float(epsilon),
        ctypes.c_int64(residual_RH is not None),
        ctypes.c_int64(x_RH.dtype == torch.bfloat16),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return Normed(normed_RH, sum_RH)


def _check(x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor) -> None:
    if x_RH.dim() != 2 or not x_RH.numel() or x_RH.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(f"x is {x_RH.dtype} of shape {tuple(x_RH.shape)}; give bfloat16 or float32 [rows, hidden]")
    for name, tensor, shape in (("residual", residual_RH, x_RH.shape), ("weight", weight_H, x_RH.shape[1:])):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x_RH.dtype):
            raise InputError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give {x_RH.dtype} of shape {tuple(shape)}"
            )
    tensors = (x_RH, residual_RH, weight_H)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise InputError("add_rms_norm has no gradient and an input requires one; call it under torch.no_grad()")
