// Products of rows with a packed weight, in bfloat16 or float32. Each output is a sum
// over blocks of inputs: within a block input by input (bfloat16: pair by pair) in float32, then block to block, which
// is how oneDNN sums. So a result has oneDNN's bits, and depends on its own row alone.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TUNESMITH_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
    static constexpr int kVectors = 3, kTileRows = 8;
#else
    static constexpr int kVectors = 1, kTileRows = 6;
#endif
    static constexpr int64_t kOutputs = kVectors * kLanes;
    static inline TUNESMITH_INLINE Floats multiply_add(Floats sum, const float* x, const float* weight) {
        return fused(splat(*x), load(weight), sum);
    }
};

// With AMX there is a faster kernel, see below.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define TUNESMITH_BFLOAT16_PAIRS
struct Pairs {
    typedef uint16_t Number;
    static constexpr int kPerStep = 2, kVectors = 3, kTileRows = 8;
    static constexpr int64_t kOutputs = kVectors * kLanes;
    static inline TUNESMITH_INLINE Floats multiply_add(Floats sum, const uint16_t* x, const uint16_t* weight) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                     (__m512bh)_mm512_loadu_si512(weight));
    }
};
#endif

template <class Kind, int R, class Number = typename Kind::Number>
void tile(const LinearArguments& given, const Number* x, const Number* panel, Number* y, const Number* bias,
          int64_t num_outputs, const Number* ahead) {
    constexpr int kVectors = Kind::kVectors, kPerStep = Kind::kPerStep, kNumbers = kLanes * kPerStep;
    Floats total[R][kVectors];
    const Number* row[R];  // not x + r * stride in the loop, which would compute the addresses again at each step
    for (int r = 0; r < R; ++r) row[r] = x + r * given.x_stride;
    for (int64_t start = 0; start < given.num_inputs; start += given.block) {
        int64_t stop = std::min(start + given.block, given.num_inputs);
        Floats sum[R][kVectors] = {};
        for (int64_t i = start; i < stop; i += kPerStep) {
            const Number* weight = panel + i * Kind::kOutputs;
            __builtin_prefetch(ahead + i * kLanes, 0, 2);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < kVectors; ++v)
                    sum[r][v] = Kind::multiply_add(sum[r][v], row[r] + i, weight + v * kNumbers);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) total[r][v] = start ? total[r][v] + sum[r][v] : sum[r][v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors && v * kLanes < num_outputs; ++v) {
            int64_t j = v * kLanes;
            int count = std::min<int64_t>(kLanes, num_outputs - j);
            Floats value = total[r][v];
            store(y + r * given.num_outputs + j, bias ? value + load(bias + j, count) : value, count);
        }
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
        const Number* ahead = panel + given.num_inputs * kLanes * vector;
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

// Tiles of rows that a thread takes of a panel: all of them; where there are too few panels for all threads, a part.
int64_t part_tiles(const LinearArguments& given, int64_t num_panels, int64_t num_tiles) {
    int64_t wanted = (4 * given.num_threads + num_panels - 1) / std::max<int64_t>(1, num_panels);
    return (num_tiles + wanted - 1) / wanted;
}

bool is_threaded(const LinearArguments& given) {
    return given.num_threads > 1 && given.num_rows * given.num_inputs * given.num_outputs > kThreadedWork;
}

template <class Kind> void multiply(const LinearArguments& given) {
    int64_t num_panels = (given.num_outputs + Kind::kOutputs - 1) / Kind::kOutputs;
    int64_t num_tiles = (given.num_rows + Kind::kTileRows - 1) / Kind::kTileRows;
    int64_t part_rows = part_tiles(given, num_panels, num_tiles) * Kind::kTileRows;
    int64_t num_parts = (given.num_rows + part_rows - 1) / part_rows;
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)given.num_threads) if (is_threaded(given))
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

#ifdef TUNESMITH_TILES

namespace {

// Products by AMX: a tile is a register of 16 rows of 64 bytes. The weight is read as it lies, 16 outputs x 32 inputs a
// tile; x is transposed first, 16 pairs of inputs x 16 rows a tile. Each output is one sum in float32 over all inputs in
// order, so that it depends on its own row alone, and the tile of sums has outputs x rows.
constexpr int64_t kCachedBytes = 700000;  // of rows of x, in a core's second-level cache

struct alignas(64) Line {
    int32_t pairs[kLanes];
};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void use(const TileShapes& shapes) {
    asm volatile("" ::"m"(shapes));  // GCC's intrinsic names the first bytes alone as what it reads
    _tile_loadconfig(&shapes);
}

// Rows become columns: four rounds that interleave the first eight vectors with the last eight.
inline TUNESMITH_INLINE void transpose(__m512i (&rows)[kLanes]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int round = 0; round < 4; ++round) {
        __m512i mixed[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            mixed[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + 8]);
            mixed[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + 8]);
        }
        std::memcpy(rows, mixed, sizeof mixed);
    }
}

// The 16 rows of x from `row` on, as tiles; what is beyond the last row is 0.
void pack_rows(const LinearArguments& given, int64_t row, Line* to) {
    int64_t count = std::min<int64_t>(kLanes, given.num_rows - row);
    for (int64_t i = 0; i < given.num_inputs; i += 2 * kLanes) {
        __m512i lines[kLanes];
        for (int r = 0; r < kLanes; ++r)
            lines[r] = r < count ? _mm512_loadu_si512((const uint16_t*)given.x + (row + r) * given.x_stride + i)
                                 : _mm512_setzero_si512();
        transpose(lines);
        std::memcpy(to + i / 2, lines, sizeof lines);
    }
}

