// Selection by votes and the weighted sum of what was selected, in one pass; torch_impl.py is the definition.
//
// A selected number is read and written once, past the caches where the outputs are larger than they are. Rows go in
// blocks, columns in tiles of kColumns; a block and tile is summed in float32 in the order of its rows, and the blocks
// in float64 in theirs. So no bit depends on the number of threads, but the last ones may on the rows of a block.
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

constexpr int64_t kBlockRows = 256;          // unless the caller names another number
constexpr int64_t kColumns = 1024;           // of a tile: its sums and some rows of it fit the first-level cache
constexpr int64_t kAheadBytes = 1 << 14;     // that are fetched before they are used, in whole rows
constexpr int64_t kMostAhead = 32;           // rows that are fetched before they are used
constexpr int kGroup = 8;                    // rows that are added to the sums together, past the caches
constexpr int kCachedGroup = 2;              // and within them
constexpr int64_t kLineBytes = 64;
constexpr int64_t kThreadedWork = 32768;     // numbers from which on a second thread is worth its start
constexpr int64_t kStreamedBytes = 3 << 20;  // of output, from which on it is written past the caches

struct Sizes {
    int64_t num_rows, n, stride[2], block_rows;
    bool has_lines;                          // rows of the result are whole lines of the cache; sums are in their order
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

// Other threads see all streamed stores of this one as done.
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

// A line of the cache as it stands in memory, and the vectors of float32 that its numbers make: one of float32, two of
// bfloat16. These are the numbers in even and in odd places, which are told apart by a shift and a mask; putting them
// in order would take three times as many instructions.
template <class T> struct Line;

template <> struct Line<float> {
    static constexpr int kVectors = 1;
    static Floats wide(Ints bits, int) { return (Floats)bits; }
    static Ints narrow(const Floats* values) { return (Ints)values[0]; }
};

template <> struct Line<uint16_t> {
    static constexpr int kVectors = 2;
    static Floats wide(Ints bits, int odd) { return (Floats)(odd ? bits & (int32_t)0xffff0000 : bits << 16); }
    static Ints narrow(const Floats* values) {
        Ints even = __builtin_convertvector(to_nearest_halves(values[0]), Ints);
        return even | __builtin_convertvector(to_nearest_halves(values[1]), Ints) << 16;
    }
};

inline Ints bits_at(const void* from) {
    Ints bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

// Into the first-level cache; past the second where the result goes past it too, so that what is there stays.
template <bool streams> inline TUNESMITH_INLINE void fetch(const void* from) {
    __builtin_prefetch(from, 0, streams ? 0 : 3);
}

template <bool streams> inline TUNESMITH_INLINE void put(void* to, Ints bits) {
    if (streams)
        stream(to, bits);
    else
        plain(to, bits);
}

inline bool is_tied(float choice) { return choice == 0.5f; }

// Some selected rows of a tile, none of them a tie, each a number of whole lines: a sum is loaded and stored once for
// all. It runs in the order of the rows, so its bits are those of one row at a time. `to` is where the first row goes,
// `step` the distance of the next, `ahead` what to fetch meanwhile.
template <class T, int rows, bool streams>
inline TUNESMITH_INLINE void select_lines(const T* const* from, const T* const* ahead, T* to, int64_t step,
                                          const float* votes, float* sum, int64_t n) {
    constexpr int64_t kNumbers = kLineBytes / sizeof(T);
    for (int64_t i = 0; i < n; i += kNumbers) {
        Floats total[Line<T>::kVectors];
        for (int v = 0; v < Line<T>::kVectors; ++v) total[v] = load(sum + i + v * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row) {
            fetch<streams>(ahead[row] + i);
            Ints bits = bits_at(from[row] + i);
            for (int v = 0; v < Line<T>::kVectors; ++v) total[v] += splat(votes[row]) * Line<T>::wide(bits, v);
            put<streams>(to + row * step + i, bits);
        }
        for (int v = 0; v < Line<T>::kVectors; ++v) store(sum + i + v * kLanes, total[v]);
    }
}

// The mean of both rows, as `select_lines`.
template <class T, bool streams>
void mean_lines(const T* a, const T* b, const T* ahead, T* to, float vote, float* sum, int64_t n) {
    constexpr int64_t kNumbers = kLineBytes / sizeof(T);
    for (int64_t i = 0; i < n; i += kNumbers) {
        fetch<streams>(ahead + i);
        Ints bits_a = bits_at(a + i), bits_b = bits_at(b + i);
        Floats mean[Line<T>::kVectors];
        for (int v = 0; v < Line<T>::kVectors; ++v) {
            mean[v] = 0.5f * Line<T>::wide(bits_a, v) + 0.5f * Line<T>::wide(bits_b, v);
            store(sum + i + v * kLanes, load(sum + i + v * kLanes) + splat(vote) * mean[v]);
        }
        put<streams>(to + i, Line<T>::narrow(mean));
    }
}

// The rows of a block and the columns of a tile. Pairs of B and A.
template <class T> struct Tile {
    const T* of[2];
    const float *choices, *votes;
    T* selected;
    const Sizes& sizes;
    int64_t first, end, n, num_ahead;

    const T* row_of(int is_a, int64_t row) const { return of[is_a] + row * sizes.stride[is_a]; }
    // No branch: votes would make it unpredictable.
    const T* source(int64_t row) const { return row_of(choices[row] >= 0.5f, row); }
    const T* ahead(int64_t row) const { return source(std::min(row + num_ahead, sizes.num_rows - 1)); }
    T* target(int64_t row) const { return selected + row * sizes.n; }
    float vote(int64_t row) const { return votes ? votes[row] : 1.0f; }
};

// `rows` rows from `row` on, none of them a tie.
template <class T, int rows, bool streams> inline void select_group(const Tile<T>& tile, int64_t row, float* sum) {
    const T *from[rows], *ahead[rows];
    float votes[rows];
    for (int i = 0; i < rows; ++i) {
        from[i] = tile.source(row + i);
        ahead[i] = tile.ahead(row + i);
        votes[i] = tile.vote(row + i);
    }
    select_lines<T, rows, streams>(from, ahead, tile.target(row), tile.sizes.n, votes, sum, tile.n);
}

template <class T, bool streams> void select_tie(const Tile<T>& tile, int64_t row, float* sum) {
    mean_lines<T, streams>(tile.row_of(1, row), tile.row_of(0, row), tile.ahead(row), tile.target(row), tile.vote(row),
                           sum, tile.n);
}

// Whole lines throughout; `sum` is in their order.
template <class T, bool streams> void select_whole(const Tile<T>& tile, float* sum) {
    constexpr int kRows = streams ? kGroup : kCachedGroup;
    for (int64_t row = tile.first; row < tile.end;) {
        int64_t most = std::min<int64_t>(kRows, tile.end - row), count = 0;  // rows before the next tie
        while (count < most && !is_tied(tile.choices[row + count])) ++count;
        if (count == kRows)
            select_group<T, kRows, streams>(tile, row, sum);
        else if (count >= kRows / 2)
            select_group<T, kRows / 2, streams>(tile, row, sum), count = kRows / 2;
        else if (count)
            select_group<T, 1, streams>(tile, row, sum), count = 1;
        else
            select_tie<T, streams>(tile, row, sum), count = 1;
        row += count;
    }
}

template <class T, bool streams> void select_any(const Tile<T>& tile, float* sum) {
    for (int64_t row = tile.first; row < tile.end; ++row)
        if (is_tied(tile.choices[row]))
            select_row<T, true, streams>(tile.row_of(1, row), tile.row_of(0, row), tile.ahead(row), tile.target(row),
                                         tile.vote(row), sum, tile.n);
        else
            select_row<T, false, streams>(tile.source(row), nullptr, tile.ahead(row), tile.target(row), tile.vote(row),
                                          sum, tile.n);
}

template <class T, bool streams> void select_tile(const Tile<T>& tile, float* sum) {
    std::fill(sum, sum + tile.n, 0.0f);
    if (tile.sizes.has_lines)
        select_whole<T, streams>(tile, sum);
    else
        select_any<T, streams>(tile, sum);
}

template <class T>
void select_all(const T* a, const T* b, const float* choices, const float* votes, T* selected, const float* weights,
                float* updated, const Sizes& sizes, double scale, int num_threads) {
    int64_t rows = sizes.block_rows, num_tiles = (sizes.n + kColumns - 1) / kColumns;
    int64_t num_blocks = (sizes.num_rows + rows - 1) / rows;
    std::unique_ptr<float[]> sums(new float[num_blocks * sizes.n]);
    bool streams = sizes.num_rows * sizes.n * (int64_t)sizeof(T) >= kStreamedBytes;
    auto work = streams ? select_tile<T, true> : select_tile<T, false>;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && sizes.num_rows * sizes.n > kThreadedWork)
    {
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < num_blocks * num_tiles; ++task) {
            int64_t block = task / num_tiles, column = task % num_tiles * kColumns, first = block * rows;
            int64_t n = std::min(kColumns, sizes.n - column), row_bytes = n * (int64_t)sizeof(T);
            int64_t num_ahead = std::clamp<int64_t>((kAheadBytes + row_bytes - 1) / row_bytes, kGroup, kMostAhead);
            int64_t end = std::min(first + rows, sizes.num_rows);
            work({{b + column, a + column}, choices, votes, selected + column, sizes, first, end, n, num_ahead},
                 sums.get() + block * sizes.n + column);
        }
        if (streams) end_of_streams();
    }
    std::vector<double> total(sizes.n, 0.0);
    for (int64_t block = 0; block < num_blocks; ++block)
        for (int64_t i = 0; i < sizes.n; ++i) total[i] += sums[block * sizes.n + i];
    auto update = [&](int64_t i, int64_t place) { updated[i] = (float)(weights[i] + scale * total[place]); };
    constexpr int kVectors = Line<T>::kVectors;
    if (!sizes.has_lines || kVectors == 1) {
        for (int64_t i = 0; i < sizes.n; ++i) update(i, i);
        return;
    }
    for (int64_t i = 0; i < sizes.n; i += kVectors * kLanes)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int v = 0; v < kVectors; ++v) update(i + lane * kVectors + v, i + v * kLanes + lane);
}

