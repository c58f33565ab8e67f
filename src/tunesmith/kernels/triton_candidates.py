"""A draw in Triton: its noise, which candidates a filter keeps, found without a sort, and which one the noise falls on.

Candidates are logits in float32, in the order of the vocabulary, in a scratch that one program wrote and reads. A
filter keeps those from a threshold on. It is found by halving the range of keys, whole numbers that order as floats do:
so it is exact, and equal logits share their fate.

These tuples are passed on:
  softmax  (largest logit, inverse temperature)
  lowest   (smallest key, smallest weight) that is kept

Shape legend: X candidates of a tile.
"""

# In Triton 3.7 a call of one kernel function by another has no type that can be unpacked.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def uniform(integers_ptr):
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
def first_passing(weight_X, place_X, target):
    """(the first place at which the running sum passes the target, the last place with weight); -1 for none."""
    has_weight_X = weight_X > 0
    passes_X = has_weight_X & (tl.cumsum(weight_X, axis=0) > target)
    first = tl.min(tl.where(passes_X, place_X, 2147483647), axis=0)
    return tl.where(first == 2147483647, -1, first), tl.max(tl.where(has_weight_X, place_X, -1), axis=0)


@triton.jit
def key_of(x):
    """A whole number that orders as the float does, the same for both zeros. That of -inf is -2139095041."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def candidate_weights(logit_ptr, start, count, lowest, softmax, BLOCK: tl.constexpr):
    """Weights of one tile of candidates, 0 for what has less than this key or this weight."""
    largest, inverse_temperature = softmax
    lowest_key, lowest_weight = lowest
    place_X = start + tl.arange(0, BLOCK)
    x_X = tl.load(logit_ptr + place_X, mask=place_X < count, other=float("-inf"))
    weight_X = tl.exp((x_X - largest) * inverse_temperature)
    return tl.where((key_of(x_X) >= lowest_key) & (weight_X >= lowest_weight), weight_X, 0.0)


@triton.jit
def mass_of(logit_ptr, count, lowest, softmax, BLOCK: tl.constexpr):
    """Sum of the weights of the candidates with at least this key and this weight, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        weight_X = candidate_weights(logit_ptr, start, count, lowest, softmax, BLOCK)
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
        key_X = key_of(x_X)
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
def threshold(logit_ptr, count, low, target, softmax, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key, from `low` on, above which the candidates are fewer, or weigh less, than the target.

    Both ends of the range are moved to the next candidate: so it shrinks with their number too, and ends at one of
    them.
    """
    high = key_of(softmax[0])
    while low < high:
        # Their sum would not fit in 32 bits.
        middle = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        above, next_up, next_down = _around(logit_ptr, count, middle, softmax, WEIGHED, BLOCK)
        is_less = above < target
        high = tl.where(is_less, tl.maximum(next_down, low), high)
        low = tl.where(is_less, low, next_up)
    return low
