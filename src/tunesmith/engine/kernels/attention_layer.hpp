// What forward and backward of attention share: small matrix products in blocks of 16 numbers, with weights of 4 bytes
// a step, rotary positions, and which keys a row sees.
//
// A sum runs along one chain, step by step, whatever rows and columns are computed beside it, so no grouping changes
// its bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "vector.hpp"

namespace tunesmith {

constexpr int kBlock = 16;          // rows of a block
static_assert(kBlock == kLanes);

#ifdef __AVX512F__
constexpr int kAccumulators = 24;   // of 32 registers
#else
constexpr int kAccumulators = 6;
#endif

// How products are made. `Number` is what a block holds, and a step takes `kPerStep` numbers of each row at once.
//
// A block of 16 rows of `width` numbers is laid out in one of two ways. Crosswise, [width / kPerStep][16][kPerStep], for
// products with each of its rows. Lengthwise, [16 / kPerStep][width][kPerStep], for weighted sums of its rows.

// One number a step, in float32.
template <class T> struct Single {
    typedef T Number;
    typedef float Step;
    static constexpr int kPerStep = 1;
    static Floats multiply_add(Floats sum, Step row, const Number* at) { return fused(splat(row), load(at), sum); }
    static void store_steps(float* to, const Number* from, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = load_one(from + i);
    }
    static void store_steps(float* to, Floats weights) { store(to, weights); }
    static void store_numbers(Number* to, Floats values) { store(to, values); }
    static void put_lengthwise(Number* block, int64_t row, const Number* from, int64_t width) {
        std::copy(from, from + width, block + row * width);
    }
    // Two neighbouring rows of weights, `stride` apart, as steps that take both.
    static void pair_rows(float*, int64_t, int64_t) {}
};

#ifdef __AVX512BF16__
// Two numbers a step, added in float32 by one instruction. The width is a multiple of 16.
struct Pairs {
    typedef uint16_t Number;
    typedef uint32_t Step;
    static constexpr int kPerStep = 2;
    static Floats multiply_add(Floats sum, Step row, const Number* at) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)row),
                                        (__m512bh)_mm512_loadu_si512(at));
    }
    static void store_steps(float* to, const Number* from, int64_t count) { std::memcpy(to, from, count * 2); }
    static void store_steps(float* to, Floats weights) { store_numbers((Number*)to, weights); }
    static void store_numbers(Number* to, Floats values) {
        __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
        std::memcpy(to, &halves, sizeof halves);
    }
    static __m512i widened(const Number* from) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    }
    // The other row of the pair stays as it is: another thread may be writing it.
    static void put_lengthwise(Number* block, int64_t row, const Number* from, int64_t width) {
        Number* to = block + row / 2 * 2 * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            __m512i wide = widened(from + i);
            if (row % 2)
                _mm512_mask_storeu_epi16(to + 2 * i, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
            else
                _mm512_mask_storeu_epi16(to + 2 * i, 0x55555555, wide);
        }
    }
    // In place, from the end, because the result is twice as wide as what it is made of.
    static void pair_rows(float* rows, int64_t stride, int64_t count) {
        const Number *first = (const Number*)rows, *second = (const Number*)(rows + stride);
        for (int64_t i = count - kLanes; i >= 0; i -= kLanes) {
            __m512i pairs = _mm512_or_si512(widened(first + i), _mm512_slli_epi32(widened(second + i), 16));
            _mm512_storeu_si512(rows + i, pairs);
        }
    }
};
#endif

template <class P>
void put_crosswise(typename P::Number* block, int64_t row, const typename P::Number* from, int64_t width) {
    for (int64_t i = 0; i < width; i += P::kPerStep)
        std::copy(from + i, from + i + P::kPerStep, block + i * kBlock + row * P::kPerStep);
}

template <class P> typename P::Step step_at(const float* steps, int64_t index) {
    typename P::Step step;
    std::memcpy(&step, steps + index, sizeof step);
    return step;
}

// Blocks, one pointer each. Memory at `ahead`, if not null, is prefetched into the cache meanwhile.
template <class P> struct Blocks {
    const typename P::Number* const* at;
    const typename P::Number* const* ahead;
    int64_t count;
    Blocks from(int64_t block) const { return {at + block, ahead ? ahead + block : nullptr, count - block}; }
};

// Rows of 4-byte steps or floats.
template <class Float> struct RowsOf {
    Float* data;
    int64_t stride;
    RowsOf from(int64_t row) const { return {data + row * stride, stride}; }
};
typedef RowsOf<const float> ConstRows;
typedef RowsOf<float> Rows;

// Products of R rows with the 16 rows of each of B crosswise blocks: out[row][block * 16 + other row].
template <class P, int R, int B> void multiply_some(ConstRows rows, int64_t width, Blocks<P> blocks, Rows out) {
    Floats sum[R][B] = {};
    for (int64_t step = 0; step < width / P::kPerStep; ++step) {
        int64_t at = step * kBlock * P::kPerStep;
        if (blocks.ahead)
            for (int b = 0; b < B; ++b) __builtin_prefetch(blocks.ahead[b] + at);
        for (int b = 0; b < B; ++b)
            for (int r = 0; r < R; ++r)
                sum[r][b] = P::multiply_add(sum[r][b], step_at<P>(rows.data + r * rows.stride, step), blocks.at[b] + at);
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) store(out.data + r * out.stride + b * kBlock, sum[r][b]);
}

