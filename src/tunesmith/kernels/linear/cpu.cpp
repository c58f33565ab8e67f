// Products of bfloat16 rows with a packed bfloat16 weight; torch_impl.py is the definition. Each output is a sum over
// blocks of inputs: within a block pair by pair in float32, then block to block, which is how oneDNN sums. So a result
// has oneDNN's bits, and depends on its own row alone.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.hpp"

using namespace tunesmith;

struct LinearArguments {
    const uint16_t *x, *weight, *bias;
    uint16_t* y;
    int64_t num_rows, num_inputs, num_outputs, block, x_stride, num_threads;
};

// With AMX oneDNN's own products are faster than these.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace {

// A panel is the weight of 48 outputs: for each pair of inputs three vectors of 16 outputs. With 8 rows that makes 24
// sums, which with a row's pair and the three vectors fit into the 32 registers.
constexpr int kVectors = 3, kTileRows = 8;
constexpr int64_t kPanelOutputs = kVectors * kLanes;
constexpr int64_t kPairNumbers = 2 * kPanelOutputs;  // of a panel, for a pair of inputs
constexpr int64_t kThreadedWork = 1 << 17;           // products from which on a second thread is worth its start

inline TUNESMITH_INLINE __m512bh pair_of(const uint16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

template <int R>
void tile(const LinearArguments& given, const uint16_t* x, const uint16_t* panel, uint16_t* y, const uint16_t* bias,
          int64_t num_outputs, const uint16_t* ahead) {
    Floats total[R][kVectors];
    for (int64_t start = 0; start < given.num_inputs; start += given.block) {
        int64_t stop = std::min(start + given.block, given.num_inputs);
        __m512 sum[R][kVectors];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
        for (int64_t i = start; i < stop; i += 2) {
            __m512bh weight[kVectors];
            for (int v = 0; v < kVectors; ++v)
                weight[v] = (__m512bh)_mm512_loadu_si512(panel + i / 2 * kPairNumbers + 2 * v * kLanes);
            _mm_prefetch((const char*)(ahead + i / 2 * 2 * kLanes), _MM_HINT_T1);
            for (int r = 0; r < R; ++r) {
                __m512bh pair = pair_of(x + r * given.x_stride + i);
                for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], pair, weight[v]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) total[r][v] = start ? total[r][v] + (Floats)sum[r][v] : (Floats)sum[r][v];
    }
    for (int r = 0; r < R; ++r)
        each_vector(num_outputs, [&](int64_t j, int count) TUNESMITH_INLINE {
            Floats value = total[r][j / kLanes];
            store(y + r * given.num_outputs + j, bias ? value + load(bias + j, count) : value, count);
        });
}

using Tile = void (*)(const LinearArguments&, const uint16_t*, const uint16_t*, uint16_t*, const uint16_t*, int64_t,
                      const uint16_t*);
constexpr Tile kTiles[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>};

// The outputs of panel `p` for the rows from `row` to `end`.
void panel_rows(const LinearArguments& given, int64_t p, int64_t row, int64_t end) {
    const uint16_t* panel = given.weight + p * (given.num_inputs / 2) * kPairNumbers;
    const uint16_t* bias = given.bias ? given.bias + p * kPanelOutputs : nullptr;
    int64_t num_outputs = std::min(kPanelOutputs, given.num_outputs - p * kPanelOutputs);
    for (int tile = 0; row < end; ++tile) {
        int64_t count = std::min<int64_t>(kTileRows, end - row);
        // Each of the first tiles asks for a third of the next panel, so that it comes while this one is used.
        int64_t third = tile < kVectors ? kPairNumbers + 2 * kLanes * tile : 0;
        const uint16_t* ahead = panel + given.num_inputs / 2 * third;
        kTiles[count](given, given.x + row * given.x_stride, panel, given.y + row * given.num_outputs + p * kPanelOutputs,
                      bias, num_outputs, ahead);
        row += count;
    }
}

}  // namespace

extern "C" int64_t linear_is_compiled() { return 1; }

// `to` has a panel for every 48 outputs, filled up with zeros.
extern "C" void linear_pack(const uint16_t* weight, uint16_t* to, int64_t num_outputs, int64_t num_inputs,
                            int64_t num_threads) {
    int64_t num_panels = (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t p = 0; p < num_panels; ++p)
        for (int64_t i = 0; i < num_inputs; i += 2)
            for (int64_t j = 0; j < kPanelOutputs; ++j) {
                int64_t output = p * kPanelOutputs + j;
                uint32_t pair = 0;
                if (output < num_outputs) std::memcpy(&pair, weight + output * num_inputs + i, sizeof pair);
                std::memcpy(to + (p * num_inputs / 2 + i / 2) * kPairNumbers + 2 * j, &pair, sizeof pair);
            }
}

// y = x weight^T + bias; rows of x are `x_stride` apart, rows of y `num_outputs`.
extern "C" void linear(const LinearArguments* arguments) {
    const LinearArguments& given = *arguments;
    if (given.num_rows == 0) return;
    int64_t num_panels = (given.num_outputs + kPanelOutputs - 1) / kPanelOutputs;
    // A thread takes whole panels, one after the other; where there are too few for all threads, the rows are divided.
    int64_t wanted = num_panels >= 4 * given.num_threads ? 1 : (4 * given.num_threads + num_panels - 1) / num_panels;
    int64_t num_tiles = (given.num_rows + kTileRows - 1) / kTileRows;
    int64_t part_rows = (num_tiles + wanted - 1) / wanted * kTileRows;
    int64_t num_parts = (given.num_rows + part_rows - 1) / part_rows;
    bool is_large = given.num_rows * given.num_inputs * given.num_outputs > kThreadedWork;
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)given.num_threads) \
    if (given.num_threads > 1 && is_large)
    for (int64_t p = 0; p < num_panels; ++p)
        for (int64_t part = 0; part < num_parts; ++part)
            panel_rows(given, p, part * part_rows, std::min((part + 1) * part_rows, given.num_rows));
}

#else

extern "C" int64_t linear_is_compiled() { return 0; }

#endif
