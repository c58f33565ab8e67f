"""Output layer and draw in one, without logits in memory: an experiment, which nothing but the GPU benchmark calls.

`kernels/sample` reads logits that a matrix product wrote. Here a program makes a tile of logits, of 128 rows and 128
tokens, and leaves of it two numbers for each row: its largest logit and its sum of weights. A second, small kernel
finds with them the tile in which the running sum of probabilities passes the row's noise, makes that tile's logits
again, and takes the token. So the token is the sampler's, drawn with the same number of the same noise, wherever that
number is not within rounding of a limit. It is for rows without filters, bias and penalty.

What a draw saves is to write and to read the logits, once each. What it costs: tiles are multiplied by Triton, which
reaches less of the matrix rate than cuBLAS, and 128 rows of the weight are read once more for each row of the batch.

Shape legend: B rows, H hidden, V vocabulary, T tiles of the vocabulary, X tokens of a tile, K columns of a step.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tunesmith.core.errors import InputError
from tunesmith.kernels.launching import ceil_div, power_of_two
from tunesmith.kernels.triton_candidates import first_passing, uniform
from tunesmith.kernels.triton_check import Variant
from tunesmith.kernels.triton_softmax import relative_to_row

_PICK_STEP = 64
_PICK_WARPS = 8


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Rows, tokens and columns of a step of the product, tiles as a power of two, warps, and stages of its loads."""

    block_b: int
    block_x: int
    block_k: int
    tiles: int
    num_warps: int
    num_stages: int


def launch(num_tokens: int, dtype: torch.dtype) -> LaunchPlan:
    """The plan for a vocabulary of so many tokens: the same for any number of rows, and so is the order of sums."""
    if dtype in (torch.bfloat16, torch.float16):
        sizes = (128, 128, 64, 8, 3)
    else:
        sizes = (64, 128, 16, 8, 2)  # products of float32 are made without the matrix units
    block_b, block_x, block_k, num_warps, num_stages = sizes
    return LaunchPlan(block_b, block_x, block_k, power_of_two(ceil_div(num_tokens, block_x)), num_warps, num_stages)


@triton.jit
def _inverse_temperature(settings_ptr, row, mask):
    """1 / temperature; a temperature of 0 counts as 1."""
    temperature = tl.load(settings_ptr + row * 4, mask=mask, other=1.0)
    return (1.0 / tl.where(temperature == 0, 1.0, temperature)).to(tl.float32)


