// What forward and backward of attention share.
#pragma once

#include <limits>

#include "products.hpp"

namespace tunesmith {

// Arguments of forward and backward alike.
struct Layer {
    const float *cos, *sin;               // [positions, half_rotary], or null
    const float* sinks;                   // [num_heads], or null
    int64_t num_heads, num_kv_heads, head_dim, half_rotary;
    int64_t window;                       // 0: none
    int64_t is_bfloat16;                  // else float32
    int64_t num_threads;
    double scale, softcap;                // softcap 0: none
};

constexpr int64_t kParallelWork = 500000;  // below this, threads cost more than they give
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// exp(x) for x <= 0, where a NaN stays one.
inline Floats exp_or_nan(Floats x) {
    Ints is_number = x == x;
    return where(is_number, exp_of_negative(x), x);
}

// A head turned by the angles of a position; `sign` -1 turns back. Without tables half is 0.
template <class P, class From>
__attribute__((noinline)) void rotate(const From* from, typename P::Number* to, const Layer& layer, int64_t position, float sign) {
    int64_t half = layer.half_rotary, width = layer.head_dim, i = 0;
    const float *cos = layer.cos + position * half, *sin = layer.sin + position * half;
    for (; i + kLanes <= half; i += kLanes) {
        Floats first = load(from + i), second = load(from + half + i), turn = load(sin + i) * sign;
        P::store_numbers(to + i, first * load(cos + i) - second * turn);
        P::store_numbers(to + half + i, second * load(cos + i) + first * turn);
    }
    for (; i < half; ++i) {
        float first = load_one(from + i), second = load_one(from + half + i), turn = sin[i] * sign;
        store_one(to + i, first * cos[i] - second * turn);
        store_one(to + half + i, second * cos[i] + first * turn);
    }
    for (i = 2 * half; i + kLanes <= width; i += kLanes) store(to + i, load(from + i));
    for (; i < width; ++i) store_one(to + i, load_one(from + i));
}

// Which keys one row sees, and its softmax so far.
struct RowState {
    int64_t low, high;                    // first and last position
    float largest, total;
};

// The score of a query head's sink: one key more, which has no value.
inline float sink_of(const Layer& layer, int64_t head) { return layer.sinks ? layer.sinks[head] : kNever; }

// The score of 16 keys from position `start` on; -inf where it is not seen.
inline Floats seen_score(Floats score, int64_t start, const RowState& state) {
    if (start >= state.low && start + kBlock - 1 <= state.high) return score;
    Ints hidden = (kLane < (int32_t)(state.low - start)) | (kLane > (int32_t)(state.high - start));
    return where(hidden, splat(kNever), score);
}

}  // namespace tunesmith
