"""Gated activations and soft-capping in Triton, and their gradients: each number is read once and written once.

An activation is x * sigmoid(k(x)): k(x) = x is SiLU, and the tanh form of GELU is 0.5 * (1 + tanh(y)) = sigmoid(2 * y)
with y = sqrt(2 / pi) * (x + 0.044715 * x^3).

Shape legend: R rows, I intermediate size, V vocabulary.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.kernels.arguments import empty_as, step_of
from tunesmith.kernels.launching import LaunchPlan, ceil_div, power_of_two
from tunesmith.kernels.triton_softmax import tanh

_LARGEST_BLOCK = 1024
"""Numbers of a program: 8 for each of 128 threads, 16 bytes of 16-bit numbers."""

_SMALLEST_BLOCK = 32


def launch(shape: tuple[int, int], *, without_gaps: bool) -> LaunchPlan:
    """The plan for matrices of this shape, not empty; those without gaps are one long row, of which nothing is left."""
    num_rows, width = (1, shape[0] * shape[1]) if without_gaps else shape
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
def _sigmoid(x, IS_GELU: tl.constexpr):
    """(sigmoid of the activation's argument, the slope of that with respect to x)."""
    if IS_GELU:
        # Beyond 20 the sigmoid is 0 or 1 in float32, and the cube of x may be infinite. NaN stays.
        near = tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
        argument = near * (near * near * 0.07135481627260025 + 1.5957691216057308)
        steepness = near * near * 0.21406444881780074 + 1.5957691216057308
    else:
        argument = x
        steepness = 1.0
    power = tl.exp(-tl.abs(argument))
    sigmoid = tl.where(argument < 0, power, 1.0) / (1.0 + power)
    return sigmoid, power / ((1.0 + power) * (1.0 + power)) * steepness


@triton.jit
def gated_kernel(
    gate,
    up,
    out,
    num_blocks,
    width,
    gate_stride,
    up_stride,
    IS_GELU: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """activation(gate) * up, or activation(gate); `out` has no gaps."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoid(x, IS_GELU)
    result = x * sigmoid
    if HAS_UP:
        result *= tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_gradient_kernel(
    gate,
    up,
    d_out,
    d_gate,
    d_up,
    num_blocks,
    width,
    gate_stride,
    up_stride,
    IS_GELU: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and, if there is one, of up; `d_out` and what is written have no gaps."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    at = row * width + column
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid, slope = _sigmoid(x, IS_GELU)
    if HAS_UP:
        factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_up + at, (gradient * (x * sigmoid)).to(d_up.dtype.element_ty), mask=inside)
        gradient *= factor
    tl.store(d_gate + at, (gradient * (sigmoid + x * slope)).to(d_gate.dtype.element_ty), mask=inside)


@triton.jit
def cap_kernel(x, out, num_blocks, width, stride, cap, BLOCK: tl.constexpr):
    """cap * tanh(x / cap); `out` has no gaps."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (cap * tanh(value / cap)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def cap_gradient_kernel(x, d_out, d_x, num_blocks, width, stride, cap, BLOCK: tl.constexpr):
    """The slope is 1 / cosh(x / cap)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x / cap|), which does not cancel."""
    row, column, inside = _place(num_blocks, width, BLOCK)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    power = tl.exp(-2.0 * tl.abs(value / cap))
    slope = 4.0 * power / ((1.0 + power) * (1.0 + power))
    tl.store(d_x + row * width + column, (gradient * slope).to(d_x.dtype.element_ty), mask=inside)


def forward(gate_RI: torch.Tensor, up_RI: torch.Tensor | None, activation: str) -> torch.Tensor:
    """activation(gate) * up without gaps; each row of what is given is dense."""
    out_RI = empty_as(gate_RI)
    plan, width = _plan(gate_RI, up_RI)
    with torch.cuda.device_of(gate_RI):
        kernel: Any = gated_kernel  # parameters of the launch itself are none of the kernel's
        kernel[plan.grid](
            gate_RI,
            gate_RI if up_RI is None else up_RI,
            out_RI,
            *(plan.tiles, width, step_of(gate_RI, 0), 0 if up_RI is None else step_of(up_RI, 0)),
            IS_GELU=activation == "gelu_tanh",
            HAS_UP=up_RI is not None,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return out_RI


def backward(
    gate_RI: torch.Tensor, up_RI: torch.Tensor | None, d_out_RI: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of gate, gradient of up) without gaps; rows of gate and up are dense and `d_out_RI` has no gaps."""
    d_gate_RI, d_up_RI = empty_as(gate_RI), None if up_RI is None else empty_as(gate_RI)
    plan, width = _plan(gate_RI, up_RI)
    with torch.cuda.device_of(gate_RI):
        kernel: Any = gated_gradient_kernel
        kernel[plan.grid](
            gate_RI,
            gate_RI if up_RI is None else up_RI,
            d_out_RI,
            d_gate_RI,
            d_gate_RI if d_up_RI is None else d_up_RI,
            *(plan.tiles, width, step_of(gate_RI, 0), 0 if up_RI is None else step_of(up_RI, 0)),
            IS_GELU=activation == "gelu_tanh",
            HAS_UP=up_RI is not None,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return d_gate_RI, d_up_RI


def cap_forward(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) without gaps; rows of x are dense."""
    out_RV = empty_as(x_RV)
    plan, width = _plan(x_RV, None)
    numbers = plan.tiles, width, step_of(x_RV, 0), cap
    with torch.cuda.device_of(x_RV):
        kernel: Any = cap_kernel
        kernel[plan.grid](x_RV, out_RV, *numbers, BLOCK=plan.block, num_warps=plan.num_warps)
    return out_RV


def cap_backward(x_RV: torch.Tensor, d_out_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """The gradient of x; rows of x are dense and `d_out_RV` has no gaps."""
    d_x_RV = empty_as(x_RV)
    plan, width = _plan(x_RV, None)
    numbers = plan.tiles, width, step_of(x_RV, 0), cap
    with torch.cuda.device_of(x_RV):
        kernel: Any = cap_gradient_kernel
        kernel[plan.grid](x_RV, d_out_RV, d_x_RV, *numbers, BLOCK=plan.block, num_warps=plan.num_warps)
    return d_x_RV


def _plan(gate_RI: torch.Tensor, up_RI: torch.Tensor | None) -> tuple[LaunchPlan, int]:
    """The plan, and the length of its rows."""
    num_rows, width = gate_RI.shape
    without_gaps = gate_RI.is_contiguous() and (up_RI is None or up_RI.is_contiguous())
    plan = launch((num_rows, width), without_gaps=without_gaps)
    return plan, num_rows * width if without_gaps else width
