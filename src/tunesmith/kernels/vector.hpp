// Vectors of 16 floats, in the notation that GCC and Clang share; each processor gets the instructions it has.
#pragma once

#include <cstdint>
#include <cstring>

namespace tunesmith {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

// bfloat16 is the upper half of a float32.
inline Floats load(const uint16_t* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    Ints bits = __builtin_convertvector(halves, Ints) << 16;
    return (Floats)bits;
}

inline float load_one(const float* from) { return *from; }

inline float load_one(const uint16_t* from) {
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// What is left of the values after a store to T and a load from it.
template <class T> Floats rounded(Floats values);

template <> inline Floats rounded<float>(Floats values) { return values; }

// To bfloat16: nearest, ties to even, as torch rounds. A NaN stays one.
template <> inline Floats rounded<uint16_t>(Floats values) {
    Ints bits = (Ints)values;
    Ints result = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
    Ints is_nan = values != values;
    return (Floats)(is_nan ? bits | 0x400000 : result);
}

inline void store(uint16_t* to, Floats values) {
    Ints upper = (Ints)rounded<uint16_t>(values) >> 16;
    Halves halves = __builtin_convertvector(upper & 0xffff, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline void store_one(float* to, float value) { *to = value; }

inline void store_one(uint16_t* to, float value) {
    uint16_t lane[kLanes];
    store(lane, splat(value));
    *to = lane[0];
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest_lane(Floats values) {
    float result = values[0];
    for (int lane = 1; lane < kLanes; ++lane) result = values[lane] > result ? values[lane] : result;
    return result;
}

// Pairwise, in an order that does not depend on the width of the processor's registers.
inline float sum_of_lanes(Floats values) {
    float lane[kLanes];
    store(lane, values);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87, where float32 ends. Range reduction by ln 2 in two parts
// (Cody and Waite) and a polynomial of degree 6 with the coefficients of Cephes' expf.
inline Floats exp_of_negative(Floats x) {
    Ints in_range = x > -87.0f;
    Floats y = in_range ? x : splat(-87.0f);
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
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats result = p * (Floats)power;
    return in_range ? result : Floats{};
}

}  // namespace tunesmith
