// Vectors of 16 floats, in the notation that GCC and Clang share; each processor gets the instructions it has.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For functions and lambdas on vectors: a call would pass each of them through memory.
#define TUNESMITH_INLINE __attribute__((always_inline))

namespace tunesmith {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

// GCC keeps a vector that is wider than a register in memory, and each operation on it loads and stores. So such a
// vector is two of half the width here.
template <class T, int N> struct Halved;

template <class T, int N, bool fits = N * (sizeof(T) > 4 ? sizeof(T) : 4) <= kRegisterBytes> struct VectorOf {
    typedef T Type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N> struct VectorOf<T, N, false> {
    typedef Halved<T, N> Type;
};

// N numbers. Vectors of N narrow numbers are divided as those of N floats are, so that one converts to the other.
template <class T, int N> using Vector = typename VectorOf<T, N>::Type;

template <class T, int N> struct Halved {
    typedef Vector<T, N / 2> Half;
    Half low, high;
    T operator[](int lane) const { return lane < N / 2 ? low[lane] : high[lane - N / 2]; }
    template <class U> inline TUNESMITH_INLINE explicit operator Halved<U, N>() const {
        return {(Vector<U, N / 2>)low, (Vector<U, N / 2>)high};
    }
};

template <int N, class Half> inline TUNESMITH_INLINE auto joined(Half low, Half high) {
    return Halved<std::decay_t<decltype(low[0])>, N>{low, high};
}

// The operators of vectors, half by half.
#define TUNESMITH_LANEWISE(op)                                                                                \
    template <class T, int N> inline TUNESMITH_INLINE auto operator op(Halved<T, N> a, Halved<T, N> b) {      \
        return joined<N>(a.low op b.low, a.high op b.high);                                                   \
    }                                                                                                         \
    template <class T, int N> inline TUNESMITH_INLINE auto operator op(Halved<T, N> a, std::decay_t<T> b) {   \
        return joined<N>(a.low op b, a.high op b);                                                            \
    }                                                                                                         \
    template <class T, int N> inline TUNESMITH_INLINE auto operator op(std::decay_t<T> a, Halved<T, N> b) {   \
        return joined<N>(a op b.low, a op b.high);                                                            \
    }
#define TUNESMITH_ASSIGNED(op)                                                                                \
    TUNESMITH_LANEWISE(op)                                                                                    \
    template <class T, int N, class B> inline TUNESMITH_INLINE void operator op##=(Halved<T, N>& a, B b) {    \
        a = a op b;                                                                                           \
    }
TUNESMITH_LANEWISE(<)
TUNESMITH_LANEWISE(>)
TUNESMITH_LANEWISE(==)
TUNESMITH_LANEWISE(!=)
TUNESMITH_LANEWISE(<<)
TUNESMITH_LANEWISE(>>)
TUNESMITH_LANEWISE(/)
TUNESMITH_ASSIGNED(+)
TUNESMITH_ASSIGNED(-)
TUNESMITH_ASSIGNED(*)
TUNESMITH_ASSIGNED(&)
TUNESMITH_ASSIGNED(|)
#undef TUNESMITH_ASSIGNED
#undef TUNESMITH_LANEWISE

template <class T, int N> inline TUNESMITH_INLINE Halved<T, N> operator-(Halved<T, N> a) { return {-a.low, -a.high}; }

// a where the mask is set, else b.
template <class Mask, class V> inline TUNESMITH_INLINE V where(Mask mask, V a, V b) { return mask ? a : b; }

template <class T, int N>
inline TUNESMITH_INLINE Halved<T, N> where(Halved<int32_t, N> mask, Halved<T, N> a, Halved<T, N> b) {
    return {where(mask.low, a.low, b.low), where(mask.high, a.high, b.high)};
}

// Each number converted to that of the vector To.
template <class To, class From> inline TUNESMITH_INLINE To converted(From from) {
    return __builtin_convertvector(from, To);
}

template <class To, class T, int N> inline TUNESMITH_INLINE To converted(Halved<T, N> from) {
    return {converted<typename To::Half>(from.low), converted<typename To::Half>(from.high)};
}

template <class V> struct Memory {
    static inline TUNESMITH_INLINE V load(const void* from) {
        V values;
        std::memcpy(&values, from, sizeof values);
        return values;
    }
    static inline TUNESMITH_INLINE void store(void* to, V values) { std::memcpy(to, &values, sizeof values); }
};

template <class T, int N> struct Memory<Halved<T, N>> {
    typedef Memory<Vector<T, N / 2>> Half;
    static constexpr int kHalfBytes = N / 2 * sizeof(T);
    static inline TUNESMITH_INLINE Halved<T, N> load(const void* from) {
        return {Half::load(from), Half::load((const char*)from + kHalfBytes)};
    }
    static inline TUNESMITH_INLINE void store(void* to, Halved<T, N> values) {
        Half::store(to, values.low);
        Half::store((char*)to + kHalfBytes, values.high);
    }
};

typedef Vector<float, kLanes> Floats;
typedef Vector<int32_t, kLanes> Ints;
typedef Vector<uint16_t, kLanes> Halves;

constexpr Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats splat(float value) { return value - Floats{}; }

// a * b + c, rounded once where the processor has an instruction for it. In `c + a * b` the compiler chooses what to
// fuse: where c is a product too it may take that one, and not the same one in each instance of a template.
#if defined(__AVX512F__)
inline TUNESMITH_INLINE Floats fused(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#else
#if defined(__FMA__) && defined(__AVX2__)
inline TUNESMITH_INLINE Vector<float, 8> fused(Vector<float, 8> a, Vector<float, 8> b, Vector<float, 8> c) {
    return (Vector<float, 8>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(__aarch64__)
inline TUNESMITH_INLINE Vector<float, 4> fused(Vector<float, 4> a, Vector<float, 4> b, Vector<float, 4> c) {
    return (Vector<float, 4>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
template <class V> inline TUNESMITH_INLINE V fused(V a, V b, V c) { return a * b + c; }
#endif
template <int N>
inline TUNESMITH_INLINE Halved<float, N> fused(Halved<float, N> a, Halved<float, N> b, Halved<float, N> c) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}
#endif

inline TUNESMITH_INLINE Floats load(const float* from) { return Memory<Floats>::load(from); }

// bfloat16 is the upper half of a float32.
inline TUNESMITH_INLINE Floats load(const uint16_t* from) {
    return (Floats)(converted<Ints>(Memory<Halves>::load(from)) << 16);
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const uint16_t* from) {
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline TUNESMITH_INLINE void store(float* to, Floats values) { Memory<Floats>::store(to, values); }

// What is left of the values after a store to T and a load from it.
template <class T> Floats rounded(Floats values);

template <> inline Floats rounded<float>(Floats values) { return values; }

// To bfloat16: nearest, ties to even, as torch rounds. A NaN stays one.
inline Halves to_nearest_halves(Floats values) {
    Ints bits = (Ints)values;
    Ints result = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Ints is_nan = values != values;
    return converted<Halves>(where(is_nan, (bits >> 16) | 0x40, result) & 0xffff);
}

#ifdef __AVX512BF16__

// One instruction instead of ten; it takes numbers below 1.2e-38 as 0, which nothing that calls it is sensitive to.
inline Halves to_halves(Floats values) { return (Halves)_mm512_cvtneps_pbh((__m512)values); }

#else

inline Halves to_halves(Floats values) { return to_nearest_halves(values); }

#endif

template <> inline Floats rounded<uint16_t>(Floats values) {
    return (Floats)(converted<Ints>(to_halves(values)) << 16);
}

inline TUNESMITH_INLINE void store(uint16_t* to, Floats values) { Memory<Halves>::store(to, to_halves(values)); }

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(uint16_t* to, float value) {
    uint16_t lane[kLanes];
    store(lane, splat(value));
    *to = lane[0];
}

// The first `count` elements; the other lanes are 0.
template <class T> inline TUNESMITH_INLINE Floats load(const T* from, int count) {
    if (count == kLanes) return load(from);
    T lane[kLanes] = {};
    std::memcpy(lane, from, count * sizeof(T));
    return load(lane);
}

// The first `count` lanes.
template <class T> inline TUNESMITH_INLINE void store(T* to, Floats values, int count) {
    if (count == kLanes) return store(to, values);
    T lane[kLanes];
    store(lane, values);
    std::memcpy(to, lane, count * sizeof(T));
}

// The vectors of a row of n elements: `body(i, count)` for 16 elements from i on, and once for what is left.
template <class Body> inline TUNESMITH_INLINE void each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, (int)(n - i));
}

// Calls `work` with a number of the dtype: uint16_t for bfloat16, else float.
template <class Work> void with_number(bool is_bfloat16, Work work) {
    if (is_bfloat16) work(uint16_t());
    else work(float());
}

// Calls `work(row)` for each of the rows of n elements. Below 32768 elements a second thread costs more than it gives.
template <class Work> void each_row(int64_t num_rows, int64_t n, int64_t num_threads, Work work) {
    bool is_worth_it = num_threads > 1 && num_rows > 1 && num_rows * n > 32768;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_worth_it)
    for (int64_t i = 0; i < num_rows; ++i) work(i);
}

inline Floats larger(Floats a, Floats b) { return where(a > b, a, b); }

// The lower and the upper half of N floats; of a copy, because a vector whose address is taken stays in memory.
template <int N, class V> inline TUNESMITH_INLINE Halved<float, N> halved(V values) {
    Halved<float, N> halves;
    std::memcpy(&halves, &values, sizeof halves);
    return halves;
}

// Result of `fold` over the lanes, pairwise, in an order that does not depend on the width of the processor's registers.
template <class Fold> inline TUNESMITH_INLINE float folded_lanes(Floats values, Fold fold) {
    auto sixteen = halved<16>(values);
    auto eight = halved<8>(fold(sixteen.low, sixteen.high));
    auto last = fold(eight.low, eight.high);
    float first = fold(last[0], last[2]), second = fold(last[1], last[3]);
    return fold(first, second);
}

inline float largest_of_lanes(Floats values) {
    return folded_lanes(values, [](auto a, auto b) TUNESMITH_INLINE { return where(a > b, a, b); });
}

inline float sum_of_lanes(Floats values) {
    return folded_lanes(values, [](auto a, auto b) TUNESMITH_INLINE { return a + b; });
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87, where float32 ends. Range reduction by ln 2 in two parts
// (Cody and Waite) and a polynomial of degree 6 with the coefficients of Cephes' expf.
inline Floats exp_of_negative(Floats x) {
    Ints in_range = x > -87.0f;
    Floats y = where(in_range, x, splat(-87.0f));
    // Adding and subtracting 1.5 * 2^23 rounds to a whole number.
    Floats n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    Floats r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (converted<Ints>(n) + 127) << 23;
    Floats result = p * (Floats)power;
    return where(in_range, result, Floats{});
}

inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// 1 / (1 + exp(-x)). A NaN gives a number here: what it is multiplied with must carry it on.
inline Floats sigmoid(Floats x) {
    Floats e = exp_of_negative(-magnitude(x));
    return where(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

// tanh(x), relative error below 3e-7. Near 0, where 1 - exp(-2x) would cancel, a polynomial with the coefficients of
// Cephes' tanhf.
inline Floats tanh_of(Floats x) {
    Floats size = magnitude(x);
    Floats e = exp_of_negative(-2.0f * size);
    Floats far = (1.0f - e) / (1.0f + e);
    Floats z = x * x;
    Floats p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    Floats near = p * z * x + x;
    Floats result = where(size < 0.625f, near, where(x < 0.0f, -far, far));
    return where(x == x, result, x);
}

}  // namespace tunesmith