// Stores a tile of sums: y of `num_rows` rows and `num_outputs` outputs from (row, output) on.
void store_sums(const LinearArguments& given, __m512i (&sums)[kLanes], int64_t row, int64_t output, int num_outputs) {
    transpose(sums);
    int64_t count = std::min<int64_t>(kLanes, given.num_rows - row);
    Floats bias = given.bias ? load((const uint16_t*)given.bias + output, num_outputs) : Floats{};
    for (int r = 0; r < count; ++r)
        store((uint16_t*)given.y + (row + r) * given.num_outputs + output, (Floats)sums[r] + bias, num_outputs);
}

// Two times 16 outputs of two times 16 rows: each tile that is loaded is used twice.
void four_tiles(const LinearArguments& given, const Line* x, int64_t row, int64_t output) {
    const uint16_t* weight = (const uint16_t*)given.weight + output * given.num_inputs;
    const int64_t stride = given.num_inputs * sizeof *weight, next_rows = given.num_inputs / 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < given.num_inputs; i += 2 * kLanes) {
        _tile_loadd(4, weight + i, stride);
        _tile_loadd(6, x + i / 2, sizeof *x);
        _tile_loadd(5, weight + i + kLanes * given.num_inputs, stride);
        _tile_loadd(7, x + i / 2 + next_rows, sizeof *x);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    __m512i sums[4][kLanes];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int t = 0; t < 4; ++t) store_sums(given, sums[t], row + t / 2 * kLanes, output + t % 2 * kLanes, kLanes);
}

// Up to 16 outputs of 16 rows, for what four tiles leave.
void one_tile(const LinearArguments& given, const Line* x, int64_t row, int64_t output, int num_outputs) {
    const uint16_t* weight = (const uint16_t*)given.weight + output * given.num_inputs;
    _tile_zero(0);
    for (int64_t i = 0; i < given.num_inputs; i += 2 * kLanes) {
        _tile_loadd(4, weight + i, given.num_inputs * sizeof *weight);
        _tile_loadd(6, x + i / 2, sizeof *x);
        _tile_dpbf16ps(0, 4, 6);
    }
    __m512i sums[kLanes] = {};
    _tile_stored(0, sums, 64);
    store_sums(given, sums, row, output, num_outputs);
}

// The outputs of two tiles of weights from `output` on, for the rows from `row` to `end`.
void two_tiles_of_outputs(const LinearArguments& given, const Line* x, int64_t row, int64_t end, int64_t output) {
    const bool has_two = output + 2 * kLanes <= given.num_outputs;
    while (row < end) {
        const bool is_pair = has_two && row + kLanes < end;
        if (is_pair) {
            four_tiles(given, x, row, output);
        } else {
            one_tile(given, x, row, output, kLanes);
            if (has_two) one_tile(given, x, row, output + kLanes, kLanes);
        }
        row += (1 + is_pair) * kLanes, x += (1 + is_pair) * given.num_inputs / 2;
    }
}

void multiply_by_tiles(const LinearArguments& given) {
    static thread_local std::vector<Line> lines;  // kept: new memory costs more than what is written to it
    const int64_t block = given.num_inputs / 2, whole = given.num_outputs / kLanes, rest = given.num_outputs % kLanes;
    // As many rows at a time as stay in the cache while all weights pass.
    const int64_t at_a_time = std::max<int64_t>(2, kCachedBytes / (block * sizeof(Line)) / 2 * 2);
    const int64_t num_blocks = (given.num_rows + kLanes - 1) / kLanes, num_panels = (whole + 1) / 2;
    lines.resize(std::min(at_a_time, num_blocks) * block);
    Line* x = lines.data();
#pragma omp parallel num_threads((int)given.num_threads) if (is_threaded(given))
    for (int64_t first = 0; first < num_blocks; first += at_a_time) {
        const int64_t count = std::min(at_a_time, num_blocks - first);
        const int64_t end = std::min(given.num_rows, (first + count) * kLanes);
        const int64_t part = part_tiles(given, num_panels, (count + 1) / 2) * 2;
        const int64_t num_parts = (count + part - 1) / part;
        TileShapes shapes;
        use(shapes);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < count; ++b) pack_rows(given, (first + b) * kLanes, x + b * block);
#pragma omp for collapse(2) schedule(static)
        for (int64_t p = 0; p < num_panels; ++p)
            for (int64_t q = 0; q < num_parts; ++q) {
                const int64_t row = (first + q * part) * kLanes, stop = std::min(end, row + part * kLanes);
                two_tiles_of_outputs(given, x + q * part * block, row, stop, 2 * p * kLanes);
            }
        if (rest) {
            shapes.rows[0] = shapes.rows[4] = (uint8_t)rest;
            use(shapes);
#pragma omp for schedule(static)
            for (int64_t b = 0; b < count; ++b)
                one_tile(given, x + b * block, (first + b) * kLanes, whole * kLanes, (int)rest);
        }
        _tile_release();
    }
}

}  // namespace

// 1 if the system lets this process use the tiles, for which it must be asked.
extern "C" int64_t linear_has_tiles() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool has_tiles = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return has_tiles;
}

// y = x weight^T + bias in bfloat16 with the weight as it lies, dense; a multiple of 32 inputs.
extern "C" void linear_by_tiles(const LinearArguments* given) { multiply_by_tiles(*given); }

#else

extern "C" int64_t linear_has_tiles() { return 0; }
extern "C" void linear_by_tiles(const LinearArguments*) {}

#endif
