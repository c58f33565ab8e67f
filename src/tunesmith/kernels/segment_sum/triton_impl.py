"""Sums over segments in Triton: one program reads one segment, some columns of it; nothing is added atomically.

Shapes: T elements of all segments, D columns, S segments.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.kernels.launching import ceil_div, power_of_two
from tunesmith.kernels.triton_check import Variant

_TILE_ELEMENTS = 1024
_LARGEST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Programs along segments and columns, and the tile that a program reads at a time."""

    grid: tuple[int, int]
    block_rows: int
    block_columns: int
    num_warps: int


def launch(num_segments: int, num_columns: int) -> LaunchPlan:
    """The launch for S segments of D columns: tiles of 1,024 elements, tall where columns are few."""
    block_columns = min(power_of_two(max(num_columns, 1)), _LARGEST_COLUMNS)
    return LaunchPlan(
        (num_segments, ceil_div(num_columns, block_columns)), _TILE_ELEMENTS // block_columns, block_columns, 4
    )


def segment_sum(values_TD: torch.Tensor, offset_S1: torch.Tensor) -> torch.Tensor:
    """The sum of each segment, `[S, D]` in float32; any strides."""
    num_segments, num_columns = len(offset_S1) - 1, values_TD.shape[1]
    sum_SD = values_TD.new_zeros((num_segments, num_columns), dtype=torch.float32)
    if not (sum_SD.numel() and values_TD.numel()):
        return sum_SD
    return _run(segment_sum_kernel, values_TD, offset_S1, sum_SD)


def segment_gradient(d_sum_SD: torch.Tensor, offset_S1: torch.Tensor, num_rows: int) -> torch.Tensor:
    """What each row gets of the gradient of its segment's sum, `[T, D]` in the dtype of the latter."""
    num_segments, num_columns = d_sum_SD.shape
    d_values_TD = d_sum_SD.new_zeros((num_rows, num_columns))
    if not (d_values_TD.numel() and num_segments):
        return d_values_TD
    return _run(segment_gradient_kernel, d_sum_SD, offset_S1, d_values_TD)


def _run(kernel: Any, given_XD: torch.Tensor, offset_S1: torch.Tensor, out_XD: torch.Tensor) -> torch.Tensor:
    """`out_XD`, once the kernel has written it from what is given."""
    num_columns = given_XD.shape[1]
    plan = launch(len(offset_S1) - 1, num_columns)
    with torch.cuda.device_of(given_XD):
        kernel[plan.grid](
            given_XD,
            offset_S1.contiguous(),
            out_XD,
            num_columns,
            *given_XD.stride(),
            BLOCK_ROWS=plan.block_rows,
            BLOCK_COLUMNS=plan.block_columns,
            num_warps=plan.num_warps,
        )
    return out_XD


@triton.jit
def segment_sum_kernel(
    values,
    offset,
    sums,
    num_columns,
    row_stride,
    column_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Some columns of one segment; sums are contiguous."""
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    begin, end = tl.load(offset + segment).to(tl.int64), tl.load(offset + segment + 1).to(tl.int64)
    here = column < num_columns
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        at = row[:, None] * row_stride + column[None, :] * column_stride
        total += tl.load(values + at, mask=(row < end)[:, None] & here[None, :], other=0.0).to(tl.float32)
    tl.store(sums + segment * num_columns + column, tl.sum(total, 0), mask=here)


@triton.jit
def segment_gradient_kernel(
    d_sums,
    offset,
    d_values,
    num_columns,
    row_stride,
    column_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Some columns of one segment; the gradient of the values is contiguous."""
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    begin, end = tl.load(offset + segment).to(tl.int64), tl.load(offset + segment + 1).to(tl.int64)
    here = column < num_columns
    gradient = tl.load(d_sums + segment * row_stride + column * column_stride, mask=here, other=0.0).to(tl.float32)
    tile = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32) + gradient[None, :]
    for first in range(begin, end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        at = row[:, None] * num_columns + column[None, :]
        tl.store(d_values + at, tile, mask=(row < end)[:, None] & here[None, :])


def _variants(kind: str, num_columns: int) -> tuple[Variant, ...]:
    plan = launch(1, num_columns)
    numbers = dict.fromkeys(("num_columns", "row_stride", "column_stride"), "i32")
    constants = {"BLOCK_ROWS": plan.block_rows, "BLOCK_COLUMNS": plan.block_columns}
    name = f"{kind.strip('*')}_{num_columns}"
    forward = {"values": kind, "offset": "*i64", "sums": "*fp32"} | numbers
    backward = {"d_sums": "*fp32", "offset": "*i64", "d_values": "*fp32"} | numbers
    found = (Variant(f"sum_{name}", segment_sum_kernel, forward, constants, plan.num_warps),)
    if kind == "*fp32":
        found += (Variant(f"gradient_{name}", segment_gradient_kernel, backward, constants, plan.num_warps),)
    return found


VARIANTS = (
    *_variants("*fp32", 1),
    *_variants("*bf16", 1),
    *_variants("*fp16", 1),
    *_variants("*fp32", 64),
)
