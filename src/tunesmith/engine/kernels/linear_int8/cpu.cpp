// Products of rows with a weight in 8 bits. A block of inputs of a row, and of an output's weight, has one scale each;
// its products are summed as integers, so exactly, and the blocks in float32 from first to last. So the bits of a row
// depend on that row alone: not on other rows, nor on threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vector.hpp"

using namespace tunesmith;

struct LinearInt8Arguments {
    const void *x, *panels, *scales, *bias;
    void* y;
    int64_t num_rows, num_inputs, num_outputs, x_stride, num_threads, is_bfloat16;
};

namespace {

// A panel is the weight of `kOutputs` outputs: for each step of `kPerStep` inputs as many numbers of each output. They
// are stored plus 128, without a sign, as the instructions take one factor; what that adds to a sum is 128 times the
// sum of the row's numbers in the block, which is known before. The number of inputs is filled up with zeros to steps.
constexpr int64_t kBlock = 64;  // BLOCK of torch_impl.py
constexpr int kOffset = 128;
constexpr float kMost = 127.0f, kSmallest = 1e-30f;  // a block of smaller numbers is taken as 0
constexpr int64_t kThreadedWork = 1 << 17;  // products from which on a second thread is worth its start

#if defined(__AVX512VNNI__)
#define TUNESMITH_DOT
struct Products {
    typedef int8_t Input;
    static constexpr int kPerStep = 4, kVectors = 3, kTileRows = 5;
    static inline TUNESMITH_INLINE Ints multiply_add(Ints sum, const int8_t* x, const uint8_t* weight) {
        int32_t four;
        std::memcpy(&four, x, sizeof four);
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(weight), _mm512_set1_epi32(four));
    }
};
#elif defined(__AVXVNNI__)
#define TUNESMITH_DOT
struct Products {
    typedef int8_t Input;
    static constexpr int kPerStep = 4, kVectors = 1, kTileRows = 5;
    static inline TUNESMITH_INLINE Ints multiply_add(Ints sum, const int8_t* x, const uint8_t* weight) {
        int32_t four;
        std::memcpy(&four, x, sizeof four);
        const __m256i factor = _mm256_set1_epi32(four);
        return {(Vector<int32_t, 8>)_mm256_dpbusd_avx_epi32((__m256i)sum.low,
                                                            _mm256_loadu_si256((const __m256i*)weight), factor),
                (Vector<int32_t, 8>)_mm256_dpbusd_avx_epi32((__m256i)sum.high,
                                                            _mm256_loadu_si256((const __m256i*)(weight + 32)), factor)};
    }
};
#elif defined(__AVX2__)
#define TUNESMITH_DOT
struct Products {
    typedef int16_t Input;
    static constexpr int kPerStep = 2, kVectors = 1, kTileRows = 6;
    static inline TUNESMITH_INLINE Ints multiply_add(Ints sum, const int16_t* x, const uint8_t* weight) {
        int32_t two;
        std::memcpy(&two, x, sizeof two);
        const __m256i factor = _mm256_set1_epi32(two);
        const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)weight));
        const __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(weight + 16)));
        return {sum.low + (Vector<int32_t, 8>)_mm256_madd_epi16(low, factor),
                sum.high + (Vector<int32_t, 8>)_mm256_madd_epi16(high, factor)};
    }
};
#endif

int64_t num_blocks(int64_t num_inputs) { return (num_inputs + kBlock - 1) / kBlock; }

#ifdef TUNESMITH_DOT

constexpr int kPerStep = Products::kPerStep, kVectors = Products::kVectors, kTileRows = Products::kTileRows;
constexpr int64_t kOutputs = kVectors * kLanes;
typedef Products::Input Input;

int64_t filled(int64_t num_inputs) { return (num_inputs + kPerStep - 1) / kPerStep * kPerStep; }

// Rows in 8 bits, one after the other, with the scale of each block and what its sums begin with.
struct Rows {
    Input* numbers;
    float* scales;
    int32_t* starts;
    int64_t width, blocks;
};

template <class Number> void quantize(const Number* x, int64_t num_inputs, const Rows& to, int64_t row) {
    Input* numbers = to.numbers + row * to.width;
    for (int64_t b = 0; b < to.blocks; ++b) {
        const int64_t start = b * kBlock;
        const int count = (int)std::min(kBlock, num_inputs - start);
        float values[kBlock];
        Floats most = {}, bad = {};
        each_vector(count, [&](int64_t i, int n) TUNESMITH_INLINE {
            const Floats now = load(x + start + i, n);
            Memory<Floats>::store(values + i, now);
            most = larger(magnitude(now), most);
            bad += now * 0.0f;
        });
        const float largest = largest_of_lanes(most), inverse = largest > kSmallest ? kMost / largest : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < count; ++i) {
            const int32_t whole = (int32_t)__builtin_rintf(values[i] * inverse);
            numbers[start + i] = (Input)whole;
            sum += whole;
        }
        to.scales[row * to.blocks + b] = largest / kMost + sum_of_lanes(bad);  // NaN if a number is not finite
        to.starts[row * to.blocks + b] = -kOffset * sum;
    }
    std::fill(numbers + num_inputs, numbers + to.width, 0);
}

