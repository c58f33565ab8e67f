// Selection by votes and the weighted sum of what was selected, in one pass; reference.py is the definition.
//
// A selected number is read and written once, past the caches where the outputs are larger than they are. Rows go in
// blocks of kRows, columns in tiles of kColumns; a block and tile is summed in float32 in the order of its rows, and the
// blocks in float64 in theirs. So no bit depends on the number of threads.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "vector.hpp"

#if defined(__AVX__)
#include <immintrin.h>
#endif

using namespace tunesmith;

namespace {

constexpr int64_t kRows = 256;
constexpr int64_t kColumns = 1024;           // of a tile: its sums and some rows of it fit the first-level cache
constexpr int64_t kAhead = 4096;             // numbers that are fetched before they are used, in whole rows
constexpr int64_t kThreadedWork = 32768;     // numbers from which on a second thread is worth its start
constexpr int64_t kStreamedBytes = 1 << 20;  // of output, from which on it is written past the caches

struct Sizes {
    int64_t num_rows, n, a_stride, b_stride;
};

// 16 numbers as they stand in memory: a selected output is copied without a conversion.
inline Floats raw(const float* from) { return load(from); }

inline Halves raw(const uint16_t* from) {
    Halves values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats wide(Floats values) { return values; }
inline Floats wide(Halves values) { return (Floats)(__builtin_convertvector(values, Ints) << 16); }

inline void narrow(Floats values, Floats& result) { result = values; }
inline void narrow(Floats values, Halves& result) { result = to_nearest_halves(values); }

template <class V> inline void plain(void* to, V values) { std::memcpy(to, &values, sizeof values); }

// To an address that is a multiple of the vector's size.
template <class V> inline void stream(void* to, V values) {
#if defined(__AVX512F__)
    if (sizeof values == 64) {
        __m512i all;
        std::memcpy(&all, &values, 64);
        _mm512_stream_si512((__m512i*)to, all);
        return;
    }
#endif
#if defined(__AVX__)
    __m256i part[sizeof values / 32];
    std::memcpy(part, &values, sizeof values);
    for (size_t i = 0; i < sizeof values / 32; ++i) _mm256_stream_si256((__m256i*)to + i, part[i]);
#else
    plain(to, values);
#endif
}

// Writes see all streamed stores of this thread as done.
inline void end_of_streams() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// One selected row of a tile: `from`, or its mean with `other`. `ahead` is what to fetch meanwhile.
template <class T, bool is_tie, bool streams>
inline TUNESMITH_INLINE void select_row(const T* from, const T* other, const T* ahead, T* to, float weight, float* sum,
                                        int64_t n) {
    typedef decltype(raw(from)) Raw;
    Floats factor = splat(weight);
    auto whole = [&](int64_t i, bool aligned) TUNESMITH_INLINE {
        __builtin_prefetch(ahead + i);
        Raw values = raw(from + i);
        Floats numbers = wide(values);
        if (is_tie) {
            numbers = 0.5f * numbers + 0.5f * wide(raw(other + i));
            narrow(numbers, values);
        }
        store(sum + i, load(sum + i) + factor * numbers);
        if (streams && aligned)
            stream(to + i, values);
        else
            plain(to + i, values);
    };
    auto part = [&](int64_t i, int64_t count) {
        T lane[kLanes] = {}, other_lane[kLanes] = {}, result[kLanes];
        float sums[kLanes] = {};
        std::memcpy(lane, from + i, count * sizeof(T));
        Raw values = raw(lane);
        Floats numbers = wide(values);
        if (is_tie) {
            std::memcpy(other_lane, other + i, count * sizeof(T));
            numbers = 0.5f * numbers + 0.5f * wide(raw(other_lane));
            narrow(numbers, values);
        }
        plain(result, values);
        std::memcpy(to + i, result, count * sizeof(T));
        // As above, in vectors: the bits must not depend on where a row begins.
        std::memcpy(sums, sum + i, count * sizeof(float));
        store(sums, load(sums) + factor * numbers);
        std::memcpy(sum + i, sums, count * sizeof(float));
    };
    int64_t i = 0;
    if (streams) {
        int64_t past = (int64_t)((uintptr_t)to % sizeof(Raw) / sizeof(T));
        if (past) part(0, i = std::min<int64_t>(kLanes - past, n));
    }
    for (; i + kLanes <= n; i += kLanes) whole(i, true);
    if (i < n) part(i, n - i);
}

inline bool none_tied(const float* choices) {
    bool any = false;
    for (int i = 0; i < 4; ++i) any |= !(choices[i] > 0.5f || choices[i] < 0.5f);
    return !any;
}

// Four selected rows of a tile at once, none of them a tie, with their places at multiples of a vector: a sum is loaded
// and stored a quarter as often. The sums run in the order of the rows, so their bits are those of `select_row`.
template <class T, bool streams>
inline TUNESMITH_INLINE void select_four(const T* const* from, const T* const* ahead, T* to, int64_t step,
                                         const float* votes, float* sum, int64_t n) {
    Floats factor[4] = {splat(votes[0]), splat(votes[1]), splat(votes[2]), splat(votes[3])};
    for (int64_t i = 0; i < n; i += kLanes) {
        Floats total = load(sum + i);
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
            __builtin_prefetch(ahead[row] + i);
            auto values = raw(from[row] + i);
            total += factor[row] * wide(values);
            if (streams)
                stream(to + row * step + i, values);
            else
                plain(to + row * step + i, values);
        }
        store(sum + i, total);
    }
}

template <class T, bool streams>
void select_tile(const T* a, const T* b, const float* choices, const float* votes, T* selected, float* sum,
                 const Sizes& sizes, int64_t first_row, int64_t column) {
    int64_t n = std::min(kColumns, sizes.n - column), end = std::min(first_row + kRows, sizes.num_rows);
    int64_t rows_ahead = std::min<int64_t>(32, (kAhead + n - 1) / n);
    auto source = [&](int64_t row) TUNESMITH_INLINE {
        return choices[row] < 0.5f ? b + row * sizes.b_stride + column : a + row * sizes.a_stride + column;
    };
    std::fill(sum, sum + n, 0.0f);
    bool is_even = n % kLanes == 0 && sizes.n * sizeof(T) % 64 == 0 && (uintptr_t)(selected + column) % 64 == 0;
    for (int64_t row = first_row; row < end; ++row) {
        if (is_even && row + 4 <= end && none_tied(choices + row)) {
            const T *from[4], *ahead[4];
            float vote[4];
            for (int i = 0; i < 4; ++i) {
                from[i] = source(row + i);
                ahead[i] = source(std::min(row + i + rows_ahead, end - 1));
                vote[i] = votes ? votes[row + i] : 1.0f;
            }
            select_four<T, streams>(from, ahead, selected + row * sizes.n + column, sizes.n, vote, sum, n);
            row += 3;
            continue;
        }
        const T* ahead = source(std::min(row + rows_ahead, end - 1));
        T* to = selected + row * sizes.n + column;
        float vote = votes ? votes[row] : 1.0f;
        if (choices[row] > 0.5f || choices[row] < 0.5f)
            select_row<T, false, streams>(source(row), nullptr, ahead, to, vote, sum, n);
        else
            select_row<T, true, streams>(a + row * sizes.a_stride + column, b + row * sizes.b_stride + column, ahead,
                                         to, vote, sum, n);
    }
    if (streams) end_of_streams();
}

template <class T>
void select_all(const T* a, const T* b, const float* choices, const float* votes, T* selected, const float* weights,
                float* updated, Sizes sizes, double scale, int num_threads) {
    int64_t num_blocks = (sizes.num_rows + kRows - 1) / kRows, num_tiles = (sizes.n + kColumns - 1) / kColumns;
    std::unique_ptr<float[]> sums(new float[num_blocks * sizes.n]);
    bool streams = sizes.num_rows * sizes.n * (int64_t)sizeof(T) >= kStreamedBytes;
    auto work = streams ? select_tile<T, true> : select_tile<T, false>;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_threads > 1 && sizes.num_rows * sizes.n > kThreadedWork)
    for (int64_t task = 0; task < num_blocks * num_tiles; ++task) {
        int64_t block = task / num_tiles, column = task % num_tiles * kColumns;
        work(a, b, choices, votes, selected, sums.get() + block * sizes.n + column, sizes, block * kRows, column);
    }
    std::vector<double> total(sizes.n, 0.0);
    for (int64_t block = 0; block < num_blocks; ++block)
        for (int64_t i = 0; i < sizes.n; ++i) total[i] += sums[block * sizes.n + i];
    for (int64_t i = 0; i < sizes.n; ++i) updated[i] = (float)(weights[i] + scale * total[i]);
}

}  // namespace

