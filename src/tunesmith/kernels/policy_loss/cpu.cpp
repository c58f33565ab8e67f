// The policy loss with its KL term, sums over its tokens and its gradient, in one pass; torch_impl.py is the definition.
// Sums are formed row by row, and those of the rows in their order, so no bit depends on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr int64_t kParallelWork = 20000;   // tokens below which threads cost more than they give
constexpr int kSums = 11;                  // those of PolicySums in their order, and the weighted loss
enum { kTokens, kLoss, kApproxKl, kLow, kHigh, kDual, kRatio, kRatioSquare, kKl, kEntropy, kWeighted };
enum { kK1, kK2, kK3 };

struct Arguments {
    const float *logp, *old_logp, *advantage;
    const uint8_t* mask;
    const float *reference_logp, *entropy;  // null where there is none
    const float* weight;                    // of each row
    float* d_logp;
    double* sums;
    int64_t num_rows, num_columns, is_cispo, estimator, corrects_kl;
    float low, high, dual, kl_coef;
    int64_t num_threads;
};

struct Totals {
    Floats of[kSums] = {};
};

inline TUNESMITH_INLINE Floats exp_of(Floats x) {
    Floats e = exp_of_negative(-magnitude(x));
    Floats result = x > 0.0f ? 1.0f / e : e;
    return x == x ? result : x;
}

// exp(x) - 1 - x. Near 0, where it would cancel, its own series, cut after x^9.
inline TUNESMITH_INLINE Floats k3_of(Floats x) {
    Floats p = splat(1.0f / 362880);
    p = p * x + 1.0f / 40320;
    p = p * x + 1.0f / 5040;
    p = p * x + 1.0f / 720;
    p = p * x + 1.0f / 120;
    p = p * x + 1.0f / 24;
    p = p * x + 1.0f / 6;
    p = p * x + 0.5f;
    Floats far = exp_of(x) - 1.0f - x;
    return magnitude(x) < 0.5f ? p * x * x : far;
}

struct Token {
    Floats logp, old_logp, advantage, reference_logp, entropy;
    Ints counts;
};

// Loss, sums and gradient of 16 tokens. What does not count is 0 in all of `t`.
inline TUNESMITH_INLINE Floats slope_of(const Token& t, const Arguments& a, float weight, Totals& totals) {
    const Floats zero = {}, one = splat(1.0f);
    Floats difference = t.logp - t.old_logp, ratio = exp_of(difference);
    Ints is_high = (ratio > a.high) & (t.advantage > 0.0f);
    Ints is_low = (ratio < a.low) & (t.advantage < 0.0f);
    Ints is_dual = (ratio > a.dual) & (t.advantage < 0.0f);
    Floats loss, slope;
    if (a.is_cispo) {
        slope = -(ratio > a.high ? splat(a.high) : ratio) * t.advantage;
        loss = slope * t.logp;
        is_low = Ints{}, is_dual = Ints{};
    } else {
        Floats held = is_high ? splat(a.high) : is_low ? splat(a.low) : is_dual ? splat(a.dual) : ratio;
        loss = -held * t.advantage;
        slope = (is_high | is_low | is_dual ? zero : -t.advantage) * ratio;
    }
    Floats kl = zero;
    if (a.reference_logp) {
        Floats d = t.logp - t.reference_logp, along = d;
        if (a.estimator == kK1) kl = d;
        else if (a.estimator == kK2) kl = 0.5f * d * d;
        else kl = k3_of(-d), along = d - kl;
        if (a.corrects_kl) {
            if (a.estimator == kK1) along = one;
            along = ratio * (kl + along);
            kl = ratio * kl;
        }
        slope += a.kl_coef * along;
    }
    auto add = [&](int sum, Floats values) TUNESMITH_INLINE { totals.of[sum] += t.counts ? values : zero; };
    add(kTokens, one);
    add(kLoss, loss);
    add(kApproxKl, 0.5f * difference * difference);
    add(kLow, is_low ? one : zero);
    add(kHigh, is_high ? one : zero);
    add(kDual, is_dual ? one : zero);
    add(kRatio, ratio);
    add(kRatioSquare, ratio * ratio);
    add(kKl, kl);
    add(kEntropy, t.entropy);
    return t.counts ? slope * weight : zero;
}

inline TUNESMITH_INLINE Floats kept(const float* from, Ints counts, int count) {
    return counts ? load(from, count) : Floats{};
}

typedef uint8_t Bytes __attribute__((vector_size(16)));

inline TUNESMITH_INLINE Ints counting(const uint8_t* mask, int count) {
    Bytes bytes = {};
    std::memcpy(&bytes, mask, count);
    return __builtin_convertvector(bytes, Ints) != 0;
}

void row_loss(const Arguments& a, int64_t row, double* sums) {
    Totals totals;
    float weight = a.weight[row];
    int64_t first = row * a.num_columns;
    each_vector(a.num_columns, [&](int64_t column, int count) TUNESMITH_INLINE {
        int64_t i = first + column;
        Token t;
        t.counts = counting(a.mask + i, count);
        t.logp = kept(a.logp + i, t.counts, count);
        t.old_logp = kept(a.old_logp + i, t.counts, count);
        t.advantage = kept(a.advantage + i, t.counts, count);
        t.reference_logp = a.reference_logp ? kept(a.reference_logp + i, t.counts, count) : Floats{};
        t.entropy = a.entropy ? kept(a.entropy + i, t.counts, count) : Floats{};
        store(a.d_logp + i, slope_of(t, a, weight, totals), count);
    });
    for (int sum = 0; sum < kWeighted; ++sum) sums[sum] = sum_of_lanes(totals.of[sum]);
    sums[kWeighted] = weight * (sums[kLoss] + (double)a.kl_coef * sums[kKl]);
}

}  // namespace

extern "C" void policy_loss(const Arguments* arguments) {
    const Arguments& a = *arguments;
    std::vector<double> sums(a.num_rows * kSums);
    bool shares = a.num_threads > 1 && a.num_rows * a.num_columns > kParallelWork;
#pragma omp parallel for schedule(static) num_threads(a.num_threads) if (shares)
    for (int64_t row = 0; row < a.num_rows; ++row) row_loss(a, row, sums.data() + row * kSums);
    std::fill(a.sums, a.sums + kSums, 0.0);
    for (int64_t row = 0; row < a.num_rows; ++row)
        for (int sum = 0; sum < kSums; ++sum) a.sums[sum] += sums[row * kSums + sum];
}