template <int R, class Number>
void tile(const LinearInt8Arguments& given, const Rows& rows, int64_t row, const uint8_t* panel, const float* scales,
          Number* y, const Number* bias, int64_t num_outputs, const uint8_t* ahead) {
    Floats total[R][kVectors] = {};
    const Input* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows.numbers + (row + r) * rows.width;
    for (int64_t b = 0; b < rows.blocks; ++b) {
        const int64_t start = b * kBlock, stop = std::min(start + kBlock, rows.width);
        Ints sum[R][kVectors];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kVectors; ++v) sum[r][v] = rows.starts[(row + r) * rows.blocks + b] + Ints{};
        for (int64_t i = start; i < stop; i += kPerStep) {
            const uint8_t* weight = panel + i * kOutputs;
            __builtin_prefetch(ahead + i * kLanes, 0, 2);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < kVectors; ++v)
                    sum[r][v] = Products::multiply_add(sum[r][v], x[r] + i, weight + v * kLanes * kPerStep);
        }
        for (int v = 0; v < kVectors; ++v) {
            const Floats scale = load(scales + b * kOutputs + v * kLanes);
            for (int r = 0; r < R; ++r)
                total[r][v] = fused(converted<Floats>(sum[r][v]), scale * rows.scales[(row + r) * rows.blocks + b],
                                    total[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors && v * kLanes < num_outputs; ++v) {
            const int64_t j = v * kLanes;
            const int count = std::min<int64_t>(kLanes, num_outputs - j);
            const Floats value = total[r][v];
            store(y + (row + r) * given.num_outputs + j, bias ? value + load(bias + j, count) : value, count);
        }
}

// Calls `tile` for `count` rows, at most R.
template <int R, class... Rest> inline TUNESMITH_INLINE void tile_of(int64_t count, const Rest&... rest) {
    if constexpr (R == 1) tile<1>(rest...);
    else if (count == R) tile<R>(rest...);
    else tile_of<R - 1>(count, rest...);
}

template <class Number>
void panel_rows(const LinearInt8Arguments& given, const Rows& rows, int64_t p, int64_t row, int64_t end) {
    const int64_t first = p * kOutputs, num_outputs = std::min(kOutputs, given.num_outputs - first);
    const uint8_t* panel = (const uint8_t*)given.panels + rows.width * first;
    const float* scales = (const float*)given.scales + rows.blocks * first;
    const Number* bias = given.bias ? (const Number*)given.bias + first : nullptr;
    const bool has_one = end - row <= kTileRows;
    for (int number = 0; row < end; ++number) {
        const int64_t count = std::min<int64_t>(kTileRows, end - row);
        // The first tiles ask for a register's share of the next panel each, so that it comes while this one is used. A
        // single tile reads faster than it could ask.
        const int64_t vector = has_one || number >= kVectors ? 0 : kVectors + number;
        const uint8_t* ahead = panel + rows.width * kLanes * vector;
        tile_of<kTileRows>(count, given, rows, row, panel, scales, (Number*)given.y + first, bias, num_outputs, ahead);
        row += count;
    }
}

template <class Number> void multiply(const LinearInt8Arguments& given) {
    static thread_local std::vector<Input> numbers;  // kept: new memory costs more than what is written to it
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> starts;
    const int64_t width = filled(given.num_inputs), blocks = num_blocks(given.num_inputs);
    numbers.resize(given.num_rows * width);
    scales.resize(given.num_rows * blocks);
    starts.resize(given.num_rows * blocks);
    const Rows rows = {numbers.data(), scales.data(), starts.data(), width, blocks};
    const int64_t num_panels = (given.num_outputs + kOutputs - 1) / kOutputs;
    const int64_t num_tiles = (given.num_rows + kTileRows - 1) / kTileRows;
    const int64_t wanted = (4 * given.num_threads + num_panels - 1) / num_panels;  // parts of the rows, for few panels
    const int64_t part_rows = (num_tiles + wanted - 1) / wanted * kTileRows;
    const int64_t num_parts = (given.num_rows + part_rows - 1) / part_rows;
    const int64_t work = given.num_rows * given.num_inputs * given.num_outputs;
    const bool is_threaded = given.num_threads > 1 && work > kThreadedWork;
#pragma omp parallel num_threads((int)given.num_threads) if (is_threaded)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < given.num_rows; ++row)
            quantize((const Number*)given.x + row * given.x_stride, given.num_inputs, rows, row);
#pragma omp for collapse(2) schedule(static)
        for (int64_t p = 0; p < num_panels; ++p)
            for (int64_t part = 0; part < num_parts; ++part)
                panel_rows<Number>(given, rows, p, part * part_rows,
                                   std::min((part + 1) * part_rows, given.num_rows));
    }
}