template <class P, int R, int B> void multiply_blocks(ConstRows rows, int64_t width, Blocks<P> blocks, Rows out) {
    int64_t block = 0;
    for (; block + B <= blocks.count; block += B)
        multiply_some<P, R, B>(rows, width, blocks.from(block), {out.data + block * kBlock, out.stride});
    if constexpr (B > 1)
        multiply_blocks<P, R, B / 2>(rows, width, blocks.from(block), {out.data + block * kBlock, out.stride});
}

// Calls `work` with a constant number of rows, 6 or fewer, and the first of them, until all are done.
template <class Work> void in_groups(int64_t num_rows, Work work) {
    int64_t row = 0;
    for (; row + 6 <= num_rows; row += 6) work(std::integral_constant<int, 6>(), row);
    if (row + 4 <= num_rows) work(std::integral_constant<int, 4>(), row), row += 4;
    if (row + 3 == num_rows) work(std::integral_constant<int, 3>(), row);
    if (row + 2 == num_rows) work(std::integral_constant<int, 2>(), row);
    if (row + 1 == num_rows) work(std::integral_constant<int, 1>(), row);
}

// Products of all rows with all rows of crosswise blocks.
template <class P> void multiply(ConstRows rows, int64_t num_rows, int64_t width, Blocks<P> blocks, Rows out) {
    in_groups(num_rows, [&](auto count, int64_t row) {
        constexpr int R = decltype(count)::value;
        Blocks<P> some = {blocks.at, row ? nullptr : blocks.ahead, blocks.count};
        multiply_blocks<P, R, std::clamp(kAccumulators / R, 1, 8)>(rows.from(row), width, some, out.from(row));
    });
}

// The weights of row r are the steps at `data + r * row_stride`, `step_stride` apart.
struct Weights {
    const float* data;
    int64_t row_stride, step_stride;
    const float* factors;                 // of the sums so far, one for each row; null: 1
    Weights from(int64_t row) const {
        return {data + row * row_stride, row_stride, step_stride, factors ? factors + row : nullptr};
    }
    float factor(int64_t row) const { return factors ? factors[row] : 1.0f; }
};

// Adds to N vectors of R rows of sums, from `column` on, the weighted sum of the rows of lengthwise blocks.
template <class P, int R, int N> void add_some(Weights weights, Blocks<P> blocks, int64_t width, int64_t column, Rows sums) {
    Floats sum[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n)
            sum[r][n] = load(sums.data + r * sums.stride + column + n * kLanes) * weights.factor(r);
    constexpr int kSteps = kBlock / P::kPerStep;
    const float* steps = weights.data;
    for (int64_t block = 0; block < blocks.count; ++block)
        for (int64_t step = 0; step < kSteps; ++step, steps += weights.step_stride) {
            int64_t at = (step * width + column) * P::kPerStep;
            if (blocks.ahead)
                for (int n = 0; n < N; ++n) __builtin_prefetch(blocks.ahead[block] + at + n * kLanes * P::kPerStep);
            for (int r = 0; r < R; ++r) {
                typename P::Step weight = step_at<P>(steps, r * weights.row_stride);
                for (int n = 0; n < N; ++n)
                    sum[r][n] = P::multiply_add(sum[r][n], weight, blocks.at[block] + at + n * kLanes * P::kPerStep);
            }
        }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(sums.data + r * sums.stride + column + n * kLanes, sum[r][n]);
}

// The columns of one row behind its last whole vector, for widths that are no multiple of 16.
template <class P> void add_last(Weights weights, Blocks<P> blocks, int64_t width, int64_t column, float* sums) {
    for (; column < width; ++column) {
        float sum = sums[column] * weights.factor(0);
        for (int64_t row = 0; row < blocks.count * kBlock; ++row)
            sum += weights.data[row * weights.step_stride] * load_one(blocks.at[row / kBlock] + row % kBlock * width + column);
        sums[column] = sum;
    }
}

// Adds to all rows of sums. A row of sums has space for whole vectors.
template <class P> void add_weighted(Weights weights, int64_t num_rows, Blocks<P> blocks, int64_t width, Rows sums) {
    in_groups(num_rows, [&](auto count, int64_t row) {
        constexpr int R = decltype(count)::value;
        constexpr int N = std::clamp(kAccumulators / R, 1, 4);
        Blocks<P> some = {blocks.at, row ? nullptr : blocks.ahead, blocks.count};
        int64_t column = 0;
        for (; column + N * kLanes <= width; column += N * kLanes)
            add_some<P, R, N>(weights.from(row), some, width, column, sums.from(row));
        if constexpr (N > 1)
            for (; column + kLanes <= width; column += kLanes)
                add_some<P, R, 1>(weights.from(row), some, width, column, sums.from(row));
        if constexpr (P::kPerStep == 1)
            for (int r = 0; r < R && column < width; ++r)
                add_last<P>(weights.from(row + r), some, width, column, sums.from(row + r).data);
    });
}

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
