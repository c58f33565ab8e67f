// Products of rows with a packed weight, in bfloat16 or float32; torch_impl.py is the definition. Each output is a sum
// over blocks of inputs: within a block input by input (bfloat16: pair by pair) in float32, then block to block, which
// is how oneDNN sums. So a result has oneDNN's bits, and depends on its own row alone.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.hpp"

using namespace tunesmith;

struct LinearArguments {
    const void *x, *weight, *bias;
    void* y;
    int64_t num_rows, num_inputs, num_outputs, block, x_stride, num_threads, is_bfloat16;
};

namespace {

// A panel is the weight of `kOutputs` outputs: for each step, which takes `kPerStep` inputs, `kVectors` registers of
// weights. A tile has as many rows as its sums fit into the registers, with a row's step and the weights.
constexpr int64_t kThreadedWork = 1 << 17;  // products from which on a second thread is worth its start

struct Single {
    typedef float Number;
    static constexpr int kPerStep = 1;
#ifdef __AVX512F__
    static constexpr int kVectors = 3, kTileRows = 8, kWidth = 16;
#else
    // Not `Floats`: vectors wider than a register go through memory.
    static constexpr int kVectors = 2, kTileRows = 6, kWidth = 8;
#endif
    static constexpr int64_t kOutputs = kVectors * kWidth;
    typedef float Sum __attribute__((vector_size(4 * kWidth)));
    static TUNESMITH_INLINE Sum multiply_add(Sum sum, const float* x, const float* weight) {
        Sum weights;
        std::memcpy(&weights, weight, sizeof weights);
        return sum + *x * weights;
    }
};

// With AMX oneDNN's own products are faster than these.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define TUNESMITH_BFLOAT16_PAIRS
struct Pairs {
    typedef uint16_t Number;
    static constexpr int kPerStep = 2, kVectors = 3, kTileRows = 8, kWidth = 16;
    static constexpr int64_t kOutputs = kVectors * kWidth;
    typedef Floats Sum;
    static TUNESMITH_INLINE Sum multiply_add(Sum sum, const uint16_t* x, const uint16_t* weight) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                     (__m512bh)_mm512_loadu_si512(weight));
    }
};
#endif

template <class Kind, int R, class Number = typename Kind::Number>
void tile(const LinearArguments& given, const Number* x, const Number* panel, Number* y, const Number* bias,
          int64_t num_outputs, const Number* ahead) {
    typedef typename Kind::Sum Sum;
    constexpr int kVectors = Kind::kVectors, kPerStep = Kind::kPerStep, kNumbers = Kind::kWidth * kPerStep;
    Sum total[R][kVectors];
    const Number* row[R];  // not x + r * stride in the loop, which would compute the addresses again at each step
    for (int r = 0; r < R; ++r) row[r] = x + r * given.x_stride;
    for (int64_t start = 0; start < given.num_inputs; start += given.block) {
        int64_t stop = std::min(start + given.block, given.num_inputs);
        Sum sum[R][kVectors];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) sum[r][v] = Sum{};
        for (int64_t i = start; i < stop; i += kPerStep) {
            const Number* weight = panel + i * Kind::kOutputs;
            __builtin_prefetch(ahead + i * Kind::kWidth, 0, 2);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < kVectors; ++v)
                    sum[r][v] = Kind::multiply_add(sum[r][v], row[r] + i, weight + v * kNumbers);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) total[r][v] = start ? total[r][v] + sum[r][v] : sum[r][v];
    }
    for (int r = 0; r < R; ++r)
        each_vector(num_outputs, [&](int64_t j, int count) TUNESMITH_INLINE {
            Floats value = load((const float*)total[r] + j);
            store(y + r * given.num_outputs + j, bias ? value + load(bias + j, count) : value, count);
        });
}

// Calls `tile` for `count` rows, at most R.
template <class Kind, int R, class... Rest>
inline TUNESMITH_INLINE void tile_of(int64_t count, const Rest&... rest) {
    if constexpr (R == 1) tile<Kind, 1>(rest...);
    else if (count == R) tile<Kind, R>(rest...);
    else tile_of<Kind, R - 1>(count, rest...);
}

