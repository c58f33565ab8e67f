"""Generalised advantage estimation in Triton: one program scans one row, block by block from its end.

Equation 16 is a chain of affine maps A -> delta + decay A, and those compose associatively (Blelloch 1990), so a block
is scanned in parallel. A position outside the mask is the identity. Shapes: B sequences, T completion tokens.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan, power_of_two

_LARGEST_BLOCK = 2048


def launch(num_rows: int, num_columns: int) -> LaunchPlan:
    """The launch for `[num_rows, num_columns]`: a row in one block if it is not longer than 2,048."""
    block = min(max(power_of_two(num_columns), 32), _LARGEST_BLOCK)
    return LaunchPlan(block, 1, max(1, min(8, block // 256)), grid=(num_rows,))


def gae(
    reward_BT: torch.Tensor, value_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns in float32; any strides, a mask of bool."""
    num_rows, num_columns = reward_BT.shape
    advantage_BT = torch.empty_like(reward_BT, dtype=torch.float32, memory_format=torch.contiguous_format)
    return_BT = torch.empty_like(advantage_BT)
    if not reward_BT.numel():
        return advantage_BT, return_BT
    plan = launch(num_rows, num_columns)
    with torch.cuda.device_of(reward_BT):
        cast(Any, gae_kernel)[plan.grid](
            *(reward_BT, value_BT, mask_BT.view(torch.uint8), advantage_BT, return_BT),
            *(num_columns, *reward_BT.stride(), *value_BT.stride(), *mask_BT.stride(), gamma, gamma * lam),
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return advantage_BT, return_BT


@triton.jit
def _composed(decay_a, sum_a, decay_b, sum_b):
    """The affine map of what lies behind, then that of this position."""
    return decay_a * decay_b, decay_b * sum_a + sum_b


@triton.jit
def _nearest(has_a, value_a, has_b, value_b):
    """The value of the nearest position that counts."""
    return has_a | has_b, tl.where(has_b != 0, value_b, value_a)


@triton.jit
def gae_kernel(
    reward,
    value,
    mask,
    advantage,
    returns,
    num_columns,
    reward_row,
    reward_column,
    value_row,
    value_column,
    mask_row,
    mask_column,
    gamma,
    decay,
    BLOCK: tl.constexpr,
):
    """Columns of one row, a block at a time; advantage and returns are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    num_blocks = tl.cdiv(num_columns, BLOCK)
    # What the position behind the block sees: the next value that counts, and the advantage of it.
    behind_value = tl.sum(tl.zeros([BLOCK], tl.float32), 0)
    behind_advantage = behind_value
    for index in range(num_blocks):
        at = (num_blocks - 1 - index) * BLOCK + offset
        inside, inside_next = at < num_columns, at + 1 < num_columns
        counts = tl.load(mask + row * mask_row + at * mask_column, mask=inside, other=0) != 0
        here = tl.load(value + row * value_row + at * value_column, mask=counts, other=0.0).to(tl.float32)
        reward_here = tl.load(reward + row * reward_row + at * reward_column, mask=counts, other=0.0).to(tl.float32)
        has_next = tl.load(mask + row * mask_row + (at + 1) * mask_column, mask=inside_next, other=0).to(tl.int32)
        next_value = tl.load(
            value + row * value_row + (at + 1) * value_column, mask=inside_next & (has_next != 0), other=0.0
        ).to(tl.float32)
        has_next, next_value = tl.associative_scan((has_next, next_value), 0, _nearest, reverse=True)
        next_value = tl.where(has_next != 0, next_value, behind_value)
        delta = tl.where(counts, reward_here + gamma * next_value - here, 0.0)
        factor = tl.where(counts, decay, 1.0)
        factor, found = tl.associative_scan((factor, delta), 0, _composed, reverse=True)
        found = found + factor * behind_advantage
        out = row * num_columns + at
        tl.store(advantage + out, tl.where(counts, found, 0.0), mask=inside)
        tl.store(returns + out, tl.where(counts, found + here, 0.0), mask=inside)
        behind_advantage = tl.sum(tl.where(offset == 0, found, 0.0), 0)
        # The first column itself, or what it saw.
        first = tl.where(counts, here, next_value)
        behind_value = tl.sum(tl.where(offset == 0, first, 0.0), 0)
