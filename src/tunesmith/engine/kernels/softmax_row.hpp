// The softmax of one row of logits, as the sampler and the training loss both compute it: the log-prob of a token has
// the same bits in both, because the sums here run in one order.
//
// Weights are exp((x - largest x) / temperature), so the largest is 1. They are summed in float32 within blocks of the
// vocabulary and in double over the blocks.
#pragma once

#include <cmath>
#include <cstdint>

#include "vector.hpp"

namespace tunesmith {

constexpr int kBlock = 128;

// The sum of the weights of one block, whose logits `at(i)` gives 16 at a time; `use(i, weights, exponents)` sees each.
template <class At, class Use>
inline TUNESMITH_INLINE float block_sum(Floats largest, Floats inverse_temperature, At at, Use use) {
    Floats sum = {};
    for (int i = 0; i < kBlock; i += kLanes) {
        Floats exponents = (at(i) - largest) * inverse_temperature;
        Floats weights = exp_of_negative(exponents);
        use(i, weights, exponents);
        sum += weights;
    }
    return sum_of_lanes(sum);
}

// The log-prob of a token with logit x, given the row's largest logit and the sum of all weights.
inline float log_prob(double x, double largest, double total, double inverse_temperature) {
    return (float)((x - largest) * inverse_temperature - std::log(total));
}

}  // namespace tunesmith