// The outputs of panel `p` for the rows from `row` to `end`.
template <class Kind> void panel_rows(const LinearArguments& given, int64_t p, int64_t row, int64_t end) {
    typedef typename Kind::Number Number;
    int64_t first = p * Kind::kOutputs, num_outputs = std::min(Kind::kOutputs, given.num_outputs - first);
    const Number* panel = (const Number*)given.weight + given.num_inputs * first;
    const Number* bias = given.bias ? (const Number*)given.bias + first : nullptr;
    for (int number = 0; row < end; ++number) {
        int64_t count = std::min<int64_t>(Kind::kTileRows, end - row);
        // The first tiles ask for a register's share of the next panel each, so that it comes while this one is used.
        int64_t vector = number < Kind::kVectors ? Kind::kVectors + number : 0;
        const Number* ahead = panel + given.num_inputs * Kind::kWidth * vector;
        tile_of<Kind, Kind::kTileRows>(count, given, (const Number*)given.x + row * given.x_stride, panel,
                                       (Number*)given.y + row * given.num_outputs + first, bias, num_outputs, ahead);
        row += count;
    }
}

template <class Kind, class Number = typename Kind::Number>
void pack(const Number* weight, Number* to, int64_t num_outputs, int64_t num_inputs, int64_t num_threads) {
    constexpr int kPerStep = Kind::kPerStep;
    int64_t num_panels = (num_outputs + Kind::kOutputs - 1) / Kind::kOutputs;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t p = 0; p < num_panels; ++p)
        for (int64_t i = 0; i < num_inputs; i += kPerStep)
            for (int64_t j = 0; j < Kind::kOutputs; ++j) {
                int64_t output = p * Kind::kOutputs + j;
                Number step[kPerStep] = {};
                if (output < num_outputs) std::memcpy(step, weight + output * num_inputs + i, sizeof step);
                std::memcpy(to + (p * num_inputs + i) * Kind::kOutputs + j * kPerStep, step, sizeof step);
            }
}

template <class Kind> void multiply(const LinearArguments& given) {
    int64_t num_panels = (given.num_outputs + Kind::kOutputs - 1) / Kind::kOutputs;
    // A thread takes whole panels, one after the other; where there are too few for all threads, the rows are divided.
    int64_t wanted = num_panels >= 4 * given.num_threads ? 1 : (4 * given.num_threads + num_panels - 1) / num_panels;
    int64_t num_tiles = (given.num_rows + Kind::kTileRows - 1) / Kind::kTileRows;
    int64_t part_rows = (num_tiles + wanted - 1) / wanted * Kind::kTileRows;
    int64_t num_parts = (given.num_rows + part_rows - 1) / part_rows;
    bool is_large = given.num_rows * given.num_inputs * given.num_outputs > kThreadedWork;
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)given.num_threads) \
    if (given.num_threads > 1 && is_large)
    for (int64_t p = 0; p < num_panels; ++p)
        for (int64_t part = 0; part < num_parts; ++part)
            panel_rows<Kind>(given, p, part * part_rows, std::min((part + 1) * part_rows, given.num_rows));
}

// Calls `work` with the kind of products of the dtype, if there is one on this processor.
template <class Work> void with_kind(bool is_bfloat16, Work work) {
    if (!is_bfloat16) work(Single());
#ifdef TUNESMITH_BFLOAT16_PAIRS
    else work(Pairs());
#endif
}

}  // namespace

// Outputs of a panel; 0 where there is no kernel for the dtype.
extern "C" int64_t linear_panel_outputs(int64_t is_bfloat16) {
    int64_t outputs = 0;
    with_kind(is_bfloat16, [&](auto kind) { outputs = kind.kOutputs; });
    return outputs;
}

// `to` has a whole number of panels; what is beyond the outputs is 0.
extern "C" void linear_pack(const void* weight, void* to, int64_t num_outputs, int64_t num_inputs, int64_t num_threads,
                            int64_t is_bfloat16) {
    with_kind(is_bfloat16, [&](auto kind) {
        typedef typename decltype(kind)::Number Number;
        pack<decltype(kind)>((const Number*)weight, (Number*)to, num_outputs, num_inputs, num_threads);
    });
}

// y = x weight^T + bias; rows of x are `x_stride` apart, rows of y `num_outputs`.
extern "C" void linear(const LinearArguments* given) {
    if (given->num_rows) with_kind(given->is_bfloat16, [&](auto kind) { multiply<decltype(kind)>(*given); });
}
