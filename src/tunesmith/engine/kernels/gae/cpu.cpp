// Generalised advantage estimation; torch_impl.py is the definition, and in float32 the bits are its own.
#include <algorithm>
#include <cstdint>

// torch rounds each product before it is added to something; a fused multiply-add would not.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

constexpr int64_t kRows = 4;                // a row is one chain of additions; several of them fill the processor
constexpr int64_t kParallelWork = 100000;   // elements below which threads cost more than they give

struct Arrays {
    const float *reward, *value;
    const uint8_t* mask;
    float *advantage, *returns;
    int64_t num_columns;
    float gamma, decay;                     // decay: gamma lambda
};

// `Rows` rows from `first` on, from the last column to the first.
template <int64_t Rows> void scan(const Arrays& a, int64_t first) {
    float next_value[Rows] = {}, next_advantage[Rows] = {};
    for (int64_t t = a.num_columns - 1; t >= 0; --t) {
        for (int64_t row = 0; row < Rows; ++row) {
            int64_t i = (first + row) * a.num_columns + t;
            bool counts = a.mask[i] != 0;
            float value = a.value[i];
            float ahead = a.gamma * next_value[row], later = a.decay * next_advantage[row];
            float found = ((a.reward[i] + ahead) - value) + later;
            a.advantage[i] = counts ? found : 0.0f;
            a.returns[i] = counts ? found + value : 0.0f;
            next_advantage[row] = counts ? found : next_advantage[row];
            next_value[row] = counts ? value : next_value[row];
        }
    }
}

}  // namespace

extern "C" void gae(const float* reward, const float* value, const uint8_t* mask, float* advantage, float* returns,
                    int64_t num_rows, int64_t num_columns, float gamma, float decay, int64_t num_threads) {
    Arrays arrays = {reward, value, mask, advantage, returns, num_columns, gamma, decay};
    int64_t num_groups = (num_rows + kRows - 1) / kRows;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * num_columns > kParallelWork)
    for (int64_t group = 0; group < num_groups; ++group) {
        int64_t first = group * kRows;
        if (first + kRows <= num_rows) scan<kRows>(arrays, first);
        else for (int64_t row = first; row < num_rows; ++row) scan<1>(arrays, row);
    }
}
