// Scale, mask by indices and softmax of the rows of attention scores, and the gradient; torch_impl.py is the definition.
// A row is read and written once: keys that it does not see are not read, and their probabilities are set to 0. It is
// summed in an order that depends on the keys that it sees alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr int64_t kThreadedWork = 16384;  // scores from which on a second thread is worth its start
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of [batch, heads, queries]; key j is seen by query i if it lies in the range of `keys`, if j <= offset + i where
// `causal`, and if j > offset + i - window. `allowed` [batch, queries, keys] may have strides of 0.
struct Rows {
    int64_t num_rows, heads, queries, num_keys, offset, causal, window;
    const int64_t* keys;
    const uint8_t* allowed;
    int64_t allowed_batch, allowed_query;
};

struct Range {
    int64_t first, end;
};

inline Range range_of(const Rows& rows, int64_t row) {
    int64_t batch = row / (rows.heads * rows.queries), position = rows.offset + row % rows.queries;
    Range range{0, rows.num_keys};
    if (rows.keys) {
        range.first = std::max(range.first, rows.keys[2 * batch]);
        range.end = std::min(range.end, rows.keys[2 * batch + 1]);
    }
    if (rows.causal) range.end = std::min(range.end, position + 1);
    range.first = std::min(std::max(range.first, position - rows.window + 1), rows.num_keys);
    range.end = std::max(range.end, range.first);
    return range;
}

typedef Vector<uint8_t, kLanes> Bytes;

// The values where `allowed` is not 0, and `fill` elsewhere.
inline TUNESMITH_INLINE Floats where_allowed(Floats values, const uint8_t* allowed, int count, float fill) {
    uint8_t lane[kLanes] = {};
    std::memcpy(lane, allowed, count);
    return where(converted<Ints>(Memory<Bytes>::load(lane)) != 0, values, splat(fill));
}

// Lanes from `count` on are set to -inf, whose weight is 0.
inline TUNESMITH_INLINE Floats padded(Floats values, int count) {
    return where(kLane < count, values, splat(-kInfinity));
}

// Writes the scaled scores of n keys to `work`, -inf where `allowed` forbids and up to a whole vector. The largest of
// them; NaN if one is NaN.
template <class T>
float scaled_scores(const T* scores, const uint8_t* allowed, float scale, float* work, int64_t n) {
    Floats largest = splat(-kInfinity);
    Ints is_nan = {};
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats values = load(scores + i, count) * scale;
        if (allowed) values = where_allowed(values, allowed + i, count, -kInfinity);
        if (count < kLanes) values = padded(values, count);
        store(work + i, values);
        is_nan |= values != values;
        largest = larger(values, largest);
    });
    Ints none = {};
    return std::memcmp(&is_nan, &none, sizeof none) ? std::numeric_limits<float>::quiet_NaN() : largest_of_lanes(largest);
}

template <class T>
void softmax_row(const T* scores, const uint8_t* allowed, float scale, float* work, T* out, int64_t n) {
    float largest = scaled_scores(scores, allowed, scale, work, n);
    if (largest == -kInfinity) {
        std::fill(out, out + n, T(0));
        return;
    }
    Floats sum = {}, top = splat(largest);
    for (int64_t i = 0; i < n; i += kLanes) {
        Floats weights = exp_of_negative(load(work + i) - top);
        store(work + i, weights);
        sum += weights;
    }
    // A row with NaN or +inf has no probabilities.
    float inverse = largest < kInfinity ? 1.0f / sum_of_lanes(sum) : std::numeric_limits<float>::quiet_NaN();
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats values = load(work + i) * inverse;
        if (allowed) values = where_allowed(values, allowed + i, count, 0.0f);
        store(out + i, values, count);
    });
}

template <class T>
void softmax_rows(const T* scores, T* out, const Rows& rows, float scale, int num_threads) {
    int64_t n = rows.num_keys;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && rows.num_rows * n > kThreadedWork)
    {
        std::vector<float> work(n + kLanes);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows.num_rows; ++row) {
            Range range = range_of(rows, row);
            T* to = out + row * n;
            const uint8_t* allowed = nullptr;
            if (rows.allowed)
                allowed = rows.allowed + row / (rows.heads * rows.queries) * rows.allowed_batch +
                          row % rows.queries * rows.allowed_query + range.first;
            std::fill(to, to + range.first, T(0));
            softmax_row(scores + row * n + range.first, allowed, scale, work.data(), to + range.first,
                        range.end - range.first);
            std::fill(to + range.end, to + n, T(0));
        }
    }
}

template <class T>
void gradient_row(const T* p, const T* d_p, float scale, T* d_scores, int64_t n) {
    Floats products = {};
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE { products += load(p + i, count) * load(d_p + i, count); });
    float mean = sum_of_lanes(products);
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats result = load(p + i, count) * (load(d_p + i, count) - mean) * scale;
        store(d_scores + i, result, count);
    });
}

template <class T>
void gradient_rows(const T* p, const T* d_p, T* d_scores, const Rows& rows, float scale, int num_threads) {
    int64_t n = rows.num_keys;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && rows.num_rows * n > kThreadedWork)
    for (int64_t row = 0; row < rows.num_rows; ++row) {
        Range range = range_of(rows, row);
        T* to = d_scores + row * n;
        int64_t at = row * n + range.first;
        std::fill(to, to + range.first, T(0));
        gradient_row(p + at, d_p + at, scale, d_scores + at, range.end - range.first);
        std::fill(to + range.end, to + n, T(0));
    }
}

}  // namespace

// scores and out are [num_rows, num_keys] without gaps and may be the same; keys [batch, 2] and allowed may be null.
extern "C" void masked_softmax(const void* scores, const int64_t* keys, const uint8_t* allowed, void* out,
                               int64_t num_rows, int64_t heads, int64_t queries, int64_t num_keys, int64_t offset,
                               int64_t causal, int64_t window, int64_t allowed_batch, int64_t allowed_query, float scale,
                               int64_t is_bfloat16, int64_t num_threads) {
    Rows rows{num_rows, heads, queries, num_keys, offset, causal, window, keys, allowed, allowed_batch, allowed_query};
    with_number(is_bfloat16, [=](auto number) {
        typedef decltype(number) T;
        softmax_rows((const T*)scores, (T*)out, rows, scale, (int)num_threads);
    });
}

// p is what the forward pass gave. Keys out of range are not read, the others are 0 where `allowed` forbade them.
extern "C" void masked_softmax_backward(const void* p, const void* d_p, const int64_t* keys, void* d_scores,
                                        int64_t num_rows, int64_t heads, int64_t queries, int64_t num_keys,
                                        int64_t offset, int64_t causal, int64_t window, float scale,
                                        int64_t is_bfloat16, int64_t num_threads) {
    Rows rows{num_rows, heads, queries, num_keys, offset, causal, window, keys, nullptr, 0, 0};
    with_number(is_bfloat16, [=](auto number) {
        typedef decltype(number) T;
        gradient_rows((const T*)p, (const T*)d_p, (T*)d_scores, rows, scale, (int)num_threads);
    });
}
