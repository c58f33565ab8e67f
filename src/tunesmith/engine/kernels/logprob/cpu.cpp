// Log-prob of a token that is given and entropy, for each row of logits, and their gradient; torch_impl.py is the
// definition. A row's result depends on that row alone, and the log-prob has the bits of the sampler's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "softmax_row.hpp"
#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A weight whose exponent is below this is 0; the bound keeps 0 * infinity out of the sums.
constexpr float kLowest = -88.0f;

// What the backward pass needs of a row.
struct RowSums {
    double largest, total, entropy;
};

// The row's largest logit; NaN if one is not finite.
template <class T> float largest_finite(const T* x, int64_t n) {
    Floats best = splat(-kInfinity);
    Ints bad = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Floats values = load(x + i);
        bad |= ((Ints)values & 0x7f800000) == 0x7f800000;
        best = larger(best, values);
    }
    float result = largest_of_lanes(best);
    bool finite = true;
    for (int lane = 0; lane < kLanes; ++lane) finite &= bad[lane] == 0;
    for (; i < n; ++i) {
        finite &= std::isfinite(load_one(x + i));
        result = std::max(result, load_one(x + i));
    }
    return finite ? result : std::numeric_limits<float>::quiet_NaN();
}

// Calls `work(first, at)` for each block, where `at(i)` loads 16 logits from first + i on, -inf past the end.
template <class T, class Work> inline TUNESMITH_INLINE void each_block(const T* x, int64_t n, Work work) {
    int64_t first = 0;
    for (; first + kBlock <= n; first += kBlock) {
        const T* block = x + first;
        work(first, [=](int i) TUNESMITH_INLINE { return load(block + i); });
    }
    if (first == n) return;
    float padded[kBlock];
    std::fill(padded, padded + kBlock, -kInfinity);
    for (int64_t i = first; i < n; ++i) padded[i - first] = load_one(x + i);
    work(first, [&](int i) TUNESMITH_INLINE { return load(padded + i); });
}

template <class T> RowSums sums_of(const T* x, int64_t n, double inverse_temperature) {
    float largest = largest_finite(x, n);
    if (std::isnan(largest)) return {largest, largest, largest};
    double total = 0, products = 0;
    Floats offset = splat(largest), scale = splat((float)inverse_temperature);
    each_block(x, n, [&](int64_t, auto at) TUNESMITH_INLINE {
        Floats product = {};
        total += block_sum(offset, scale, at, [&](int, Floats weights, Floats exponents) TUNESMITH_INLINE {
            product += weights * larger(exponents, splat(kLowest));
        });
        products += sum_of_lanes(product);
    });
    // With e the exponents and w = exp(e): H = log sum w - sum w e / sum w. Both terms are 0 or more, so a low entropy
    // is not lost to cancellation.
    return {largest, total, std::log(total) - products / total};
}

// With z = logits / temperature and H the entropy: d logp / dz = onehot - p and d H / dz = -p (log p + H).
// `gradient` may be `x` itself. A token outside of the row, in columns that the caller did not give, adds nothing.
template <class T>
void row_backward(const T* x, T* gradient, int64_t n, int64_t token, const RowSums& sums, double inverse_temperature,
                  double d_logp, double d_entropy) {
    double unit = inverse_temperature / sums.total;
    float constant = (float)((d_logp + d_entropy * (sums.entropy - std::log(sums.total))) * unit);
    float factor = (float)(d_entropy * unit);
    Floats offset = splat((float)sums.largest), scale = splat((float)inverse_temperature);
    auto slope = [&](Floats values) TUNESMITH_INLINE {
        Floats exponents = larger((values - offset) * scale, splat(kLowest));
        return -exp_of_negative(exponents) * (exponents * factor + constant);
    };
    bool is_here = token >= 0 && token < n;
    float of_token = is_here ? (float)(d_logp * inverse_temperature + slope(splat(load_one(x + token)))[0]) : 0.0f;
    each_vector(n, [&](int64_t i, int count) TUNESMITH_INLINE { store(gradient + i, slope(load(x + i, count)), count); });
    if (is_here) store_one(gradient + token, of_token);
}

}  // namespace

// Rows of logits are `stride` elements apart; `sums` holds three doubles for each. NaN where a logit is not finite.
extern "C" void chosen_logp_entropy(const void* logits, const int64_t* token, float* logp, float* entropy, void* sums,
                                    int64_t num_rows, int64_t n, int64_t stride, double temperature,
                                    int64_t is_bfloat16, int64_t num_threads) {
    double inverse_temperature = 1.0 / temperature;
    with_number(is_bfloat16, [=](auto number) {
        each_row(num_rows, n, num_threads, [=](int64_t i) {
            auto* x = (const decltype(number)*)logits + i * stride;
            RowSums row = ((RowSums*)sums)[i] = sums_of(x, n, inverse_temperature);
            logp[i] = log_prob(load_one(x + token[i]), row.largest, row.total, inverse_temperature);
            entropy[i] = (float)row.entropy;
        });
    });
}

// `d_logp` or `d_entropy` may be null; `gradient` may be `logits`.
extern "C" void chosen_logp_entropy_backward(const void* logits, const int64_t* token, const void* sums,
                                             const float* d_logp, const float* d_entropy, void* gradient,
                                             int64_t num_rows, int64_t n, int64_t stride, int64_t gradient_stride,
                                             double temperature, int64_t is_bfloat16, int64_t num_threads) {
    with_number(is_bfloat16, [=](auto number) {
        typedef decltype(number) T;
        each_row(num_rows, n, num_threads, [=](int64_t i) {
            row_backward((const T*)logits + i * stride, (T*)gradient + i * gradient_stride, n, token[i],
                         ((const RowSums*)sums)[i], 1.0 / temperature, d_logp ? d_logp[i] : 0.0,
                         d_entropy ? d_entropy[i] : 0.0);
        });
    });
}