// Rows of a and b are found by their strides; selected is [num_rows, n] without gaps, choices and votes are [num_rows],
// weights and updated [n] and may be the same. votes may be null.
extern "C" void select_and_update(const void* a, const void* b, const float* choices, const float* votes,
                                  void* selected, const float* weights, float* updated, int64_t num_rows, int64_t n,
                                  int64_t a_stride, int64_t b_stride, double scale, int64_t is_bfloat16,
                                  int64_t num_threads) {
    Sizes sizes{num_rows, n, a_stride, b_stride};
    if (is_bfloat16)
        select_all((const uint16_t*)a, (const uint16_t*)b, choices, votes, (uint16_t*)selected, weights, updated,
                   sizes, scale, (int)num_threads);
    else
        select_all((const float*)a, (const float*)b, choices, votes, (float*)selected, weights, updated, sizes, scale,
                   (int)num_threads);
}

// Writes the index of the first choice that is none of 0, 1/2 and 1, or -1.
extern "C" void first_unknown_choice(const float* choices, int64_t num_rows, int64_t* index) {
    int64_t num_known = 0;
    for (int64_t row = 0; row < num_rows; ++row)
        num_known += choices[row] == 0.0f || choices[row] == 0.5f || choices[row] == 1.0f;
    *index = -1;
    for (int64_t row = 0; num_known < num_rows && *index < 0; ++row)
        if (!(choices[row] == 0.0f || choices[row] == 0.5f || choices[row] == 1.0f)) *index = row;
}