inline bool is_unknown(float choice) { return (choice != 0.0f) & (choice != 0.5f) & (choice != 1.0f); }

// The index of the first choice that is none of 0, 1/2 and 1, or -1.
int64_t first_unknown(const float* choices, int64_t num_rows) {
    int32_t any = 0;
    for (int64_t row = 0; row < num_rows; ++row) any |= is_unknown(choices[row]);
    int64_t row = 0;
    while (any && !is_unknown(choices[row])) ++row;
    return any ? row : -1;
}

}  // namespace

// Rows of a and b are found by their strides; selected is [num_rows, n] without gaps, choices and votes are [num_rows],
// weights and updated [n] and may be the same. votes may be null. `block_rows` is the number of rows whose sum is in
// float32; 0 is kBlockRows. `unknown` gets the index of the first choice that is none of 0, 1/2 and 1, or -1; if there
// is one nothing else is written.
extern "C" void select_and_update(const void* a, const void* b, const float* choices, const float* votes,
                                  void* selected, const float* weights, float* updated, int64_t* unknown,
                                  int64_t num_rows, int64_t n, int64_t a_stride, int64_t b_stride, int64_t block_rows,
                                  double scale, int64_t is_bfloat16, int64_t num_threads) {
    *unknown = first_unknown(choices, num_rows);
    if (*unknown >= 0) return;
    bool has_lines = n * (is_bfloat16 ? 2 : 4) % kLineBytes == 0 && (uintptr_t)selected % kLineBytes == 0;
    Sizes sizes{num_rows, n, {b_stride, a_stride}, block_rows ? block_rows : kBlockRows, has_lines};
    if (is_bfloat16)
        select_all((const uint16_t*)a, (const uint16_t*)b, choices, votes, (uint16_t*)selected, weights, updated,
                   sizes, scale, (int)num_threads);
    else
        select_all((const float*)a, (const float*)b, choices, votes, (float*)selected, weights, updated, sizes, scale,
                   (int)num_threads);
}
