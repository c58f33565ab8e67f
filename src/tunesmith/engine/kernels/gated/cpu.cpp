// Gated activations and soft-capping, and their gradients; torch_impl.py is the definition. Each element is computed in
// float32 by itself and rounded once.
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "vector.hpp"

using namespace tunesmith;

namespace {

// x * sigmoid(k(x)), with the slope s + x * k'(x) * s * (1 - s).
template <class Argument> struct Activation {
    Floats value(Floats x) const { return x * sigmoid(Argument::of(x)); }
    Floats slope(Floats x) const {
        Floats argument = Argument::of(x);
        Floats s = sigmoid(argument);
        // For large x sigmoid(-a) is 0 while x * k'(x) may be infinite: then the product with it is 0, as in the limit.
        Floats rest = sigmoid(-argument) * s;
        Floats turn = x * Argument::slope(x) * rest;
        return s + where(rest == 0.0f, Floats{}, turn);
    }
};

struct Silu {
    static Floats of(Floats x) { return x; }
    static Floats slope(Floats) { return splat(1.0f); }
};

// 0.5 * (1 + tanh(y)) is sigmoid(2 * y), with y = sqrt(2 / pi) * (x + 0.044715 * x^3).
struct GeluTanh {
    static constexpr float kTwice = 1.5957691216057308f;
    static Floats of(Floats x) { return x * (x * x * (0.044715f * kTwice) + kTwice); }
    static Floats slope(Floats x) { return x * x * (3 * 0.044715f * kTwice) + kTwice; }
};

// x * P(x), where P is the normal distribution function, half of erfc(-x / sqrt(2)). Its tail is erfc of Numerical Recipes
// (section 6.2, "erfcc"), with a relative error below 1.2e-7.
struct Gelu {
    static Floats distribution(Floats x) {
        Floats z = magnitude(x) * 0.70710678118654752f, t = 1.0f / (1.0f + 0.5f * z);
        Floats p = splat(0.17087277f);
        for (float next : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                           1.00002368f, -1.26551223f})
            p = p * t + next;
        Floats tail = 0.5f * t * exp_of_negative(p - z * z);
        return where(x > 0.0f, 1.0f - tail, tail);
    }
    Floats value(Floats x) const { return x * distribution(x); }
    Floats slope(Floats x) const { return distribution(x) + x * (0.3989422804014327f * exp_of_negative(-0.5f * x * x)); }
};

// The slope is 1 / cosh(x / cap)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x / cap|): without the cancellation of 1 - tanh^2.
struct Softcap {
    float cap;
    Floats value(Floats x) const { return cap * tanh_of(x / cap); }
    Floats slope(Floats x) const {
        Floats e = exp_of_negative(-2.0f * magnitude(x / cap));
        Floats slope = 4.0f * e / ((1.0f + e) * (1.0f + e));
        return where(x == x, slope, x);
    }
};

// Calls `work(function, number)` with the function of this index, and a number of the dtype.
template <class Work> void with_types(int64_t function, float cap, int64_t is_bfloat16, Work work) {
    with_number(is_bfloat16, [&](auto number) {
        if (function == 0) work(Activation<Silu>(), number);
        else if (function == 1) work(Activation<GeluTanh>(), number);
        else if (function == 2) work(Gelu(), number);
        else work(Softcap{cap}, number);
    });
}

}  // namespace

// function(x) * up, or function(x) where `up` is null. Function 0 is silu, 1 gelu_tanh, 2 gelu, 3 the soft-cap. Rows of x and
// up are their strides apart, rows of the rest n.
struct GatedArguments {
    const void *x, *up;
    void* out;
    int64_t num_rows, n, x_stride, up_stride, function, is_bfloat16, num_threads;
    float cap;
};

extern "C" void gated(const GatedArguments* given) {
    const GatedArguments a = *given;
    with_types(a.function, a.cap, a.is_bfloat16, [=](auto of, auto number) {
        typedef decltype(number) T;
        each_row(a.num_rows, a.n, a.num_threads, [=](int64_t i) {
            const T *from = (const T*)a.x + i * a.x_stride, *u = a.up ? (const T*)a.up + i * a.up_stride : nullptr;
            T* to = (T*)a.out + i * a.n;
            each_vector(a.n, [&](int64_t j, int count) TUNESMITH_INLINE {
                Floats value = of.value(load(from + j, count));
                store(to + j, u ? value * load(u + j, count) : value, count);
            });
        });
    });
}

// `up` and `d_up` are null together.
extern "C" void gated_backward(const void* x, const void* up, const void* d_out, void* d_x, void* d_up,
                               int64_t num_rows, int64_t n, int64_t x_stride, int64_t up_stride, int64_t function,
                               int64_t is_bfloat16, int64_t num_threads, float cap) {
    with_types(function, cap, is_bfloat16, [=](auto of, auto number) {
        typedef decltype(number) T;
        each_row(num_rows, n, num_threads, [=](int64_t i) {
            const T *from = (const T*)x + i * x_stride, *u = up ? (const T*)up + i * up_stride : nullptr;
            const T* d = (const T*)d_out + i * n;
            T *to = (T*)d_x + i * n, *to_up = up ? (T*)d_up + i * n : nullptr;
            each_vector(n, [&](int64_t j, int count) TUNESMITH_INLINE {
                Floats value = load(from + j, count), gradient = load(d + j, count);
                if (u) {
                    store(to_up + j, gradient * of.value(value), count);
                    gradient = gradient * load(u + j, count);
                }
                store(to + j, gradient * of.slope(value), count);
            });
        });
    });
}
