"""Add and RMSNorm in Triton: a row stays in registers from its sum to its product with the weight.

The gradient of the weight is summed in two stages. A program sums the rows that it takes, and a second kernel adds the
sums of all programs in their order: so nothing is added atomically, and equal inputs give equal bits.

Shape legend: R rows, H hidden, P programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.arguments import empty_as, step_of, with_dense_rows
from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div, power_of_two
from tunesmith.engine.kernels.rms_norm.torch_impl import layout_of

_TILE = 1024
"""Numbers that a program holds at least: 8 for each of 128 threads, 16 bytes of 16-bit numbers."""

_MOST_WARPS = 16
_ROWS_OF_PROGRAM = 16
"""Rows of one sum at least: the sums of 16 rows take 8 bytes for each column, the rows themselves 96 in 16 bits."""

_PROGRAMS = 1056
"""Eight for each processor of an H100 or H200, so that the last ones to end are not alone."""

FOLD_P, FOLD_H = 64, 32


def launch(width: int) -> LaunchPlan:
    """The plan for rows of `width` numbers, at most `LONGEST`.

    It is a function of the width alone, as it decides on the order of a row's sum: a row has the same bits in a rollout
    and in an update, whatever the number of rows.
    """
    block_h = max(16, power_of_two(width))
    block_r = max(1, _TILE // block_h)
    return LaunchPlan(block_h, 1, min(_MOST_WARPS, block_r * block_h // 256), block_r)


def rows_of_program(num_rows: int, plan: LaunchPlan) -> int:
    """Rows that a program of the backward pass sums for the weight: whole tiles."""
    return ceil_div(max(_ROWS_OF_PROGRAM, ceil_div(num_rows, _PROGRAMS)), plan.block_rows) * plan.block_rows


@triton.jit
def factor_of(weight, column, is_column, offset, HAS_OFFSET: tl.constexpr):
    """The scale of the rows, as a row."""
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        factor += offset
    return factor[None, :]


@triton.jit
def place_of(row, inner, outer_stride, inner_stride):
    """Offsets of the rows of groups; divided in 32 bits, as a division in 64 takes many registers."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def forward_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    scale,
    num_rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    epsilon,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Rows of x are in groups of `inner`, all others contiguous; `total` is written where there is a residual."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_H)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = place_of(row, inner, outer_stride, inner_stride)
    dense = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + dense, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + added).to(total.dtype.element_ty)
        tl.store(total + dense, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale_of_row = tl.rsqrt(tl.sum(value * value, axis=1) / width + epsilon)
    tl.store(scale + row, scale_of_row, mask=row < num_rows)
    unit = value * scale_of_row[:, None]
    if not HAS_OFFSET:  # what the weight is multiplied with is rounded first
        unit = unit.to(normed.dtype.element_ty).to(tl.float32)
    result = unit * factor_of(weight, column, column < width, offset, HAS_OFFSET)
    tl.store(normed + dense, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    total,
    scale,
    weight,
    d_normed,
    d_total,
    d_x,
    sums,
    num_rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    rows_of_program,
    offset,
    HAS_D_TOTAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    FOR_WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """With u = total * scale and g the gradient of u: d_x = scale * (g - u * mean(g * u)) + d_total.

    The sum of d_normed * u over this program's rows goes to its row of `sums`, if the weight wants it.
    """
    first = tl.program_id(0) * rows_of_program
    column = tl.arange(0, BLOCK_H)
    is_column = column < width
    share = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    for start in range(0, rows_of_program, BLOCK_R):
        row = first + start + tl.arange(0, BLOCK_R)
        inside = (row < num_rows)[:, None] & is_column[None, :]
        place = place_of(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
        dense = row.to(tl.int64)[:, None] * width + column[None, :]
        scale_of_row = tl.load(scale + row, mask=row < num_rows, other=0.0)[:, None]
        factor = factor_of(weight, column, is_column, offset, HAS_OFFSET)
        unit = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * scale_of_row
        gradient = tl.load(d_normed + dense, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(gradient * factor * unit, axis=1) / width
        result = (gradient * factor - unit * mean[:, None]) * scale_of_row
        if HAS_D_TOTAL:
            result += tl.load(d_total + dense, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + dense, result.to(d_x.dtype.element_ty), mask=inside)
        if FOR_WEIGHT:
            if not HAS_OFFSET:
                unit = unit.to(d_x.dtype.element_ty).to(tl.float32)
            share += gradient * unit
    if FOR_WEIGHT:
        tl.store(sums + tl.program_id(0).to(tl.int64) * width + column, tl.sum(share, axis=0), mask=is_column)


@triton.jit
def fold_kernel(sums, d_weight, num_sums, width, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    """The sum over the rows of `sums`, always in the same order."""
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = column < width
    found = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, num_sums, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row < num_sums)[:, None] & is_column[None, :]
        found += tl.sum(tl.load(sums + row[:, None] * width + column[None, :], mask=inside, other=0.0), axis=0)
    tl.store(d_weight + column, found.to(d_weight.dtype.element_ty), mask=is_column)


def forward(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(normed, the sum if there is a residual, 1 / root mean square of each row); x is [R, H] or [R, heads, H]."""
    x_RH = _placed(x_RH)
    plan = launch(x_RH.shape[-1])
    normed_RH = empty_as(x_RH)
    sum_RH = None if residual_RH is None else empty_as(x_RH)
    layout = layout_of(x_RH)
    scale_R = torch.empty(layout[0], dtype=torch.float32, device=x_RH.device)
    with torch.cuda.device_of(x_RH):
        kernel: Any = forward_kernel  # parameters of the launch itself are none of the kernel's
        kernel[(ceil_div(layout[0], plan.block_rows),)](
            x_RH,
            x_RH if residual_RH is None else residual_RH.contiguous(),
            weight_H.contiguous(),
            normed_RH,
            normed_RH if sum_RH is None else sum_RH,
            scale_R,
            *layout,
            epsilon,
            offset,
            HAS_RESIDUAL=residual_RH is not None,
            HAS_OFFSET=offset != 0,
            BLOCK_R=plan.block_rows,
            BLOCK_H=plan.block,
            num_warps=plan.num_warps,
        )
    return normed_RH, sum_RH, scale_R


def backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    d_normed_RH: torch.Tensor,
    d_sum_RH: torch.Tensor | None,
    offset: float,
    *,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of x and of the residual, gradient of the weight) from (sum, weight, scale)."""
    sum_RH, weight_H, scale_R = saved
    sum_RH = _placed(sum_RH)
    layout = num_rows, width, *_ = layout_of(sum_RH)
    plan = launch(width)
    in_program = rows_of_program(num_rows, plan)
    num_programs = ceil_div(num_rows, in_program)
    d_x_RH = empty_as(sum_RH)
    sums_PH = torch.empty((num_programs if for_weight else 0, width), dtype=torch.float32, device=sum_RH.device)
    with torch.cuda.device_of(sum_RH):
        kernel: Any = backward_kernel
        kernel[(num_programs,)](
            sum_RH,
            scale_R,
            weight_H.contiguous(),
            d_normed_RH.contiguous(),
            d_x_RH if d_sum_RH is None else d_sum_RH.contiguous(),
            d_x_RH,
            sums_PH,
            *layout,
            in_program,
            offset,
            HAS_D_TOTAL=d_sum_RH is not None,
            HAS_OFFSET=offset != 0,
            FOR_WEIGHT=for_weight,
            BLOCK_R=plan.block_rows,
            BLOCK_H=plan.block,
            num_warps=plan.num_warps,
        )
        if not for_weight:
            return d_x_RH, None
        d_weight_H = empty_as(weight_H)
        fold: Any = fold_kernel
        fold[(ceil_div(width, FOLD_H),)](sums_PH, d_weight_H, num_programs, width, BLOCK_P=FOLD_P, BLOCK_H=FOLD_H)
    return d_x_RH, d_weight_H


def _placed(x_RH: torch.Tensor) -> torch.Tensor:
    """x itself if it is as well aligned as contiguous rows are, else a copy.

    Triton compiles a kernel for addresses that are multiples of 16, and another for those that are not. The two sum a
    row in different orders, and its bits must not depend on what it is a slice of.
    """
    x_RH = with_dense_rows(x_RH)
    if x_RH.shape[-1] % 16:
        return x_RH.contiguous()
    is_aligned = x_RH.data_ptr() % 16 == 0 and all(step_of(x_RH, dim) % 16 == 0 for dim in range(x_RH.dim() - 1))
    return x_RH if is_aligned else x_RH.clone(memory_format=torch.contiguous_format)
