"""Log-prob of chosen tokens and entropy in Triton, one program for each row, and the gradient of the logits.

The forward pass reads each logit once; the backward pass reads it once and writes its gradient, over it if asked.

Shape legend: N rows, V vocabulary, X columns of a tile.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div
from tunesmith.engine.kernels.triton_softmax import launch, logit_at, softmax_row, tanh

NUM_SUMS = 3
"""Numbers that are kept of each row for the backward pass: largest logit, log of the sum of weights, entropy."""

_BACKWARD_BLOCK = 2048
BACKWARD_REGISTERS = 64
"""Left alone, the compiler spills one for the soft-cap on a V100."""


@triton.jit
def forward_kernel(
    logits_ptr,
    ids_ptr,
    logp_ptr,
    entropy_ptr,
    sums_ptr,
    num_tokens,
    stride,
    inverse_temperature,
    softcap,
    CAPPED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-prob, entropy and the sums of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    largest, log_total, entropy, _ = softmax_row(
        row_ptr, num_tokens, inverse_temperature, softcap, CAPPED, TILES, BLOCK
    )
    largest = tl.where(entropy == entropy, largest, float("nan"))
    token = tl.load(ids_ptr + row)
    is_inside = (token >= 0) & (token < num_tokens)
    x = logit_at(row_ptr, token, num_tokens, softcap, CAPPED)
    logp = (x - largest) * inverse_temperature - log_total
    tl.store(logp_ptr + row, tl.where(is_inside, logp, float("nan")))
    tl.store(entropy_ptr + row, entropy)
    tl.store(sums_ptr + 3 * row, largest)
    tl.store(sums_ptr + 3 * row + 1, log_total)
    tl.store(sums_ptr + 3 * row + 2, entropy)


@triton.jit
def backward_kernel(
    logits_ptr,
    ids_ptr,
    sums_ptr,
    d_logp_ptr,
    d_entropy_ptr,
    gradient_ptr,
    num_columns,
    stride,
    gradient_stride,
    inverse_temperature,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With z = logits / temperature and H the entropy: d logp / dz = onehot - p and d H / dz = -p (log p + H).

    The columns may be some of the row's; a token outside of them has no column here.
    """
    row = tl.program_id(0).to(tl.int64)
    column_X = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside_X = column_X < num_columns
    largest = tl.load(sums_ptr + 3 * row)
    log_total = tl.load(sums_ptr + 3 * row + 1)
    entropy = tl.load(sums_ptr + 3 * row + 2)
    d_logp = tl.load(d_logp_ptr + row).to(tl.float32)
    d_entropy = tl.load(d_entropy_ptr + row).to(tl.float32)
    x_X = tl.load(logits_ptr + row * stride + column_X, mask=is_inside_X, other=0.0).to(tl.float32)
    if CAPPED:
        tanh_X = tanh(x_X / softcap)
        x_X = softcap * tanh_X
        cap_slope_X = 1.0 - tanh_X * tanh_X
    else:
        cap_slope_X = tl.full([BLOCK], 1.0, tl.float32)
    logp_X = (x_X - largest) * inverse_temperature - log_total
    slope_X = -tl.exp(logp_X) * (d_logp + d_entropy * (logp_X + entropy))
    slope_X += tl.where(column_X == tl.load(ids_ptr + row), d_logp, 0.0)
    slope_X *= inverse_temperature * cap_slope_X
    place_X = gradient_ptr + row * gradient_stride + column_X
    tl.store(place_X, slope_X.to(gradient_ptr.dtype.element_ty), mask=is_inside_X)


def forward(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float, softcap: float, plan: LaunchPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logp_N, entropy_N, sums_N3), float32, of logits with dense rows; a `softcap` of 0 is none.

    All are NaN where a logit of the row is not finite; the log-prob is, where the id lies outside of the row.
    """
    num_rows, num_tokens = logits_NV.shape
    plan = plan or launch(num_tokens, logits_NV.dtype)
    logp_N, entropy_N, sums_N3 = (
        torch.empty(shape, dtype=torch.float32, device=logits_NV.device)
        for shape in ((num_rows,), (num_rows,), (num_rows, NUM_SUMS))
    )
    if num_rows:
        with torch.cuda.device_of(logits_NV):
            kernel: Any = forward_kernel  # parameters of the launch itself are none of the kernel's
            kernel[(num_rows,)](
                logits_NV,
                ids_N.contiguous(),
                logp_N,
                entropy_N,
                sums_N3,
                num_tokens,
                logits_NV.stride(0),
                1.0 / temperature,
                softcap,
                CAPPED=softcap != 0,
                TILES=plan.tiles,
                BLOCK=plan.block,
                num_warps=plan.num_warps,
            )
    return logp_N, entropy_N, sums_N3


def backward(
    logits_NV: torch.Tensor,
    ids_N: torch.Tensor,
    sums_N3: torch.Tensor,
    d_logp_N: torch.Tensor,
    d_entropy_N: torch.Tensor,
    temperature: float,
    softcap: float,
    out_NV: torch.Tensor,
) -> None:
    """Write the gradient of the logits to `out_NV`, which may be the logits; rows of both are dense.

    The logits may be neighbouring columns of the rows that `forward` saw, with ids counted from the first of them.
    """
    num_rows, num_columns = logits_NV.shape
    if not logits_NV.numel():
        return
    block, num_warps = backward_launch(num_columns)
    with torch.cuda.device_of(logits_NV):
        kernel: Any = backward_kernel
        kernel[(num_rows, ceil_div(num_columns, block))](
            logits_NV,
            ids_N.contiguous(),
            sums_N3.contiguous(),
            d_logp_N.contiguous(),
            d_entropy_N.contiguous(),
            out_NV,
            num_columns,
            logits_NV.stride(0),
            out_NV.stride(0),
            1.0 / temperature,
            softcap,
            CAPPED=softcap != 0,
            BLOCK=block,
            num_warps=num_warps,
            maxnreg=BACKWARD_REGISTERS,
        )


def backward_launch(num_columns: int) -> tuple[int, int]:
    """(columns of a tile, warps): a thread has 8 numbers, which is one load of 16 bytes in 16 bits."""
    block = launch(min(num_columns, _BACKWARD_BLOCK), torch.float32).block
    return block, max(1, block // 256)