@triton.jit
def tile_kernel(
    hidden_ptr,
    weight_ptr,
    settings_ptr,
    largest_ptr,
    sum_ptr,
    num_rows,
    num_tokens,
    WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Largest logit and sum of weights of one tile, for each of its rows; neighbouring programs share a weight tile.

    The sum is NaN where a logit is not finite. Logits are rounded to the dtype of the states, as a linear map does.
    """
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    tile = tl.program_id(0) // num_row_blocks
    row_B = (tl.program_id(0) % num_row_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    token_X = tile * BLOCK_X + tl.arange(0, BLOCK_X)
    is_row_B, is_token_X = row_B < num_rows, token_X < num_tokens
    hidden_BK = hidden_ptr + row_B.to(tl.int64)[:, None] * WIDTH
    weight_KX = weight_ptr + token_X.to(tl.int64)[None, :] * WIDTH
    x_BX = tl.zeros([BLOCK_B, BLOCK_X], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        column_K = start + tl.arange(0, BLOCK_K)
        is_column_K = (column_K < WIDTH) | (WIDTH % BLOCK_K == 0)
        h_BK = tl.load(hidden_BK + column_K[None, :], mask=is_row_B[:, None] & is_column_K[None, :], other=0.0)
        w_KX = tl.load(weight_KX + column_K[:, None], mask=is_column_K[:, None] & is_token_X[None, :], other=0.0)
        if WIDEN:
            h_BK, w_KX = h_BK.to(tl.float32), w_KX.to(tl.float32)
        x_BX = tl.dot(h_BK, w_KX, x_BX, input_precision=PRECISION)
    x_BX = x_BX.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    inverse_B = _inverse_temperature(settings_ptr, row_B, is_row_B)
    largest_B = tl.max(tl.where(is_token_X[None, :], x_BX, float("-inf")), axis=1)
    weight_BX = tl.exp((x_BX - largest_B[:, None]) * inverse_B[:, None])
    # 0 times a number that is not finite is NaN.
    weight_BX = tl.where(is_token_X[None, :], weight_BX, 0.0) + x_BX * 0.0
    place_B = row_B.to(tl.int64) * tl.cdiv(num_tokens, BLOCK_X) + tile
    tl.store(largest_ptr + place_B, largest_B, mask=is_row_B)
    tl.store(sum_ptr + place_B, tl.sum(weight_BX, axis=1), mask=is_row_B)


@triton.jit
def _logits_of(hidden_ptr, weight_ptr, token_X, num_tokens, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Logits of these tokens for one row, rounded as in `tile_kernel`; -inf outside of the vocabulary."""
    is_token_X = token_X < num_tokens
    row_X1 = weight_ptr + token_X.to(tl.int64)[:, None] * WIDTH
    x_X = tl.zeros(token_X.shape, tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        column_K = start + tl.arange(0, BLOCK_K)
        is_column_K = (column_K < WIDTH) | (WIDTH % BLOCK_K == 0)
        h_K = tl.load(hidden_ptr + column_K, mask=is_column_K, other=0.0).to(tl.float32)
        w_XK = tl.load(row_X1 + column_K[None, :], mask=is_token_X[:, None] & is_column_K[None, :], other=0.0)
        x_X += tl.sum(w_XK.to(tl.float32) * h_K[None, :], axis=1)
    x_X = x_X.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    return tl.where(is_token_X, x_X, float("-inf"))


@triton.jit
def pick_kernel(
    hidden_ptr,
    weight_ptr,
    settings_ptr,
    integers_ptr,
    largest_ptr,
    sum_ptr,
    token_ptr,
    logp_ptr,
    status_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Token, log-prob and status of one row."""
    index = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(num_tokens, BLOCK_X)
    tile_T = tl.arange(0, TILES)
    is_tile_T = tile_T < num_tiles
    largest_T = tl.load(largest_ptr + index * num_tiles + tile_T, mask=is_tile_T, other=float("-inf"))
    sum_T = tl.load(sum_ptr + index * num_tiles + tile_T, mask=is_tile_T, other=0.0)
    inverse_temperature = _inverse_temperature(settings_ptr, index, True)
    largest, _, total_T = relative_to_row(largest_T, sum_T, inverse_temperature)
    mass = tl.sum(total_T, axis=0)
    target = uniform(integers_ptr + index * 6) * mass
    tile = tl.sum((tl.cumsum(total_T, axis=0) <= target).to(tl.int32), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(total_T > 0, tile_T, 0), axis=0))
    is_greedy = tl.load(settings_ptr + index * 4) == 0
    if is_greedy:
        tile = tl.minimum(tl.min(tl.where(largest_T == largest, tile_T, TILES), axis=0), num_tiles - 1)
    token_X = tile * BLOCK_X + tl.arange(0, BLOCK_X)
    hidden_ptr += index * WIDTH
    x_X = _logits_of(hidden_ptr, weight_ptr, token_X, num_tokens, WIDTH, BLOCK_K)
    passed = tl.sum(tl.where(tile_T < tile, total_T, 0.0), axis=0)
    # Made again by sums in another order, a logit may be a step beyond the largest.
    weight_X = tl.exp((x_X - largest) * inverse_temperature)
    token, last = first_passing(weight_X, token_X, (target - passed).to(tl.float32))
    token = tl.where(token < 0, last, token)
    if is_greedy:
        token = tl.min(tl.where(x_X == tl.max(x_X, axis=0), token_X, 2147483647), axis=0)
    token = tl.maximum(0, tl.minimum(token, num_tokens - 1))  # where a logit is not finite, none has weight
    x = tl.sum(tl.where(token_X == token, x_X, 0.0), axis=0)
    tl.store(token_ptr + index, token.to(tl.int64))
    tl.store(logp_ptr + index, (x - largest) * inverse_temperature - tl.log(mass.to(tl.float32)))
    tl.store(status_ptr + index, tl.where(mass == mass, 0, 1))


def draw(
    hidden_BH: torch.Tensor,
    weight_VH: torch.Tensor,
    settings_B4: torch.Tensor,
    integers_B6: torch.Tensor,
    plan: LaunchPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_B int64, logp_B float32, status_B int32) of softmax(hidden @ weight^T / temperature), for each row.

    `settings_B4` and `integers_B6` are those of `sample.triton_impl.Rows`; of the former the temperature alone is read,
    and 0 is greedy, with the log-prob at temperature 1. The log-prob of a row is that of its token as it is made a
    second time, by sums in another order. A status of 1: a logit is not finite. Nothing waits for the device. What has
    gaps is copied.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _check(hidden_BH, weight_VH, settings_B4, integers_B6)
    hidden_BH, weight_VH = hidden_BH.contiguous(), weight_VH.contiguous()
    settings_B4, integers_B6 = settings_B4.contiguous(), integers_B6.contiguous()
    (num_rows, width), num_tokens, device = hidden_BH.shape, len(weight_VH), hidden_BH.device
    plan = plan or launch(num_tokens, hidden_BH.dtype)
    num_tiles = ceil_div(num_tokens, plan.block_x)
    token_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    logp_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    status_B = torch.empty(num_rows, dtype=torch.int32, device=device)
    if not num_rows:
        return token_B, logp_B, status_B
    largest_BT, sum_BT = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=device).unbind()
    with torch.cuda.device_of(hidden_BH):
        kernel: Any = tile_kernel  # parameters of the launch itself are none of the kernel's
        kernel[(ceil_div(num_rows, plan.block_b) * num_tiles,)](
            *(hidden_BH, weight_VH, settings_B4, largest_BT, sum_BT),
            *(num_rows, num_tokens),
            WIDTH=width,
            WIDEN=device.type == "cpu",  # the interpreter's products of 16-bit numbers are wrong
            PRECISION="ieee",
            BLOCK_B=plan.block_b,
            BLOCK_X=plan.block_x,
            BLOCK_K=plan.block_k,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
        pick: Any = pick_kernel
        pick[(num_rows,)](
            *(hidden_BH, weight_VH, settings_B4, integers_B6, largest_BT, sum_BT, token_B, logp_B, status_B),
            num_tokens,
            WIDTH=width,
            TILES=plan.tiles,
            BLOCK_X=plan.block_x,
            BLOCK_K=_PICK_STEP,
            num_warps=_PICK_WARPS,
        )
    return token_B, logp_B, status_B


def _check(
    hidden_BH: torch.Tensor, weight_VH: torch.Tensor, settings_B4: torch.Tensor, integers_B6: torch.Tensor
) -> None:
    num_rows, width = hidden_BH.shape if hidden_BH.dim() == 2 else (-1, -1)
    allowed = (
        ("hidden", hidden_BH, (num_rows, width), (torch.bfloat16, torch.float16, torch.float32)),
        ("weight", weight_VH, (len(weight_VH), width), (hidden_BH.dtype,)),
        ("settings", settings_B4, (num_rows, 4), (torch.float64,)),
        ("integers", integers_B6, (num_rows, 6), (torch.int64,)),
    )
    for name, tensor, shape, dtypes in allowed:
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != hidden_BH.device:
            raise InputError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; give {list(shape)} of "
                f"{' or '.join(map(str, dtypes))} on {hidden_BH.device}"
            )
    if not (width and len(weight_VH)):
        raise InputError(f"weight has shape {tuple(weight_VH.shape)}; give [vocabulary, hidden], not empty")


def _variants() -> tuple[Variant, ...]:
    """Both kernels at the sizes of Qwen2.5-0.5B."""
    scratch = {"settings_ptr": "*fp64", "largest_ptr": "*fp32", "sum_ptr": "*fp32"}
    results = {"integers_ptr": "*i64", "token_ptr": "*i64", "logp_ptr": "*fp32", "status_ptr": "*i32"}
    found: list[Variant] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        plan = launch(151936, dtype)
        types = {"hidden_ptr": f"*{name}", "weight_ptr": f"*{name}", **scratch, "num_tokens": "i32"}
        sizes = {"BLOCK_B": plan.block_b, "BLOCK_X": plan.block_x, "BLOCK_K": plan.block_k}
        constants = {"WIDTH": 896, "WIDEN": False, "PRECISION": "ieee", **sizes}
        picking = {"WIDTH": 896, "TILES": plan.tiles, "BLOCK_X": plan.block_x, "BLOCK_K": _PICK_STEP}
        found += [
            Variant(
                f"tile_{name}",
                tile_kernel,
                {**types, "num_rows": "i32"},
                constants,
                plan.num_warps,
                uses_dot=True,
                num_stages=plan.num_stages,
            ),
            Variant(f"pick_{name}", pick_kernel, {**types, **results}, picking, _PICK_WARPS),
        ]
    return tuple(found)


VARIANTS = _variants()
