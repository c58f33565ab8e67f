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

// Rows in groups: those of a group are `inner_stride` elements apart, the groups `outer_stride`. A matrix has groups of
// one row; the heads of a token within a wider row are a group.
struct Layout {
    int64_t inner, outer_stride, inner_stride;
    int64_t start(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// With an offset, the product with the weight is in float32 and rounded once; without, what it is multiplied with is
// rounded first.
template <class T, bool has_offset> inline Floats unit_of(Floats value, float scale) {
    return has_offset ? value * scale : rounded<T>(value * scale);
}

template <bool has_offset, class T> inline Floats factor_of(const T* weight, int count, float offset) {
    return has_offset ? load(weight, count) + offset : load(weight, count);
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
        Floats factor = factor_of<has_offset>(weight + i, count, offset);
        store(normed + i, unit_of<T, has_offset>(load(x + i, count), scale) * factor, count);
    });
    return scale;
}

// With u = v * scale, the row before the product with the weight, and g the gradient of u:
// dv = scale * (g - u * mean(g * u)) + the gradient of the sum itself. Adds the row's share to `weight_sum`.
template <class T, bool has_offset>
void row_backward(const T* v, float scale, const T* weight, const T* d_normed, const T* d_sum, T* d_x,
                  float* weight_sum, int64_t n, float offset) {
    Floats products = {};
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats value = load(v + i, count), gradient = load(d_normed + i, count);
        products += gradient * factor_of<has_offset>(weight + i, count, offset) * (value * scale);
        if (weight_sum) {
            Floats share = gradient * unit_of<T, has_offset>(value, scale);
            store(weight_sum + i, load(weight_sum + i, count) + share, count);
        }
    });
    float mean = sum_of_lanes(products) / (float)n;
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats gradient = load(d_normed + i, count) * factor_of<has_offset>(weight + i, count, offset);
        Floats result = (gradient - load(v + i, count) * scale * mean) * scale;
        if (d_sum) result = result + load(d_sum + i, count);
        store(d_x + i, result, count);
    });
}

}  // namespace

// Of a row, x is found by its strides; residual, normed and sum are [num_rows, n] and contiguous, weight is [n].
// `residual` and `sum` are null together; `scale` [num_rows] may be null.
struct NormArguments {
    const void *x, *residual, *weight;
    void *normed, *sum;
    float* scale;
    int64_t num_rows, n, inner, outer_stride, inner_stride, is_bfloat16, num_threads;
    float epsilon, offset;
};

extern "C" void add_rms_norm(const NormArguments* given) {
    const NormArguments a = *given;
    Layout layout{a.inner, a.outer_stride, a.inner_stride};
    with_number(a.is_bfloat16, [=](auto number) {
        typedef decltype(number) T;
        auto work = a.offset != 0 ? row<T, true> : row<T, false>;
        each_row(a.num_rows, a.n, a.num_threads, [=](int64_t i) {
            int64_t at = i * a.n;
            float found = work((const T*)a.x + layout.start(i), a.residual ? (const T*)a.residual + at : nullptr,
                               (const T*)a.weight, (T*)a.normed + at, (T*)a.sum + at, a.n, a.epsilon, a.offset);
            if (a.scale) a.scale[i] = found;
        });
    });
}

// v is the sum that was normalised, found by its strides, `scale` what the forward pass wrote. d_sum may be null, and
// so may d_weight [n] with `partial` [ceil(num_rows / 64), n].
extern "C" void add_rms_norm_backward(const void* v, const float* scale, const void* weight, const void* d_normed,
                                      const void* d_sum, void* d_x, void* d_weight, float* partial, int64_t num_rows,
                                      int64_t n, int64_t inner, int64_t outer_stride, int64_t inner_stride,
                                      float offset, int64_t is_bfloat16, int64_t num_threads) {
    Layout layout{inner, outer_stride, inner_stride};
    int64_t num_sums = (num_rows + kRowsOfSum - 1) / kRowsOfSum;
    with_number(is_bfloat16, [=](auto number) {
        typedef decltype(number) T;
        auto work = offset != 0 ? row_backward<T, true> : row_backward<T, false>;
        each_row(num_sums, num_rows * n / num_sums, num_threads, [=](int64_t part) {
            float* weight_sum = partial ? partial + part * n : nullptr;
            if (weight_sum) std::fill(weight_sum, weight_sum + n, 0.0f);
            int64_t end = std::min((part + 1) * kRowsOfSum, num_rows);
            for (int64_t i = part * kRowsOfSum; i < end; ++i)
                work((const T*)v + layout.start(i), scale[i], (const T*)weight, (const T*)d_normed + i * n,
                     d_sum ? (const T*)d_sum + i * n : nullptr, (T*)d_x + i * n, weight_sum, n, offset);
        });
        if (!partial) return;
        each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE {
            Floats sum = {};
            for (int64_t part = 0; part < num_sums; ++part) sum += load(partial + part * n + i, count);
            store((T*)d_weight + i, sum, count);
        });
    });
}
