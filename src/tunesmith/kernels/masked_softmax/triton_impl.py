"""Scale, mask and softmax in Triton: a row stays in registers, and keys that it does not see are not loaded.

Rows up to `LONGEST` keys are read once. Longer ones are read twice: once for the largest score and the sum, once for
the probabilities.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.kernels.arguments import step_of
from tunesmith.kernels.launching import LaunchPlan, ceil_div, power_of_two
from tunesmith.kernels.masked_softmax.records import KeyMask

LONGEST = 8192
"""Keys of a row that is kept in registers: 16 for each of 512 threads."""

_TILE = 4096
_SMALLEST_BLOCK = 16
_NUMBERS_OF_A_THREAD = 16


def launch(num_rows: int, num_keys: int) -> LaunchPlan:
    """The plan for that many rows of so many keys, at least one of each."""
    if num_keys > LONGEST:
        tiles, num_warps = ceil_div(num_keys, _TILE), _TILE // (32 * _NUMBERS_OF_A_THREAD)
        return LaunchPlan(_TILE, tiles, num_warps, grid=(num_rows,))
    block_k = max(_SMALLEST_BLOCK, power_of_two(num_keys))
    block_r = max(1, min(_TILE // block_k, power_of_two(num_rows)))
    num_warps = max(1, min(16, block_r * block_k // (32 * _NUMBERS_OF_A_THREAD)))
    return LaunchPlan(block_k, 1, num_warps, block_r, (ceil_div(num_rows, block_r),))


@triton.jit
def range_of(
    rows,
    is_row,
    keys,
    heads,
    queries,
    num_keys,
    offset,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KEYS: tl.constexpr,
):
    """(first key that each row may see, the one after its last)."""
    position = offset + rows % queries
    first = position * 0
    end = first + num_keys
    if HAS_KEYS:
        batch = rows // (heads * queries)
        first = tl.maximum(first, tl.load(keys + 2 * batch, mask=is_row, other=0))
        end = tl.minimum(end, tl.load(keys + 2 * batch + 1, mask=is_row, other=0))
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    if HAS_WINDOW:
        first = tl.maximum(first, position - window + 1)
    return first, end


@triton.jit
def softmax_kernel(
    scores,
    keys,
    allowed,
    out,
    num_rows,
    heads,
    queries,
    num_keys,
    offset,
    window,
    allowed_batch,
    allowed_query,
    scale,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Probabilities of BLOCK_R rows, each of which fits BLOCK_K."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    first, end = range_of(rows, is_row, keys, heads, queries, num_keys, offset, window, CAUSAL, HAS_WINDOW, HAS_KEYS)
    key = tl.arange(0, BLOCK_K)[None, :]
    seen = is_row[:, None] & (key >= first[:, None]) & (key < end[:, None])
    if HAS_ALLOWED:
        row_of_mask = (rows // (heads * queries)) * allowed_batch + (rows % queries) * allowed_query
        seen = seen & (tl.load(allowed + row_of_mask[:, None] + key, mask=seen, other=0) != 0)
    at = rows[:, None] * num_keys + key
    scaled = tl.load(scores + at, mask=seen, other=0.0).to(tl.float32) * scale
    scaled = tl.where(seen, scaled, float("-inf"))
    largest = tl.max(scaled, axis=1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(scaled - largest[:, None])
    total = tl.sum(weight, axis=1)
    probability = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    probability = tl.where(seen, probability, 0.0)
    tl.store(out + at, probability.to(out.dtype.element_ty), mask=is_row[:, None] & (key < num_keys))


@triton.jit
def long_softmax_kernel(
    scores,
    keys,
    allowed,
    out,
    num_rows,
    heads,
    queries,
    num_keys,
    offset,
    window,
    allowed_batch,
    allowed_query,
    scale,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Probabilities of one row, a block of keys at a time (BLOCK_R is 1)."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, BLOCK_R)
    first, end = range_of(
        row, row < num_rows, keys, heads, queries, num_keys, offset, window, CAUSAL, HAS_WINDOW, HAS_KEYS
    )
    first, end = first[:, None], end[:, None]
    row_of_mask = ((row // (heads * queries)) * allowed_batch + (row % queries) * allowed_query)[:, None]
    at = (row * num_keys)[:, None]
    key = tl.arange(0, BLOCK_K)[None, :]
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        seen = (start + key >= first) & (start + key < end)
        if HAS_ALLOWED:
            seen = seen & (tl.load(allowed + row_of_mask + start + key, mask=seen, other=0) != 0)
        scaled = tl.load(scores + at + start + key, mask=seen, other=0.0).to(tl.float32) * scale
        scaled = tl.where(seen, scaled, float("-inf"))
        new = tl.maximum(largest, tl.max(scaled, axis=1))
        # Before the first visible key both are -inf, whose difference is NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(scaled - base[:, None]), axis=1)
        largest = new
    base = tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    total = tl.where(total == 0.0, 1.0, total)[:, None]
    for start in range(0, num_keys, BLOCK_K):
        seen = (start + key >= first) & (start + key < end)
        if HAS_ALLOWED:
            seen = seen & (tl.load(allowed + row_of_mask + start + key, mask=seen, other=0) != 0)
        scaled = tl.load(scores + at + start + key, mask=seen, other=0.0).to(tl.float32) * scale
        probability = tl.where(seen, tl.exp(scaled - base) / total, 0.0)
        tl.store(out + at + start + key, probability.to(out.dtype.element_ty), mask=start + key < num_keys)


@triton.jit
def gradient_kernel(
    probability,
    d_probability,
    keys,
    d_scores,
    num_rows,
    heads,
    queries,
    num_keys,
    offset,
    window,
    scale,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Gradient of the scores of BLOCK_R rows; those that fit BLOCK_K (WHOLE) are read once, others twice."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = rows < num_rows
    first, end = range_of(rows, is_row, keys, heads, queries, num_keys, offset, window, CAUSAL, HAS_WINDOW, HAS_KEYS)
    first, end = first[:, None], end[:, None]
    key = tl.arange(0, BLOCK_K)[None, :]
    at = (rows * num_keys)[:, None]
    if WHOLE:
        seen = is_row[:, None] & (key >= first) & (key < end)
        p = tl.load(probability + at + key, mask=seen, other=0.0).to(tl.float32)
        d_p = tl.load(d_probability + at + key, mask=seen, other=0.0).to(tl.float32)
        result = scale * p * (d_p - tl.expand_dims(tl.sum(p * d_p, axis=1), 1))
        tl.store(d_scores + at + key, result.to(d_scores.dtype.element_ty), mask=is_row[:, None] & (key < num_keys))
    else:
        mean = tl.zeros((BLOCK_R,), tl.float32)
        for start in range(0, num_keys, BLOCK_K):
            seen = (start + key >= first) & (start + key < end)
            p = tl.load(probability + at + start + key, mask=seen, other=0.0).to(tl.float32)
            d_p = tl.load(d_probability + at + start + key, mask=seen, other=0.0).to(tl.float32)
            mean += tl.sum(p * d_p, axis=1)
        for start in range(0, num_keys, BLOCK_K):
            seen = (start + key >= first) & (start + key < end)
            p = tl.load(probability + at + start + key, mask=seen, other=0.0).to(tl.float32)
            d_p = tl.load(d_probability + at + start + key, mask=seen, other=0.0).to(tl.float32)
            result = scale * p * (d_p - tl.expand_dims(mean, 1))
            tl.store(d_scores + at + start + key, result.to(d_scores.dtype.element_ty), mask=start + key < num_keys)


def forward(
    scores_BHQK: torch.Tensor, scale: float, mask: KeyMask, offset: int, plan: LaunchPlan | None = None
) -> torch.Tensor:
    """Probabilities `[B, H, Q, K]` of contiguous scores, not empty; `allowed` has no gaps in its last dimension."""
    num_rows, num_keys = scores_BHQK.shape[:-1].numel(), scores_BHQK.shape[-1]
    plan = plan or launch(num_rows, num_keys)
    out_BHQK = torch.empty_like(scores_BHQK)
    allowed_BQK = mask.allowed_BQK
    # Parameters of the launch itself are none of the kernel's.
    kernel: Any = softmax_kernel if plan.tiles == 1 else long_softmax_kernel
    with torch.cuda.device_of(scores_BHQK):
        kernel[plan.grid](
            scores_BHQK,
            scores_BHQK if mask.keys_B2 is None else mask.keys_B2,
            scores_BHQK if allowed_BQK is None else allowed_BQK.view(torch.uint8),
            out_BHQK,
            num_rows,
            scores_BHQK.shape[1],
            scores_BHQK.shape[2],
            num_keys,
            offset,
            0 if mask.window is None else mask.window,
            *((0, 0) if allowed_BQK is None else (step_of(allowed_BQK, 0), step_of(allowed_BQK, 1))),
            scale,
            CAUSAL=mask.causal,
            HAS_WINDOW=mask.window is not None,
            HAS_KEYS=mask.keys_B2 is not None,
            HAS_ALLOWED=allowed_BQK is not None,
            BLOCK_R=plan.block_rows,
            BLOCK_K=plan.block,
            num_warps=plan.num_warps,
        )
    return out_BHQK


def backward(
    p_BHQK: torch.Tensor,
    d_p_BHQK: torch.Tensor,
    scale: float,
    mask: KeyMask,
    offset: int,
    plan: LaunchPlan | None = None,
) -> torch.Tensor:
    """The gradient of the scores; both tensors are contiguous and not empty. `allowed` is not needed."""
    num_rows, num_keys = p_BHQK.shape[:-1].numel(), p_BHQK.shape[-1]
    plan = plan or launch(num_rows, num_keys)
    d_scores_BHQK = torch.empty_like(p_BHQK)
    kernel: Any = gradient_kernel
    with torch.cuda.device_of(p_BHQK):
        kernel[plan.grid](
            p_BHQK,
            d_p_BHQK,
            p_BHQK if mask.keys_B2 is None else mask.keys_B2,
            d_scores_BHQK,
            num_rows,
            p_BHQK.shape[1],
            p_BHQK.shape[2],
            num_keys,
            offset,
            0 if mask.window is None else mask.window,
            scale,
            CAUSAL=mask.causal,
            HAS_WINDOW=mask.window is not None,
            HAS_KEYS=mask.keys_B2 is not None,
            BLOCK_R=plan.block_rows,
            BLOCK_K=plan.block,
            WHOLE=plan.tiles == 1,
            num_warps=plan.num_warps,
        )
    return d_scores_BHQK
