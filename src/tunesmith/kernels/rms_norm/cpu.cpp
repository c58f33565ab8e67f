// Residual addition and RMSNorm, and their gradients; torch_impl.py is the definition. A row is summed in an order that
// depends on its length alone, so its result does not depend on the rows beside it.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vector.hpp"

using namespace tunesmith;

namespace {

// The gradient of the weight is summed over this many rows at a time, and then over the sums: in the same order
// whatever the number of threads.
constexpr int64_t kRowsOfSum = 64;
constexpr int64_t kThreadedWork = 32768;  // elements from which on a second thread is worth its start

// Rows in groups: those of a group are `inner_stride` elements apart, the groups `outer_stride`. A matrix has groups of
// one row; the heads of a token within a wider row are a group.
struct Layout {
    int64_t num_rows, n, inner, outer_stride, inner_stride;
    int64_t start(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// With an offset, the product with the weight is in float32 and rounded once; without, what it is multiplied with is
// rounded first.
template <class T, bool has_offset> inline Floats unit_of(Floats value, float scale) {
    return has_offset ? value * scale : rounded<T>(value * scale);
}

template <class T, bool has_offset>
float row(const T* x, const T* residual, const T* weight, T* normed, T* sum, int64_t n, float epsilon, float offset) {
    Floats squares = {};
    if (residual) {
        each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
            Floats value = rounded<T>(load(x + i, count) + load(residual + i, count));
            store(sum + i, value, count);
            squares += value * value;
        });
        x = sum;
    } else {
        each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
            Floats value = load(x + i, count);
            squares += value * value;
        });
    }
    float scale = 1.0f / std::sqrt(sum_of_lanes(squares) / (float)n + epsilon);
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats factor = load(weight + i, count);
        if (has_offset) factor = factor + offset;
        store(normed + i, unit_of<T, has_offset>(load(x + i, count), scale) * factor, count);
    });
    return scale;
}

template <class T>
void rows(const T* x, const T* residual, const T* weight, T* normed, T* sum, float* scale, Layout layout,
          float epsilon, float offset, int num_threads) {
    auto work = offset != 0 ? row<T, true> : row<T, false>;
    int64_t n = layout.n;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && layout.num_rows * n > kThreadedWork)
    for (int64_t i = 0; i < layout.num_rows; ++i) {
        float found = work(x + layout.start(i), residual ? residual + i * n : nullptr, weight, normed + i * n,
                           sum + i * n, n, epsilon, offset);
        if (scale) scale[i] = found;
    }
}

// With u = v * scale, the row before the product with the weight, and g the gradient of u:
// dv = scale * (g - u * mean(g * u)) + the gradient of the sum itself. Adds the row's share to `weight_sum`.
template <class T, bool has_offset>
void row_backward(const T* v, float scale, const T* weight, const T* d_normed, const T* d_sum, T* d_x,
                  float* weight_sum, int64_t n, float offset) {
    Floats products = {};
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats value = load(v + i, count), gradient = load(d_normed + i, count), factor = load(weight + i, count);
        if (has_offset) factor = factor + offset;
        products += gradient * factor * (value * scale);
        if (weight_sum) {
            Floats share = gradient * unit_of<T, has_offset>(value, scale);
            store(weight_sum + i, load(weight_sum + i, count) + share, count);
        }
    });
    float mean = sum_of_lanes(products) / (float)n;
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats factor = load(weight + i, count);
        if (has_offset) factor = factor + offset;
        Floats gradient = load(d_normed + i, count) * factor;
        Floats result = (gradient - load(v + i, count) * scale * mean) * scale;
        if (d_sum) result = result + load(d_sum + i, count);
        store(d_x + i, result, count);
    });
}

template <class T>
void rows_backward(const T* v, const float* scale, const T* weight, const T* d_normed, const T* d_sum, T* d_x,
                   T* d_weight, float* partial, Layout layout, float offset, int num_threads) {
    auto work = offset != 0 ? row_backward<T, true> : row_backward<T, false>;
    int64_t n = layout.n, num_sums = (layout.num_rows + kRowsOfSum - 1) / kRowsOfSum;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && layout.num_rows * n > kThreadedWork)
    for (int64_t part = 0; part < num_sums; ++part) {
        float* weight_sum = partial ? partial + part * n : nullptr;
        if (weight_sum) std::fill(weight_sum, weight_sum + n, 0.0f);
        int64_t end = std::min((part + 1) * kRowsOfSum, layout.num_rows);
        for (int64_t i = part * kRowsOfSum; i < end; ++i)
            work(v + layout.start(i), scale[i], weight, d_normed + i * n, d_sum ? d_sum + i * n : nullptr,
                 d_x + i * n, weight_sum, n, offset);
    }
    if (!partial) return;
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats sum = {};
        for (int64_t part = 0; part < num_sums; ++part) sum += load(partial + part * n + i, count);
        store(d_weight + i, sum, count);
    });
}

}  // namespace

// Of a row, x is found by its strides; residual, normed and sum are [num_rows, n] without gaps, weight is [n].
// `residual` and `sum` are null together; `scale` [num_rows] may be null.
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, void* normed, void* sum,
                             float* scale, int64_t num_rows, int64_t n, int64_t inner, int64_t outer_stride,
                             int64_t inner_stride, float epsilon, float offset, int64_t is_bfloat16,
                             int64_t num_threads) {
    Layout layout{num_rows, n, inner, outer_stride, inner_stride};
    if (is_bfloat16)
        rows((const uint16_t*)x, (const uint16_t*)residual, (const uint16_t*)weight, (uint16_t*)normed, (uint16_t*)sum,
             scale, layout, epsilon, offset, (int)num_threads);
    else
        rows((const float*)x, (const float*)residual, (const float*)weight, (float*)normed, (float*)sum, scale, layout,
             epsilon, offset, (int)num_threads);
}

// v is the sum that was normalised, found by its strides, `scale` what the forward pass wrote. d_sum may be null, and
// so may d_weight [n] with `partial` [ceil(num_rows / 64), n].
extern "C" void add_rms_norm_backward(const void* v, const float* scale, const void* weight, const void* d_normed,
                                      const void* d_sum, void* d_x, void* d_weight, float* partial, int64_t num_rows,
                                      int64_t n, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                                      float offset, int64_t is_bfloat16, int64_t num_threads) {
    Layout layout{num_rows, n, inner, outer_stride, inner_stride};
    if (is_bfloat16)
        rows_backward((const uint16_t*)v, scale, (const uint16_t*)weight, (const uint16_t*)d_normed,
                      (const uint16_t*)d_sum, (uint16_t*)d_x, (uint16_t*)d_weight, partial, layout, offset,
                      (int)num_threads);
    else
        rows_backward((const float*)v, scale, (const float*)weight, (const float*)d_normed, (const float*)d_sum,
                      (float*)d_x, (float*)d_weight, partial, layout, offset, (int)num_threads);
}
