// Sums over neighbouring rows, and what each row gets of a sum's gradient; torch_impl.py is the definition. A segment is
// summed by one thread in an order that its own length decides.
#include <algorithm>
#include <cstdint>

#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr int64_t kParallelWork = 200000;  // elements below which threads cost more than they give

// Of numbers that stand side by side: four chains of 16 lanes, so that an addition need not wait for the one before.
template <class T> float sum_of(const T* x, int64_t n) {
    Floats sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int chain = 0; chain < 4; ++chain) sums[chain] += load(x + i + chain * kLanes);
    each_vector(n - i, [&](int64_t j, int count) TUNESMITH_INLINE { sums[0] += load(x + i + j, count); });
    return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Of `num_rows` rows of `width` numbers, into `out`.
template <class T> void sum_rows(const T* x, float* out, int64_t num_rows, int64_t width) {
    if (width == 1) {
        *out = sum_of(x, num_rows);
        return;
    }
    each_vector(width, [&](int64_t column, int count) TUNESMITH_INLINE {
        Floats sums[2] = {};
        for (int64_t row = 0; row < num_rows; ++row) sums[row & 1] += load(x + row * width + column, count);
        store(out + column, sums[0] + sums[1], count);
    });
}

template <class T>
void sum_all(const T* values, const int64_t* offset, float* out, int64_t num_segments, int64_t width, int64_t num_threads) {
    bool shares = num_threads > 1 && num_segments > 1 && offset[num_segments] * width > kParallelWork;
#pragma omp parallel for schedule(dynamic, 8) num_threads(num_threads) if (shares)
    for (int64_t s = 0; s < num_segments; ++s)
        sum_rows(values + offset[s] * width, out + s * width, offset[s + 1] - offset[s], width);
}

}  // namespace

extern "C" void segment_sum(const void* values, const int64_t* offset, float* out, int64_t num_segments, int64_t width,
                            int64_t is_bfloat16, int64_t num_threads) {
    if (is_bfloat16) sum_all((const uint16_t*)values, offset, out, num_segments, width, num_threads);
    else sum_all((const float*)values, offset, out, num_segments, width, num_threads);
}

extern "C" void segment_gradient(const float* d_sum, const int64_t* offset, float* d_values, int64_t num_segments,
                                 int64_t width, int64_t num_threads) {
    bool shares = num_threads > 1 && num_segments > 1 && offset[num_segments] * width > kParallelWork;
#pragma omp parallel for schedule(dynamic, 8) num_threads(num_threads) if (shares)
    for (int64_t s = 0; s < num_segments; ++s) {
        const float* from = d_sum + s * width;
        if (width == 1) std::fill(d_values + offset[s], d_values + offset[s + 1], *from);
        else for (int64_t row = offset[s]; row < offset[s + 1]; ++row) std::copy(from, from + width, d_values + row * width);
    }
}
