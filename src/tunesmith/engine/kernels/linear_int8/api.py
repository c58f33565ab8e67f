"""Linear maps whose weights and inputs are rounded to 8 bits when they are multiplied.

Of each output's weight, and of each row, 64 inputs share a scale (as in GGUF's Q8_0, with blocks of 32; rows are
quantized when they come, as in LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339, without its outliers in 16 bits,
which the blocks make superfluous). Products within a block are sums of whole numbers, so exact; blocks are summed in
float32.

Shape legend: R rows, I inputs, O outputs, B blocks of inputs, K inputs of a block.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tunesmith.engine.kernels.arguments import (
    INTEGER,
    POINTER,
    address,
    records_gradient,
    require,
    require_rows,
    with_dense_rows,
)
from tunesmith.engine.kernels.linear.exact import product
from tunesmith.engine.kernels.linear_int8 import torch_impl
from tunesmith.engine.kernels.native import NATIVE_DTYPES, Kernels, shared
from tunesmith.engine.kernels.recording import call


class _Arguments(ctypes.Structure):
    """`LinearInt8Arguments` of cpu.cpp, field by field."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "panels", "scales", "bias", "y")),
        *((name, INTEGER) for name in ("num_rows", "num_inputs", "num_outputs", "x_stride", "num_threads")),
        ("is_bfloat16", INTEGER),
    )


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A weight `[O, I]` in 8 bits: in panels of uint8 for the native kernel, or `[O, B, K]` of int8 for torch, with
    scales in float32. `like` is an empty tensor of the dtype of inputs and outputs. Only `pack` and `stored` make one.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    num_outputs: int
    num_inputs: int
    like: torch.Tensor
    library: ctypes.CDLL | None


def has_native(kernels: Kernels, device: torch.device) -> bool:
    """True if this processor multiplies 8-bit numbers by the native kernel, which needs AVX2 at least; torch takes many
    times as long.
    """
    library = kernels.library("linear_int8", device)
    return library is not None and library.linear_int8_panel_outputs() > 0


def pack(weight_OI: torch.Tensor, *, kernels: Kernels) -> PackedInt8:
    """A copy of a weight in 8 bits.

    Raises:
        InputError: the weight is no matrix of floats with inputs and outputs.
    """
    require_rows("the weight", weight_OI)
    num_outputs, num_inputs = weight_OI.shape
    if weight_OI.dtype not in NATIVE_DTYPES or not has_native(kernels, weight_OI.device):
        whole_OBK, scale_OB1 = torch_impl.quantized(weight_OI)
        numbers = whole_OBK.nan_to_num().to(torch.int8)  # where the scale is NaN they do not matter
        return PackedInt8(numbers, scale_OB1, num_outputs, num_inputs, weight_OI.new_empty(0), None)
    library, weight_OI = kernels.library("linear_int8", weight_OI.device), weight_OI.contiguous()
    assert library is not None
    per_panel = library.linear_int8_panel_outputs()
    padded_outputs = -(-num_outputs // per_panel) * per_panel
    panels = torch.empty(padded_outputs, library.linear_int8_width(INTEGER(num_inputs)), dtype=torch.uint8)
    scales = torch.empty(padded_outputs, -(-num_inputs // torch_impl.BLOCK))
    library.linear_int8_pack(
        *(POINTER(tensor.data_ptr()) for tensor in (weight_OI, panels, scales)),
        *(INTEGER(number) for number in (num_outputs, num_inputs, torch.get_num_threads())),
        INTEGER(weight_OI.dtype == torch.bfloat16),
    )
    return PackedInt8(panels, scales, num_outputs, num_inputs, weight_OI.new_empty(0), library)


def stored(
    numbers: torch.Tensor, scales: torch.Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> PackedInt8:
    """The weight of which `numbers` and `scales` were kept, on a processor of the same kind."""
    library = shared("auto").library("linear_int8", numbers.device) if numbers.dtype == torch.uint8 else None
    return PackedInt8(numbers, scales, num_outputs, num_inputs, numbers.new_empty(0, dtype=dtype), library)


def unpacked(weight: PackedInt8) -> torch.Tensor:
    """The weight `[O, I]` that the 8 bits stand for, in the dtype of the weight that was packed."""
    if weight.library is None:
        weight_OI = (weight.numbers.float() * weight.scales).flatten(1)[:, : weight.num_inputs]
        return weight_OI.to(weight.like.dtype).contiguous()
    weight_OI = weight.like.new_empty(weight.num_outputs, weight.num_inputs)
    weight.library.linear_int8_unpack(
        *(POINTER(tensor.data_ptr()) for tensor in (weight.numbers, weight.scales, weight_OI)),
        *(INTEGER(number) for number in (weight.num_outputs, weight.num_inputs, torch.get_num_threads())),
        INTEGER(weight.like.dtype == torch.bfloat16),
    )
    return weight_OI


def linear(x_RI: torch.Tensor, weight: PackedInt8, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias `[R, O]` in the dtype of the weight that was packed, rounded once.

    The bits of a row depend on that row alone: not on other rows, nor on threads. Rows of x may be any distance apart.
    The gradient to x is that of a product with the unpacked weight, as if rows were not rounded (a straight-through
    estimate, Bengio et al. 2013, arXiv 1308.3432); there is none to the weight.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    if records_gradient(x_RI, bias_O):
        return _Linear.apply(x_RI, weight, bias_O)  # type: ignore[return-value]
    return _forward(x_RI, weight, bias_O)


def _forward(x_RI: torch.Tensor, weight: PackedInt8, bias_O: torch.Tensor | None) -> torch.Tensor:
    require("x", x_RI, (*x_RI.shape[:1], weight.num_inputs), weight.like)
    require("the bias", bias_O, (weight.num_outputs,), weight.like)
    if weight.library is None:
        return torch_impl.linear(x_RI, weight.numbers, weight.scales, bias_O)
    x_RI, bias_O = with_dense_rows(x_RI), None if bias_O is None else bias_O.contiguous()
    y_RO = torch.empty(len(x_RI), weight.num_outputs, dtype=weight.like.dtype)
    arguments = _Arguments(
        *(x_RI.data_ptr(), weight.numbers.data_ptr(), weight.scales.data_ptr(), address(bias_O), y_RO.data_ptr()),
        *(*x_RI.shape, weight.num_outputs, x_RI.stride(0), torch.get_num_threads()),
        weight.like.dtype == torch.bfloat16,
    )
    call(weight.library, "linear_int8", arguments, (x_RI, weight.numbers, weight.scales, bias_O, y_RO))
    return y_RO


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, weight: PackedInt8, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return _forward(x_RI, weight, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_RO: torch.Tensor) -> Any:
        needs_x, _, needs_bias = ctx.needs_input_grad
        d_x_RI = product(d_y_RO, unpacked(ctx.weight)) if needs_x else None
        return d_x_RI, None, d_y_RO.sum(0) if needs_bias else None
