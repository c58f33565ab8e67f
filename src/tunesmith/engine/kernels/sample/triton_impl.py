"""The sampler in Triton: one program draws the token of one row; `torch_impl.py` is the definition.

Noise and meaning are the definition's: one number for each row, and the token is the first at which the running sum of
probabilities passes it. So there is no noise for each token, and no sort either:

- A row without filters is read once for the sums of its tiles, and then the one tile in which the sum passes.
- A filter keeps what is at least some logit. Tokens that no filter can keep are left out first. The others are written,
  in the order of the vocabulary, to a scratch, over which a threshold is found by halving the range of the float's
  bits: the smallest logit above which there are fewer than k tokens, or less than p of the mass. That is exact, and
  equal logits share their fate.

Functions of the kernel pass these tuples on:
  row      (pointer to its logits, to its seen tokens, number of tokens, penalty)
  softmax  (largest logit, inverse temperature)
  scratch  (pointers to the row's buffers of logits and of tokens)
  lowest   (smallest key, smallest weight) that is kept

Shape legend: B rows, V vocabulary, S slots, X columns or candidates of a tile, T tiles of a row.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

# pyright: reportArgumentType=false, reportAssignmentType=false
# Triton makes constants of the numbers that a kernel hands to its functions.

from typing import Any, cast

import torch
import triton
import triton.language as tl

from tunesmith.engine.kernels.launching import LaunchPlan
from tunesmith.engine.kernels.triton_softmax import launch, logit_at, relative_to_row, softmax_row, weights_of

MAX_REGISTERS = 128
"""As many as 512 threads can have; left alone, the compiler spills some of the filters'."""


