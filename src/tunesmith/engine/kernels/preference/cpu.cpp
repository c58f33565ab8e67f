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
};

// To an address that is a multiple of 64.
inline void stream(void* to, Ints bits) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)to, (__m512i)bits);
#elif defined(__AVX2__)
    _mm256_stream_si256((__m256i*)to, (__m256i)bits.low);
    _mm256_stream_si256((__m256i*)to + 1, (__m256i)bits.high);
#else
    Memory<Ints>::store(to, bits);
#endif
}

// Other threads see all streamed stores of this one as done.
inline void end_of_streams() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// A cache line, and the vectors of float32 that its numbers make: one of float32, two of
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
        Ints even = converted<Ints>(to_nearest_halves(values[0]));
        return even | converted<Ints>(to_nearest_halves(values[1])) << 16;
    }
};

// n, rounded up to whole lines: as many sums are kept, in the order of their lines.
template <class T> inline int64_t whole_lines(int64_t n) {
    constexpr int64_t kNumbers = kLineBytes / sizeof(T);
    return (n + kNumbers - 1) / kNumbers * kNumbers;
}

// The lines of n numbers: `body(i, bytes)` for each from i on, of which the last may have fewer than 64 bytes.
template <class T, class Body> inline TUNESMITH_INLINE void each_line(int64_t n, Body body) {
    constexpr int64_t kNumbers = kLineBytes / sizeof(T);
    int64_t i = 0;
    for (; i + kNumbers <= n; i += kNumbers) body(i, kLineBytes);
    if (i < n) body(i, (n - i) * (int64_t)sizeof(T));
}

inline TUNESMITH_INLINE Ints bits_at(const void* from, int64_t bytes) {
    if (bytes == kLineBytes) return Memory<Ints>::load(from);
    char line[kLineBytes] = {};
    std::memcpy(line, from, bytes);
    return Memory<Ints>::load(line);
}

// Into the first-level cache; past the second where the result goes past it too, so that what is there stays.
template <bool streams> inline TUNESMITH_INLINE void fetch(const void* from) {
    __builtin_prefetch(from, 0, streams ? 0 : 3);
}

template <bool streams> inline TUNESMITH_INLINE void put(void* to, Ints bits, int64_t bytes) {
    if (streams) return stream(to, bits);
    if (bytes == kLineBytes) return Memory<Ints>::store(to, bits);
    char line[kLineBytes];
    Memory<Ints>::store(line, bits);
    std::memcpy(to, line, bytes);
}

inline bool is_tied(float choice) { return choice == 0.5f; }

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

// `rows` rows from `first` on, none of them a tie: a sum is loaded and stored once for all. It runs in the order of the
// rows, so its bits are those of one row at a time.
template <class T, int rows, bool streams> void select_lines(const Tile<T>& tile, int64_t first, float* sum) {
    const T *from[rows], *ahead[rows];
    float votes[rows];
    for (int i = 0; i < rows; ++i) {
        from[i] = tile.source(first + i);
        ahead[i] = tile.ahead(first + i);
        votes[i] = tile.vote(first + i);
    }
    T* to = tile.target(first);
    int64_t step = tile.sizes.n;
    each_line<T>(tile.n, [&](int64_t i, int64_t bytes) TUNESMITH_INLINE {
        Floats total[Line<T>::kVectors];
        for (int v = 0; v < Line<T>::kVectors; ++v) total[v] = load(sum + i + v * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < rows; ++row) {
            fetch<streams>(ahead[row] + i);
            Ints bits = bits_at(from[row] + i, bytes);
            for (int v = 0; v < Line<T>::kVectors; ++v) total[v] += splat(votes[row]) * Line<T>::wide(bits, v);
            put<streams>(to + row * step + i, bits, bytes);
        }
        for (int v = 0; v < Line<T>::kVectors; ++v) store(sum + i + v * kLanes, total[v]);
    });
}

// The mean of both rows, as `select_lines`.
template <class T, bool streams> void mean_lines(const Tile<T>& tile, int64_t row, float* sum) {
    const T *a = tile.row_of(1, row), *b = tile.row_of(0, row), *ahead = tile.ahead(row);
    T* to = tile.target(row);
    float vote = tile.vote(row);
    each_line<T>(tile.n, [&](int64_t i, int64_t bytes) TUNESMITH_INLINE {
        fetch<streams>(ahead + i);
        Ints bits_a = bits_at(a + i, bytes), bits_b = bits_at(b + i, bytes);
        Floats mean[Line<T>::kVectors];
        for (int v = 0; v < Line<T>::kVectors; ++v) {
            mean[v] = 0.5f * Line<T>::wide(bits_a, v) + 0.5f * Line<T>::wide(bits_b, v);
            store(sum + i + v * kLanes, load(sum + i + v * kLanes) + splat(vote) * mean[v]);
        }
        put<streams>(to + i, Line<T>::narrow(mean), bytes);
    });
}

template <class T, bool streams> void select_tile(const Tile<T>& tile, float* sum) {
    constexpr int kRows = streams ? kGroup : kCachedGroup;
    std::fill(sum, sum + whole_lines<T>(tile.n), 0.0f);
    for (int64_t row = tile.first; row < tile.end;) {
        int64_t most = std::min<int64_t>(kRows, tile.end - row), count = 0;  // rows before the next tie
        while (count < most && !is_tied(tile.choices[row + count])) ++count;
        if (count == kRows)
            select_lines<T, kRows, streams>(tile, row, sum);
        else if (count >= kRows / 2)
            select_lines<T, kRows / 2, streams>(tile, row, sum), count = kRows / 2;
        else if (count)
            select_lines<T, 1, streams>(tile, row, sum), count = 1;
        else
            mean_lines<T, streams>(tile, row, sum), count = 1;
        row += count;
    }
}

template <class T>
void select_all(const T* a, const T* b, const float* choices, const float* votes, T* selected, const float* weights,
                float* updated, const Sizes& sizes, double scale, int num_threads) {
    int64_t rows = sizes.block_rows, num_tiles = (sizes.n + kColumns - 1) / kColumns;
    int64_t num_blocks = (sizes.num_rows + rows - 1) / rows;
    int64_t num_sums = whole_lines<T>(sizes.n);
    std::unique_ptr<float[]> sums(new float[num_blocks * num_sums]);
    bool has_lines = num_sums == sizes.n && (uintptr_t)selected % kLineBytes == 0;
    bool streams = has_lines && sizes.num_rows * sizes.n * (int64_t)sizeof(T) >= kStreamedBytes;
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
                 sums.get() + block * num_sums + column);
        }
        if (streams) end_of_streams();
    }
    std::vector<double> total(num_sums, 0.0);
    for (int64_t block = 0; block < num_blocks; ++block)
        for (int64_t i = 0; i < num_sums; ++i) total[i] += sums[block * num_sums + i];
    constexpr int kVectors = Line<T>::kVectors;
    for (int64_t i = 0; i < sizes.n; ++i) {
        int64_t place = i % (kVectors * kLanes);  // in its line, whose numbers in even places are summed first
        place = i - place + place % kVectors * kLanes + place / kVectors;
        updated[i] = (float)(weights[i] + scale * total[place]);
    }
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
    Sizes sizes{num_rows, n, {b_stride, a_stride}, block_rows ? block_rows : kBlockRows};
    with_number(is_bfloat16, [&](auto number) {
        typedef decltype(number) T;
        select_all((const T*)a, (const T*)b, choices, votes, (T*)selected, weights, updated, sizes, scale,
                   (int)num_threads);
    });
}