template <class Number>
void pack_panel(const Number* weight, uint8_t* panel, float* scales, int64_t num_outputs, int64_t num_inputs) {
    const int64_t width = filled(num_inputs), blocks = num_blocks(num_inputs);
    std::vector<Input> numbers(width);
    std::vector<float> of_output(blocks);
    std::vector<int32_t> starts(blocks);
    const Rows row = {numbers.data(), of_output.data(), starts.data(), width, blocks};
    for (int64_t j = 0; j < kOutputs; ++j) {
        if (j < num_outputs) {
            quantize(weight + j * num_inputs, num_inputs, row, 0);
        } else {
            std::fill(numbers.begin(), numbers.end(), 0);
            std::fill(of_output.begin(), of_output.end(), 0.0f);
        }
        for (int64_t i = 0; i < width; i += kPerStep) {
            uint8_t step[kPerStep];
            for (int k = 0; k < kPerStep; ++k) step[k] = (uint8_t)(kOffset + numbers[i + k]);
            std::memcpy(panel + i * kOutputs + j * kPerStep, step, sizeof step);
        }
        for (int64_t b = 0; b < blocks; ++b) scales[b * kOutputs + j] = of_output[b];
    }
}

template <class Number>
void pack(const Number* weight, uint8_t* panels, float* scales, int64_t num_outputs, int64_t num_inputs,
          int64_t num_threads) {
    const int64_t num_panels = (num_outputs + kOutputs - 1) / kOutputs;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t p = 0; p < num_panels; ++p)
        pack_panel(weight + p * kOutputs * num_inputs, panels + p * kOutputs * filled(num_inputs),
                   scales + p * kOutputs * num_blocks(num_inputs), num_outputs - p * kOutputs, num_inputs);
}

// Rows of the weight that a panel stands for. Numbers of a block are put in the order of rows before they are read: a
// load that follows narrower stores to the same bytes has to wait for them.
template <class Number>
void unpack_panel(const uint8_t* panel, const float* scales, Number* weight, int64_t num_outputs, int64_t num_inputs) {
    const int64_t rows = std::min(kOutputs, num_outputs);
    for (int64_t b = 0; b < num_blocks(num_inputs); ++b) {
        const int64_t start = b * kBlock, width = std::min(kBlock, filled(num_inputs) - start);
        uint8_t numbers[kOutputs][kBlock];
        for (int64_t i = 0; i < width; i += kPerStep)
            for (int64_t j = 0; j < kOutputs; ++j)
                std::memcpy(numbers[j] + i, panel + (start + i) * kOutputs + j * kPerStep, kPerStep);
        for (int64_t j = 0; j < rows; ++j) {
            const float scale = scales[b * kOutputs + j];
            float values[kBlock];
            for (int64_t i = 0; i < width; ++i) values[i] = (float)((int)numbers[j][i] - kOffset) * scale;
            each_vector(std::min(kBlock, num_inputs - start), [&](int64_t i, int n) TUNESMITH_INLINE {
                store(weight + j * num_inputs + start + i, load(values + i, n), n);
            });
        }
    }
}

template <class Number>
void unpack(const uint8_t* panels, const float* scales, Number* weight, int64_t num_outputs, int64_t num_inputs,
            int64_t num_threads) {
    const int64_t num_panels = (num_outputs + kOutputs - 1) / kOutputs;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t p = 0; p < num_panels; ++p)
        unpack_panel(panels + p * kOutputs * filled(num_inputs), scales + p * kOutputs * num_blocks(num_inputs),
                     weight + p * kOutputs * num_inputs, num_outputs - p * kOutputs, num_inputs);
}

#endif

}  // namespace

#ifdef TUNESMITH_DOT

// Outputs of a panel; 0 where there is no kernel.
extern "C" int64_t linear_int8_panel_outputs() { return kOutputs; }

// Numbers of an output in a panel.
extern "C" int64_t linear_int8_width(int64_t num_inputs) { return filled(num_inputs); }

// `panels` and `scales` have a whole number of panels; what is beyond the outputs is 0.
extern "C" void linear_int8_pack(const void* weight, void* panels, void* scales, int64_t num_outputs,
                                 int64_t num_inputs, int64_t num_threads, int64_t is_bfloat16) {
    with_number(is_bfloat16, [&](auto number) {
        pack((const decltype(number)*)weight, (uint8_t*)panels, (float*)scales, num_outputs, num_inputs, num_threads);
    });
}

// The weight that `panels` and `scales` stand for.
extern "C" void linear_int8_unpack(const void* panels, const void* scales, void* weight, int64_t num_outputs,
                                   int64_t num_inputs, int64_t num_threads, int64_t is_bfloat16) {
    with_number(is_bfloat16, [&](auto number) {
        unpack((const uint8_t*)panels, (const float*)scales, (decltype(number)*)weight, num_outputs, num_inputs,
               num_threads);
    });
}

// y = x weight^T + bias; rows of x are `x_stride` apart, rows of y `num_outputs`.
extern "C" void linear_int8(const LinearInt8Arguments* given) {
    if (given->num_rows) with_number(given->is_bfloat16, [&](auto number) { multiply<decltype(number)>(*given); });
}

#else

extern "C" int64_t linear_int8_panel_outputs() { return 0; }

#endif
