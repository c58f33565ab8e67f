"""Scale, mask and softmax in Triton; keys that a row does not see are not loaded.

A row is read twice, the second time from a cache: for its largest score and the sum, and for the probabilities.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.arguments import step_of
from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div, power_of_two

_TILE = 4096
_SMALLEST_BLOCK = 16
_NUMBERS_OF_A_THREAD = 8


def launch(num_rows: int, num_keys: int) -> LaunchPlan:
    """The plan for that many rows of so many keys, at least one of each."""
    block_k = min(_TILE, max(_SMALLEST_BLOCK, power_of_two(num_keys)))
    block_r = max(1, min(_TILE // block_k, power_of_two(num_rows)))
    num_warps = max(1, block_r * block_k // (32 * _NUMBERS_OF_A_THREAD))
    return LaunchPlan(block_k, ceil_div(num_keys, block_k), num_warps, block_r, (ceil_div(num_rows, block_r),))


@triton.jit
def range_of(
    rows, num_rows, keys, heads, queries, num_keys, offset, window, CAUSAL: tl.constexpr, HAS_KEYS: tl.constexpr
):
    """(first key that each row may see, the one after its last), [R, 1]; empty for rows from `num_rows` on."""
    is_row = rows < num_rows
    position = offset + rows % queries
    first = tl.maximum(position - window + 1, 0)
    end = tl.where(is_row, num_keys, 0)
    if HAS_KEYS:
        batch = rows // (heads * queries)
        first = tl.maximum(first, tl.load(keys + 2 * batch, mask=is_row, other=0))
        end = tl.minimum(end, tl.load(keys + 2 * batch + 1, mask=is_row, other=0))
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    return first[:, None], end[:, None]


@triton.jit
def scaled_scores(scores, allowed, key, first, end, scale, HAS_ALLOWED: tl.constexpr):
    """(whether a row sees each key, its scaled score in float32, -inf if not); pointers are those of the row."""
    seen = (key >= first) & (key < end)
    if HAS_ALLOWED:
        seen = seen & (tl.load(allowed + key, mask=seen, other=0) != 0)
    scaled = tl.load(scores + key, mask=seen, other=0.0).to(tl.float32) * scale
    return seen, tl.where(seen, scaled, float("-inf"))


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
    HAS_KEYS: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Probabilities of BLOCK_R rows, BLOCK_K keys at a time."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first, end = range_of(rows, num_rows, keys, heads, queries, num_keys, offset, window, CAUSAL, HAS_KEYS)
    allowed += ((rows // (heads * queries)) * allowed_batch + (rows % queries) * allowed_query)[:, None]
    at = (rows * num_keys)[:, None]
    block = tl.arange(0, BLOCK_K)[None, :]
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        _, scaled = scaled_scores(scores + at, allowed, start + block, first, end, scale, HAS_ALLOWED)
        new = tl.maximum(largest, tl.max(scaled, axis=1))
        # Before the first visible key both are -inf, whose difference is NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(scaled - base[:, None]), axis=1)
        largest = new
    base = tl.where(largest == float("-inf"), 0.0, largest)[:, None]
    total = tl.where(total == 0.0, 1.0, total)[:, None]
    for start in range(0, num_keys, BLOCK_K):
        key = start + block
        seen, scaled = scaled_scores(scores + at, allowed, key, first, end, scale, HAS_ALLOWED)
        probability = tl.where(seen, tl.exp(scaled - base) / total, 0.0)
        is_inside = (rows < num_rows)[:, None] & (key < num_keys)
        tl.store(out + at + key, probability.to(out.dtype.element_ty), mask=is_inside)


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
    HAS_KEYS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradient of the scores of BLOCK_R rows, BLOCK_K keys at a time."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first, end = range_of(rows, num_rows, keys, heads, queries, num_keys, offset, window, CAUSAL, HAS_KEYS)
    at = (rows * num_keys)[:, None]
    block = tl.arange(0, BLOCK_K)[None, :]
    mean = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        seen = (start + block >= first) & (start + block < end)
        p = tl.load(probability + at + start + block, mask=seen, other=0.0).to(tl.float32)
        d_p = tl.load(d_probability + at + start + block, mask=seen, other=0.0).to(tl.float32)
        mean += tl.sum(p * d_p, axis=1)
    for start in range(0, num_keys, BLOCK_K):
        key = start + block
        seen = (key >= first) & (key < end)
        p = tl.load(probability + at + key, mask=seen, other=0.0).to(tl.float32)
        d_p = tl.load(d_probability + at + key, mask=seen, other=0.0).to(tl.float32)
        result = scale * p * (d_p - tl.expand_dims(mean, 1))
        is_inside = (rows < num_rows)[:, None] & (key < num_keys)
        tl.store(d_scores + at + key, result.to(d_scores.dtype.element_ty), mask=is_inside)


def forward(
    scores_BHQK: torch.Tensor,
    keys_B2: torch.Tensor | None,
    allowed_BQK: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    offset: int,
    plan: LaunchPlan | None = None,
) -> torch.Tensor:
    """Probabilities `[B, H, Q, K]` of contiguous scores, not empty; `allowed` has no gaps in its last dimension."""
    num_rows, (_, heads, queries, num_keys) = scores_BHQK.shape[:-1].numel(), scores_BHQK.shape
    plan = plan or launch(num_rows, num_keys)
    out_BHQK = torch.empty_like(scores_BHQK)
    keys = scores_BHQK if keys_B2 is None else keys_B2
    allowed = scores_BHQK if allowed_BQK is None else allowed_BQK.view(torch.uint8)
    with torch.cuda.device_of(scores_BHQK):
        # Parameters of the launch itself are none of the kernel's.
        cast(Any, softmax_kernel)[plan.grid](
            *(scores_BHQK, keys, allowed, out_BHQK),
            *(num_rows, heads, queries, num_keys, offset, window),
            *((0, 0) if allowed_BQK is None else (step_of(allowed_BQK, 0), step_of(allowed_BQK, 1))),
            scale,
            CAUSAL=causal,
            HAS_KEYS=keys_B2 is not None,
            HAS_ALLOWED=allowed_BQK is not None,
            BLOCK_R=plan.block_rows,
            BLOCK_K=plan.block,
            num_warps=plan.num_warps,
        )
    return out_BHQK


def backward(
    p_BHQK: torch.Tensor,
    d_p_BHQK: torch.Tensor,
    keys_B2: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    offset: int,
    plan: LaunchPlan | None = None,
) -> torch.Tensor:
    """The gradient of the scores; both tensors are contiguous and not empty. `allowed` is not needed."""
    num_rows, (_, heads, queries, num_keys) = p_BHQK.shape[:-1].numel(), p_BHQK.shape
    plan = plan or launch(num_rows, num_keys)
    d_scores_BHQK = torch.empty_like(p_BHQK)
    with torch.cuda.device_of(p_BHQK):
        cast(Any, gradient_kernel)[plan.grid](
            *(p_BHQK, d_p_BHQK, p_BHQK if keys_B2 is None else keys_B2, d_scores_BHQK),
            *(num_rows, heads, queries, num_keys, offset, window),
            scale,
            CAUSAL=causal,
            HAS_KEYS=keys_B2 is not None,
            BLOCK_R=plan.block_rows,
            BLOCK_K=plan.block,
            num_warps=plan.num_warps,
        )
    return d_scores_BHQK
