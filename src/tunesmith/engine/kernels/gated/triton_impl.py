"""Gated activations and soft-capping in Triton, and their gradients: each number is read once and written once.

An activation is x * sigmoid(k(x)): k(x) = x is SiLU, and the tanh form of GELU is 0.5 * (1 + tanh(y)) = sigmoid(2 * y)
with y = sqrt(2 / pi) * (x + 0.044715 * x^3). GELU itself is x times the normal distribution function.

Shape legend: R rows, I intermediate size, V vocabulary.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.arguments import empty_as, step_of
from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div, power_of_two
from tunesmith.engine.kernels.triton_softmax import tanh

_LARGEST_BLOCK = 1024
"""Numbers of a program: 8 for each of 128 threads, 16 bytes of 16-bit numbers."""

_SMALLEST_BLOCK = 32


def launch(shape: tuple[int, int], *, contiguous: bool) -> LaunchPlan:
    """The plan for matrices of this shape, not empty; contiguous ones are one long row."""
    num_rows, width = (1, shape[0] * shape[1]) if contiguous else shape
    block = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, power_of_two(width)))
    tiles = ceil_div(width, block)
    return LaunchPlan(block, tiles, max(1, block // 256), grid=(num_rows * tiles,))


@triton.jit
def _place(num_blocks, width, BLOCK: tl.constexpr):
    """(this program's row, its columns, which of them are inside)."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    column = (program % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < width


@triton.jit
def _value_and_slope(x, cap, FUNCTION: tl.constexpr):
    """(function of x, its slope)."""
    if FUNCTION == "softcap":
        # The slope is 1 / cosh(x / cap)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x / cap|), which does not cancel.
        power = tl.exp(-2.0 * tl.abs(x / cap))
        value = cap * tanh(x / cap)
        slope = 4.0 * power / ((1.0 + power) * (1.0 + power))
    elif FUNCTION == "gelu":
        distribution = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * distribution
        slope = distribution + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    else:
        if FUNCTION == "gelu_tanh":
            # Beyond 20 the sigmoid is 0 or 1 in float32, and the cube of x may be infinite. NaN stays.
            near = tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
            argument = near * (near * near * 0.07135481627260025 + 1.5957691216057308)
            steepness = near * near * 0.21406444881780074 + 1.5957691216057308
        else:
            argument = x
            steepness = 1.0
        power = tl.exp(-tl.abs(argument))
        sigmoid = tl.where(argument < 0, power, 1.0) / (1.0 + power)
        value = x * sigmoid
        slope = sigmoid + x * (power / ((1.0 + power) * (1.0 + power)) * steepness)
    return value, slope


@triton.jit
def gated_kernel(
    x,
    up,
    out,
    num_blocks,
    width,
    x_stride,
    up_stride,
    cap,
    FUNCTION: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """function(x) * up, or function(x); `out` is contiguous."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    result, _ = _value_and_slope(
        tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32), cap, FUNCTION
    )
    if HAS_UP:
        result *= tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_gradient_kernel(
    x,
    up,
    d_out,
    d_x,
    d_up,
    num_blocks,
    width,
    x_stride,
    up_stride,
    cap,
    FUNCTION: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of x and, if there is one, of up; `d_out` and what is written are contiguous."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    at = row * width + column
    number = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(number, cap, FUNCTION)
    if HAS_UP:
        factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_up + at, (gradient * value).to(d_up.dtype.element_ty), mask=inside)
        gradient *= factor
    tl.store(d_x + at, (gradient * slope).to(d_x.dtype.element_ty), mask=inside)


def forward(x_RI: torch.Tensor, up_RI: torch.Tensor | None, function: str, cap: float) -> torch.Tensor:
    """function(x) * up, contiguous; the rows of what is given are dense."""
    out_RI = empty_as(x_RI)
    _run(gated_kernel, (x_RI, x_RI if up_RI is None else up_RI, out_RI), up_RI is not None, function, cap)
    return out_RI


def backward(
    x_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor, function: str, cap: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of x, gradient of up), contiguous; rows of x and up are dense and `d_out_RI` is contiguous."""
    d_x_RI, d_up_RI = empty_as(x_RI), None if up_RI is None else empty_as(x_RI)
    tensors = (x_RI, x_RI if up_RI is None else up_RI, d_out_RI, d_x_RI, d_x_RI if d_up_RI is None else d_up_RI)
    _run(gated_gradient_kernel, tensors, up_RI is not None, function, cap)
    return d_x_RI, d_up_RI


def _run(kernel: Any, tensors: tuple[torch.Tensor, ...], has_up: bool, function: str, cap: float) -> None:
    """Launch for tensors of which the first two, x and up, may have strides."""
    x_RI, up_RI = tensors[:2]
    num_rows, width = x_RI.shape
    contiguous = x_RI.is_contiguous() and up_RI.is_contiguous()
    plan = launch((num_rows, width), contiguous=contiguous)
    with torch.cuda.device_of(x_RI):
        kernel[plan.grid](
            *tensors,
            *(plan.tiles, num_rows * width if contiguous else width),
            *(step_of(x_RI, 0), step_of(up_RI, 0) if has_up else 0, cap),
            FUNCTION=function,
            HAS_UP=has_up,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
