// Residual addition and RMSNorm; reference.py is the definition. A row is summed in an order that depends on its length
// alone, so its result does not depend on the rows beside it.
#include <cmath>
#include <cstdint>

#include "vector.hpp"

using namespace tunesmith;

namespace {

template <class T> void row(const T* x, const T* residual, const T* weight, T* normed, T* sum, int64_t n, float epsilon) {
    int64_t whole = n - n % kLanes;
    Floats squares = {};
    float rest = 0;
    if (residual) {
        for (int64_t i = 0; i < whole; i += kLanes) {
            Floats value = rounded<T>(load(x + i) + load(residual + i));
            store(sum + i, value);
            squares += value * value;
        }
        for (int64_t i = whole; i < n; ++i) store_one(sum + i, load_one(x + i) + load_one(residual + i));
    } else {
        sum = const_cast<T*>(x);  // read only from here on
        for (int64_t i = 0; i < whole; i += kLanes) {
            Floats value = load(x + i);
            squares += value * value;
        }
    }
    for (int64_t i = whole; i < n; ++i) rest += load_one(sum + i) * load_one(sum + i);
    float scale = 1.0f / std::sqrt((sum_of_lanes(squares) + rest) / (float)n + epsilon);
    for (int64_t i = 0; i < whole; i += kLanes)
        store(normed + i, rounded<T>(load(sum + i) * scale) * load(weight + i));
    for (int64_t i = whole; i < n; ++i) {
        store_one(normed + i, load_one(sum + i) * scale);
        store_one(normed + i, load_one(normed + i) * load_one(weight + i));
    }
}

template <class T>
void rows(const void* x, const void* residual, const void* weight, void* normed, void* sum, int64_t num_rows, int64_t n,
          float epsilon, bool has_residual, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows * n > 16384)
    for (int64_t i = 0; i < num_rows; ++i)
        row((const T*)x + i * n, has_residual ? (const T*)residual + i * n : nullptr, (const T*)weight,
            (T*)normed + i * n, (T*)sum + i * n, n, epsilon);
}

}  // namespace

// x, residual, normed and sum are [num_rows, n], weight is [n]. Without a residual, `sum` and `residual` are not used.
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, void* normed, void* sum,
                             int64_t num_rows, int64_t n, float epsilon, int64_t has_residual, int64_t is_bfloat16,
                             int64_t num_threads) {
    auto work = is_bfloat16 ? rows<uint16_t> : rows<float>;
    work(x, residual, weight, normed, sum, num_rows, n, epsilon, has_residual != 0, (int)num_threads);
}