@triton.jit
def _uniform(integers_ptr):
    """A number in [0, 1) with 53 bits, float64: the first two words of Philox4x32-10 (Salmon et al. 2011).

    Of a row's six integers of int64, the last four are its keys: seed, prompt, sample, position.
    """
    seed = tl.load(integers_ptr + 2)
    prompt = tl.load(integers_ptr + 3).to(tl.uint32)
    sample = tl.load(integers_ptr + 4).to(tl.uint32)
    position = tl.load(integers_ptr + 5).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, prompt, sample, position, position ^ position)
    return ((first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _first_passing(weight_X, place_X, target):
    """(the first place at which the running sum passes the target, the last place with weight); -1 for none."""
    has_weight_X = weight_X > 0
    passes_X = has_weight_X & (tl.cumsum(weight_X, axis=0) > target)
    first = tl.min(tl.where(passes_X, place_X, 2147483647), axis=0)
    return tl.where(first == 2147483647, -1, first), tl.max(tl.where(has_weight_X, place_X, -1), axis=0)


@triton.jit
def _key_of(x):
    """A whole number that orders as the float does, the same for both zeros. That of -inf is -2139095041."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _candidate_weights(logit_ptr, start, count, lowest, softmax, BLOCK: tl.constexpr):
    """Weights of one tile of candidates, 0 for what has less than this key or this weight."""
    largest, inverse_temperature = softmax
    lowest_key, lowest_weight = lowest
    place_X = start + tl.arange(0, BLOCK)
    x_X = tl.load(logit_ptr + place_X, mask=place_X < count, other=float("-inf"))
    weight_X = tl.exp((x_X - largest) * inverse_temperature)
    return tl.where((_key_of(x_X) >= lowest_key) & (weight_X >= lowest_weight), weight_X, 0.0)


@triton.jit
def _mass_of(logit_ptr, count, lowest, softmax, BLOCK: tl.constexpr):
    """Sum of the weights of the candidates with at least this key and this weight, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        weight_X = _candidate_weights(logit_ptr, start, count, lowest, softmax, BLOCK)
        mass += tl.sum(weight_X, axis=0).to(tl.float64)
    return mass


@triton.jit
def _around(logit_ptr, count, middle, softmax, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """(number or mass of the candidates above a key, float64; the smallest key above it, the largest that is not)."""
    largest, inverse_temperature = softmax
    above = tl.full([], 0.0, tl.float64)
    next_up = tl.full([], 2147483647, tl.int32)
    next_down = tl.full([], -2147483648, tl.int32)
    for start in range(0, count, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        is_inside_X = place_X < count
        x_X = tl.load(logit_ptr + place_X, mask=is_inside_X, other=float("-inf"))
        key_X = _key_of(x_X)
        is_above_X = is_inside_X & (key_X > middle)
        if WEIGHED:
            measure_X = tl.where(is_above_X, tl.exp((x_X - largest) * inverse_temperature), 0.0)
        else:
            measure_X = is_above_X.to(tl.float32)
        above += tl.sum(measure_X, axis=0).to(tl.float64)
        next_up = tl.minimum(next_up, tl.min(tl.where(is_above_X, key_X, 2147483647), axis=0))
        next_down = tl.maximum(next_down, tl.max(tl.where(key_X > middle, -2147483648, key_X), axis=0))
    return above, next_up, next_down


@triton.jit
def _threshold(logit_ptr, count, low, target, softmax, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key, from `low` on, above which the candidates are fewer, or weigh less, than the target.

    Both ends of the range are moved to the next candidate: so it shrinks with their number too, and ends at one of
    them.
    """
    high = _key_of(softmax[0])
    while low < high:
        # Their sum would not fit in 32 bits.
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        above, next_up, next_down = _around(logit_ptr, count, middle, softmax, WEIGHED, BLOCK)
        is_less = above < target
        high = tl.where(is_less, tl.maximum(next_down, low), high)
        low = tl.where(is_less, low, next_up)
    return low


@triton.jit
def _logit(row, column, PENALISED: tl.constexpr):
    """The logits of columns, or of one, after bias and penalty; -inf outside. Keskar et al., CTRL (2019)."""
    logits_ptr, seen_ptr, num_tokens, penalty = row
    x = logit_at(logits_ptr, column, num_tokens, 0.0, False)
    if PENALISED:
        seen = tl.load(seen_ptr + column, mask=column < num_tokens, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * penalty, x / penalty), x)
    return x


@triton.jit
def _sums(row, inverse_temperature, PENALISED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """(largest of the row, sums of its tiles, float64); a logit may be -inf here, which forbids its token."""
    num_tokens = row[2]
    tile_T = tl.arange(0, TILES)
    largest_T = tl.full([TILES], float("-inf"), tl.float32)
    sum_T = tl.zeros([TILES], tl.float32)
    for tile in range(0, tl.cdiv(num_tokens, BLOCK)):
        column_X = tile * BLOCK + tl.arange(0, BLOCK)
        x_X = _logit(row, column_X, PENALISED)
        largest, weight_X, _ = weights_of(x_X, column_X < num_tokens, inverse_temperature)
        largest_T = tl.where(tile_T == tile, largest, largest_T)
        sum_T = tl.where(tile_T == tile, tl.sum(weight_X, axis=0), sum_T)
    largest, _, total_T = relative_to_row(largest_T, sum_T, inverse_temperature)
    return largest, total_T


@triton.jit
def _pick(row, softmax, total_T, noise, PENALISED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The token that the noise falls on: the tile from the sums of all, then a running sum within it, by steps."""
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK
    largest, inverse_temperature = softmax
    tile_T = tl.arange(0, TILES)
    target = noise * tl.sum(total_T, axis=0)
    tile = tl.sum((tl.cumsum(total_T, axis=0) <= target).to(tl.int32), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(total_T > 0, tile_T, 0), axis=0))
    passed = tl.sum(tl.where(tile_T < tile, total_T, 0.0), axis=0)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for step in range(0, BLOCK, STEP):
        column_X = tile * BLOCK + step + tl.arange(0, STEP)
        weight_X = tl.exp((_logit(row, column_X, PENALISED) - largest) * inverse_temperature)
        first_here, last_here = _first_passing(weight_X, column_X, (target - passed).to(tl.float32))
        token = tl.where(token < 0, first_here, token)
        last = tl.maximum(last, last_here)
        passed += tl.sum(weight_X, axis=0).to(tl.float64)
    # A sum in another order may fall short of the target by rounding: then the last with weight.
    return tl.where(token < 0, last, token)


@triton.jit
def _first_largest(row, largest, PENALISED: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id of the largest logit."""
    num_tokens = row[2]
    found = tl.full([], 2147483647, tl.int32)
    for tile in range(0, tl.cdiv(num_tokens, BLOCK)):
        column_X = tile * BLOCK + tl.arange(0, BLOCK)
        x_X = _logit(row, column_X, PENALISED)
        found = tl.minimum(found, tl.min(tl.where(x_X == largest, column_X, 2147483647), axis=0))
    return tl.minimum(found, num_tokens - 1)


@triton.jit
def _bound_of_top_k(row, softmax, top_k, scratch, PENALISED: tl.constexpr, BLOCK: tl.constexpr):
    """A key that the k-th largest logit reaches: that of the k-th largest among the maxima of columns over the tiles.

    Each is a token of its own. Where there are fewer columns than k, it is the key of -inf.
    """
    best_X = tl.full([BLOCK], float("-inf"), tl.float32)
    for tile in range(0, tl.cdiv(row[2], BLOCK)):
        best_X = tl.maximum(best_X, _logit(row, tile * BLOCK + tl.arange(0, BLOCK), PENALISED))
    tl.store(scratch[0] + tl.arange(0, BLOCK), best_X)
    tl.debug_barrier()  # from here on threads read what others wrote
    lowest = tl.full([], -2139095041, tl.int32)
    key = _threshold(scratch[0], BLOCK, lowest, top_k.to(tl.float64), softmax, False, BLOCK)
    tl.debug_barrier()  # and all have read before the scratch is written anew
    return key


@triton.jit
def _gather(row, softmax, lowest, scratch, PENALISED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the candidates, what has at least this key and this weight, to the scratch, in order; their number."""
    num_tokens = row[2]
    largest, inverse_temperature = softmax
    lowest_key, lowest_weight = lowest
    count = tl.full([], 0, tl.int32)
    for tile in range(0, tl.cdiv(num_tokens, BLOCK)):
        column_X = tile * BLOCK + tl.arange(0, BLOCK)
        x_X = _logit(row, column_X, PENALISED)
        weight_X = tl.exp((x_X - largest) * inverse_temperature)
        is_kept_X = (column_X < num_tokens) & (_key_of(x_X) >= lowest_key) & (weight_X >= lowest_weight)
        place_X = count + tl.cumsum(is_kept_X.to(tl.int32), axis=0) - 1
        tl.store(scratch[0] + place_X, x_X, mask=is_kept_X)
        tl.store(scratch[1] + place_X, column_X, mask=is_kept_X)
        count += tl.sum(is_kept_X.to(tl.int32), axis=0)
    tl.debug_barrier()  # from here on threads read what others wrote
    return count


@triton.jit
def _pick_filtered(row, filters, softmax, total, noise, scratch, PENALISED: tl.constexpr, BLOCK: tl.constexpr):
    """(token, mass of what is kept) after top-k, then top-p, then min-p."""
    top_k, top_p, min_p = filters
    # What weighs less has together less than 1 - p of the mass; a hundredth is a margin for rounding. It counts in the
    # mass that top-k leaves.
    bound = tl.where(top_p < 1, 0.99 * (1 - top_p) * total / row[2], 0.0).to(tl.float32)
    bound = tl.where(top_k > 0, 0.0, tl.maximum(bound, min_p))
    low = tl.full([], -2139095041, tl.int32)
    if top_k > 0:
        low = _bound_of_top_k(row, softmax, top_k, scratch, PENALISED, BLOCK)
    count = _gather(row, softmax, (low, bound), scratch, PENALISED, BLOCK)
    if top_k > 0:
        low = _threshold(scratch[0], count, low, top_k.to(tl.float64), softmax, False, BLOCK)
        total = _mass_of(scratch[0], count, (low, 0.0), softmax, BLOCK)
    if top_p < 1:
        low = _threshold(scratch[0], count, low, top_p * total, softmax, True, BLOCK)
    mass = _mass_of(scratch[0], count, (low, min_p), softmax, BLOCK)
    target = noise * mass
    passed = tl.full([], 0.0, tl.float64)
    place = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        weight_X = _candidate_weights(scratch[0], start, count, (low, min_p), softmax, BLOCK)
        first_here, last_here = _first_passing(weight_X, start + tl.arange(0, BLOCK), (target - passed).to(tl.float32))
        place = tl.where(place < 0, first_here, place)
        last = tl.maximum(last, last_here)
        passed += tl.sum(weight_X, axis=0).to(tl.float64)
    place = tl.where(place < 0, last, place)
    return tl.load(scratch[1] + place, mask=place < count, other=0), mass


@triton.jit
def sample_kernel(
    logits_ptr,
    changed_ptr,
    seen_ptr,
    settings_ptr,
    integers_ptr,
    candidate_logit_ptr,
    candidate_token_ptr,
    token_ptr,
    scores_ptr,
    status_ptr,
    num_tokens,
    stride,
    changed_stride,
    seen_stride,
    scratch_stride,
    CHANGED: tl.constexpr,
    PENALISED: tl.constexpr,
    FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the token of one row."""
    STEP: tl.constexpr = 1024 if BLOCK > 1024 else BLOCK  # fewer registers; the sums must be those of the loss
    index = tl.program_id(0).to(tl.int64)
    logits_ptr += index * stride
    settings_ptr += index * 4
    integers_ptr += index * 6
    temperature = tl.load(settings_ptr)
    inverse_temperature = (1.0 / tl.where(temperature == 0, 1.0, temperature)).to(tl.float32)
    raw_largest, raw_log_total, entropy, total_T = softmax_row(
        logits_ptr, num_tokens, inverse_temperature, 0.0, False, TILES, BLOCK
    )
    largest = raw_largest
    row = (logits_ptr, seen_ptr, num_tokens, tl.load(settings_ptr + 3).to(tl.float32))
    if CHANGED:
        row = (changed_ptr + index * changed_stride, row[1], num_tokens, row[3])
    if PENALISED:
        row = (row[0], seen_ptr + tl.load(integers_ptr + 1) * seen_stride, num_tokens, row[3])
    if CHANGED or PENALISED:
        largest, total_T = _sums(row, inverse_temperature, PENALISED, TILES, BLOCK)
    softmax = (largest, inverse_temperature)
    noise, mass = _uniform(integers_ptr), tl.sum(total_T, axis=0)
    token = _pick(row, softmax, total_T, noise, PENALISED, TILES, BLOCK)
    if FILTERS:
        top_k = tl.load(integers_ptr).to(tl.int32)
        top_p = tl.load(settings_ptr + 1)
        min_p = tl.load(settings_ptr + 2).to(tl.float32)
        if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
            scratch = (candidate_logit_ptr + index * scratch_stride, candidate_token_ptr + index * scratch_stride)
            token, mass = _pick_filtered(row, (top_k, top_p, min_p), softmax, mass, noise, scratch, PENALISED, STEP)
    if temperature == 0:
        token = _first_largest(row, largest, PENALISED, STEP)
    logp = (_logit(row, token, PENALISED) - largest) * inverse_temperature - tl.log(mass.to(tl.float32))
    raw_x = logit_at(logits_ptr, token, num_tokens, 0.0, False)
    tl.store(token_ptr + index, token.to(tl.int64))
    tl.store(scores_ptr + index * 2, logp)
    tl.store(scores_ptr + index * 2 + 1, (raw_x - raw_largest) * inverse_temperature - raw_log_total)
    status = tl.where(largest == float("-inf"), 2, tl.where(largest == float("inf"), 3, 0))
    tl.store(status_ptr + index, tl.where(entropy == entropy, status, 1))


def draw(
    logits_BV: torch.Tensor,
    settings_B4: torch.Tensor,
    integers_B6: torch.Tensor,
    changed_BV: torch.Tensor | None,
    seen_SV: torch.Tensor | None,
    filters: bool,
    plan: LaunchPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_B int64, scores_B2 float32, status_B int32) as `api.draw_in_triton`; rows of all arguments are dense."""
    (num_rows, num_tokens), device = logits_BV.shape, logits_BV.device
    plan = plan or launch(num_tokens, logits_BV.dtype)
    token_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    scores_B2 = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
    status_B = torch.empty(num_rows, dtype=torch.int32, device=device)
    scratch = (num_rows, max(num_tokens, plan.block)) if filters else (1, 1)
    changed = logits_BV if changed_BV is None else changed_BV
    seen = status_B[None] if seen_SV is None else seen_SV.view(torch.uint8)
    if num_rows:
        with torch.cuda.device_of(logits_BV):
            # Parameters of the launch itself are none of the kernel's.
            cast(Any, sample_kernel)[(num_rows,)](
                *(logits_BV, changed, seen, settings_B4, integers_B6),
                torch.empty(scratch, dtype=torch.float32, device=device),
                torch.empty(scratch, dtype=torch.int32, device=device),
                *(token_B, scores_B2, status_B),
                *(num_tokens, logits_BV.stride(0), changed.stride(0), seen.stride(0), scratch[1]),
                CHANGED=changed_BV is not None,
                PENALISED=seen_SV is not None,
                FILTERS=filters,
                TILES=plan.tiles,
                BLOCK=plan.block,
                num_warps=plan.num_warps,
                maxnreg=MAX_REGISTERS,
            )
    return token_B, scores_B2, status_B
