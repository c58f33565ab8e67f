"""Selection by votes in Triton: tiles over rows and columns, and of each pair only what was selected is loaded.

The weighted sum has two forms. Deterministic: each program writes the sum of its rows, and a second kernel adds them in
their order. Atomic: each program adds its sum to one row, in whatever order programs end.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div, power_of_two
from tunesmith.engine.kernels.preference.torch_impl import PreferenceBatch

_TILE = 2048
"""Numbers of a tile: 8 for each of 256 threads, 16 bytes of 16-bit numbers. With 16, Triton 3.7 spills some."""

_NUM_WARPS = 8

_LARGEST_BLOCK_N = 512
_PROGRAMS = 1056
"""Eight for each processor of an H100 or H200, so that the last ones to end are not alone."""

FOLD_B, FOLD_N = 64, 32


def launch(shape: tuple[int, int], block_n: int | None = None) -> LaunchPlan:
    """The plan for outputs of this shape, not empty; `block_n` is a power of two and by default fits the columns."""
    num_rows, num_columns = shape
    block_n = block_n or min(_LARGEST_BLOCK_N, max(16, power_of_two(num_columns)))
    column_programs = ceil_div(num_columns, block_n)
    block_b = max(1, min(_TILE // block_n, power_of_two(num_rows)))
    row_programs = max(1, min(ceil_div(num_rows, block_b), _PROGRAMS // column_programs))
    rows_per_program = ceil_div(ceil_div(num_rows, row_programs), block_b) * block_b
    grid = (ceil_div(num_rows, rows_per_program), column_programs)
    return LaunchPlan(block_n, rows_per_program // block_b, _NUM_WARPS, block_b, grid)


@triton.jit
def select_kernel(
    a,
    b,
    choices,
    votes,
    selected,
    sums,
    num_rows,
    num_columns,
    a_stride,
    b_stride,
    rows_per_program,
    HAS_VOTES: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes the selected outputs, and the sum of this program's rows to its row of `sums`, or adds it to the first."""
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, rows_per_program, BLOCK_B):
        rows = first + start + tl.arange(0, BLOCK_B)
        is_row = rows < num_rows
        choice = tl.load(choices + rows, mask=is_row, other=0.0)[:, None]
        inside = is_row[:, None] & is_column[None, :]
        of_a = tl.load(a + rows[:, None] * a_stride + columns[None, :], mask=inside & (choice >= 0.5), other=0.0)
        of_b = tl.load(b + rows[:, None] * b_stride + columns[None, :], mask=inside & (choice <= 0.5), other=0.0)
        of_a = of_a.to(tl.float32)
        of_b = of_b.to(tl.float32)
        mean = 0.5 * of_a + 0.5 * of_b
        picked = tl.where(choice > 0.5, of_a, tl.where(choice < 0.5, of_b, mean))
        tl.store(
            selected + rows[:, None] * num_columns + columns[None, :], picked.to(selected.dtype.element_ty), mask=inside
        )
        if HAS_VOTES:
            picked = picked * tl.load(votes + rows, mask=is_row, other=0.0)[:, None]
        total += tl.sum(picked, axis=0)
    if ATOMIC:
        tl.atomic_add(sums + columns, total, mask=is_column)
    else:
        tl.store(sums + tl.program_id(0).to(tl.int64) * num_columns + columns, total, mask=is_column)


@triton.jit
def fold_kernel(sums, weights, updated, num_sums, num_columns, scale, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """updated = weights + scale * the sum over the rows of `sums`, always in the same order."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, num_sums, BLOCK_B):
        rows = (start + tl.arange(0, BLOCK_B)).to(tl.int64)
        inside = (rows < num_sums)[:, None] & is_column[None, :]
        total += tl.sum(tl.load(sums + rows[:, None] * num_columns + columns[None, :], mask=inside, other=0.0), axis=0)
    start_value = tl.load(weights + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(updated + columns, (start_value + scale * total).to(updated.dtype.element_ty), mask=is_column)


def select_into(
    batch: PreferenceBatch,
    weights_N: torch.Tensor,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor],
    plan: LaunchPlan,
    *,
    deterministic: bool = True,
) -> None:
    """Write selected outputs and updated weights to `out`; the updated weights may be the weights themselves.

    Outputs have dense rows and are not empty; choices and vote weights are float32 and contiguous.
    """
    a_BN, b_BN, votes_B = batch.outputs_a_BN, batch.outputs_b_BN, batch.vote_weights_B
    selected_BN, updated_N = out
    num_rows, num_columns = a_BN.shape
    num_sums = plan.grid[0] if deterministic else 1
    new_sums = torch.empty if deterministic else torch.zeros
    sums_PN = new_sums(num_sums, num_columns, dtype=torch.float32, device=a_BN.device)
    # Parameters of the launch itself are none of the kernel's.
    select, fold = cast(Any, select_kernel), cast(Any, fold_kernel)
    with torch.cuda.device_of(a_BN):
        select[plan.grid](
            *(a_BN, b_BN, batch.choices_B, batch.choices_B if votes_B is None else votes_B, selected_BN, sums_PN),
            *(num_rows, num_columns, a_BN.stride(0), b_BN.stride(0), plan.tiles * plan.block_rows),
            HAS_VOTES=votes_B is not None,
            ATOMIC=not deterministic,
            BLOCK_B=plan.block_rows,
            BLOCK_N=plan.block,
            num_warps=plan.num_warps,
        )
        fold[(ceil_div(num_columns, FOLD_N),)](
            sums_PN, weights_N, updated_N, num_sums, num_columns, scale, BLOCK_B=FOLD_B, BLOCK_N=FOLD_N
        )
