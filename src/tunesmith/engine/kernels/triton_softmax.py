"""The softmax of one row of logits in Triton, as the sampler and the training loss both compute it.

A row is read in tiles. The weights of a tile are exp((x - largest of the tile) / temperature); they are summed in
float32, and the tiles in float64, brought to the largest logit of the row. Both kernels sum in this one order, so the
log-prob of a token comes out the same in both.

Shape legend: X columns of a tile, T tiles of a row.
"""

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan, ceil_div, power_of_two

_LARGEST_BLOCK = 4096
_SMALLEST_BLOCK = 128


def launch(num_tokens: int, dtype: torch.dtype) -> LaunchPlan:
    """The plan for rows of `num_tokens` logits: a function of these two alone, as results depend on the order of sums.

    A thread holds 16 logits of a tile, two loads of 16 bytes in 16 bits, so that a row of any length fits in registers
    and a processor has several rows in flight.
    """
    block = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, power_of_two(num_tokens)))
    tiles = power_of_two(ceil_div(num_tokens, block))
    per_thread = 16 if dtype in (torch.bfloat16, torch.float16) else 8
    return LaunchPlan(block, tiles, min(16, max(1, block // (32 * per_thread))))


@triton.jit
def tanh(x):
    """tanh(x), relative error below 3e-7; near 0, where 1 - exp(-2x) would cancel, the polynomial of Cephes' tanhf."""
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    far = (1.0 - power) / (1.0 + power)
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    return tl.where(size < 0.625, p * z * x + x, tl.where(x < 0, -far, far))


@triton.jit
def logit_at(row_ptr, column, num_tokens, softcap, CAPPED: tl.constexpr):
    """The logits of columns, or of one, in float32 and after the soft-cap; -inf outside of the row."""
    is_inside = (column >= 0) & (column < num_tokens)
    x = tl.load(row_ptr + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(is_inside, softcap * tanh(x / softcap), x)
    return x


@triton.jit
def weights_of(x_X, is_inside_X, inverse_temperature):
    """(largest of a tile, weights, their exponents); the weight of -inf is 0, and of what is outside both are."""
    largest = tl.max(x_X, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    exponent_X = tl.where(is_inside_X, (x_X - base) * inverse_temperature, 0.0)
    weight_X = tl.where(is_inside_X, tl.exp(exponent_X), 0.0)
    return largest, weight_X, exponent_X


@triton.jit
def relative_to_row(largest_T, sum_T, inverse_temperature):
    """(largest of the row, exponent of each tile's largest, sums of the tiles in units of the row's largest weight)."""
    largest = tl.max(largest_T, axis=0)
    is_empty_T = largest_T == float("-inf")
    shift_T = tl.where(is_empty_T, 0.0, (tl.where(is_empty_T, largest, largest_T) - largest) * inverse_temperature)
    return largest, shift_T, sum_T.to(tl.float64) * tl.exp(shift_T).to(tl.float64)


@triton.jit
def softmax_row(
    row_ptr,
    num_tokens,
    inverse_temperature,
    softcap,
    CAPPED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(largest logit, logarithm of the sum of weights, entropy in nats, sums of the tiles in float64) of one row.

    With e the exponents and w = exp(e): H = log sum w - sum w e / sum w. Both terms are 0 or more, so a low entropy is
    not lost to cancellation. It is NaN where a logit of the row is not finite: 0 * -inf is, and so is inf - inf.
    """
    tile_T = tl.arange(0, TILES)
    largest_T = tl.full([TILES], float("-inf"), tl.float32)
    sum_T = tl.zeros([TILES], tl.float32)
    product_T = tl.zeros([TILES], tl.float32)
    for tile in range(0, tl.cdiv(num_tokens, BLOCK)):
        column_X = tile * BLOCK + tl.arange(0, BLOCK)
        x_X = logit_at(row_ptr, column_X, num_tokens, softcap, CAPPED)
        largest, weight_X, exponent_X = weights_of(x_X, column_X < num_tokens, inverse_temperature)
        is_here_T = tile_T == tile
        largest_T = tl.where(is_here_T, largest, largest_T)
        sum_T = tl.where(is_here_T, tl.sum(weight_X, axis=0), sum_T)
        product_T = tl.where(is_here_T, tl.sum(weight_X * exponent_X, axis=0), product_T)
    largest, shift_T, total_T = relative_to_row(largest_T, sum_T, inverse_temperature)
    total = tl.sum(total_T, axis=0).to(tl.float32)
    products = tl.sum((product_T + sum_T * shift_T) * tl.exp(shift_T), axis=0)
    log_total = tl.log(total)
    return largest, log_total, log_total - products / total, total_T
