// Gated activations and soft-capping, and their gradients; torch_impl.py is the definition. Each element is computed in
// float32 by itself and rounded once.
#include <cmath>
#include <cstdint>

#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr int64_t kThreadedWork = 32768;  // elements from which on a second thread is worth its start

// An activation is x * sigmoid(k(x)); its slope is s + x * k'(x) * s * (1 - s).
struct Silu {
    static Floats argument(Floats x) { return x; }
    static Floats slope_of_argument(Floats) { return splat(1.0f); }
};

// 0.5 * (1 + tanh(y)) is sigmoid(2 * y), with y = sqrt(2 / pi) * (x + 0.044715 * x^3).
struct GeluTanh {
    static constexpr float kTwice = 1.5957691216057308f;
    static Floats argument(Floats x) { return x * (x * x * (0.044715f * kTwice) + kTwice); }
    static Floats slope_of_argument(Floats x) { return x * x * (3 * 0.044715f * kTwice) + kTwice; }
};

template <class Activation> inline TUNESMITH_INLINE Floats value_of(Floats x) {
    return x * sigmoid(Activation::argument(x));
}

template <class Activation> inline TUNESMITH_INLINE Floats slope_of(Floats x) {
    Floats argument = Activation::argument(x);
    Floats s = sigmoid(argument);
    // Far out sigmoid(-a) is 0 while x * k'(x) may be infinite: then the product with it is 0, as in the limit.
    Floats rest = sigmoid(-argument) * s;
    Floats turn = x * Activation::slope_of_argument(x) * rest;
    return s + (rest == 0.0f ? Floats{} : turn);
}

// Calls `work(row)` for each row.
template <class Work> void each_row(int64_t num_rows, int64_t n, int64_t num_threads, Work work) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) \
    if (num_threads > 1 && num_rows * n > kThreadedWork)
    for (int64_t i = 0; i < num_rows; ++i) work(i);
}

template <class Activation, class T>
void forward(const T* gate, const T* up, T* out, int64_t num_rows, int64_t n, int64_t gate_stride, int64_t up_stride,
             int64_t num_threads) {
    each_row(num_rows, n, num_threads, [&](int64_t i) {
        const T *g = gate + i * gate_stride, *u = up ? up + i * up_stride : nullptr;
        T* to = out + i * n;
        each_vector(n, [&](int64_t j, int count) TUNESMITH_INLINE {
            Floats value = value_of<Activation>(load(g + j, count));
            store(to + j, u ? value * load(u + j, count) : value, count);
        });
    });
}

template <class Activation, class T>
void backward(const T* gate, const T* up, const T* d_out, T* d_gate, T* d_up, int64_t num_rows, int64_t n,
              int64_t gate_stride, int64_t up_stride, int64_t num_threads) {
    each_row(num_rows, n, num_threads, [&](int64_t i) {
        const T *g = gate + i * gate_stride, *u = up ? up + i * up_stride : nullptr, *d = d_out + i * n;
        T *to_gate = d_gate + i * n, *to_up = up ? d_up + i * n : nullptr;
        each_vector(n, [&](int64_t j, int count) TUNESMITH_INLINE {
            Floats x = load(g + j, count), gradient = load(d + j, count);
            if (u) {
                store(to_up + j, gradient * value_of<Activation>(x), count);
                gradient = gradient * load(u + j, count);
            }
            store(to_gate + j, gradient * slope_of<Activation>(x), count);
        });
    });
}

template <class T>
void forward_of(int64_t activation, const void* gate, const void* up, void* out, int64_t num_rows, int64_t n,
                int64_t gate_stride, int64_t up_stride, int64_t num_threads) {
    auto work = activation == 0 ? forward<Silu, T> : forward<GeluTanh, T>;
    work((const T*)gate, (const T*)up, (T*)out, num_rows, n, gate_stride, up_stride, num_threads);
}

template <class T>
void backward_of(int64_t activation, const void* gate, const void* up, const void* d_out, void* d_gate, void* d_up,
                 int64_t num_rows, int64_t n, int64_t gate_stride, int64_t up_stride, int64_t num_threads) {
    auto work = activation == 0 ? backward<Silu, T> : backward<GeluTanh, T>;
    work((const T*)gate, (const T*)up, (const T*)d_out, (T*)d_gate, (T*)d_up, num_rows, n, gate_stride, up_stride,
         num_threads);
}

template <class T>
void cap_forward(const T* x, T* out, int64_t num_rows, int64_t n, int64_t stride, float cap, int64_t num_threads) {
    each_row(num_rows, n, num_threads, [&](int64_t i) {
        each_vector(n, [&](int64_t j, int count) TUNESMITH_INLINE {
            store(out + i * n + j, cap * tanh_of(load(x + i * stride + j, count) / cap), count);
        });
    });
}

// The slope is 1 / cosh(x / cap)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x / cap|): without the cancellation of 1 - tanh^2.
template <class T>
void cap_backward(const T* x, const T* d_out, T* d_x, int64_t num_rows, int64_t n, int64_t stride, float cap,
                  int64_t num_threads) {
    each_row(num_rows, n, num_threads, [&](int64_t i) {
        each_vector(n, [&](int64_t j, int count) TUNESMITH_INLINE {
            Floats value = load(x + i * stride + j, count);
            Floats e = exp_of_negative(-2.0f * magnitude(value / cap));
            Floats slope = 4.0f * e / ((1.0f + e) * (1.0f + e));
            slope = value == value ? slope : value;
            store(d_x + i * n + j, load(d_out + i * n + j, count) * slope, count);
        });
    });
}

}  // namespace

// activation(gate) * up, or activation(gate) where `up` is null. Activation 0 is silu, 1 is gelu_tanh. Rows of gate and
// up are their strides apart, rows of the rest n.
extern "C" void gated(const void* gate, const void* up, void* out, int64_t num_rows, int64_t n, int64_t gate_stride,
                      int64_t up_stride, int64_t activation, int64_t is_bfloat16, int64_t num_threads) {
    auto work = is_bfloat16 ? forward_of<uint16_t> : forward_of<float>;
    work(activation, gate, up, out, num_rows, n, gate_stride, up_stride, num_threads);
}

// `up` and `d_up` are null together.
extern "C" void gated_backward(const void* gate, const void* up, const void* d_out, void* d_gate, void* d_up,
                               int64_t num_rows, int64_t n, int64_t gate_stride, int64_t up_stride,
                               int64_t activation, int64_t is_bfloat16, int64_t num_threads) {
    auto work = is_bfloat16 ? backward_of<uint16_t> : backward_of<float>;
    work(activation, gate, up, d_out, d_gate, d_up, num_rows, n, gate_stride, up_stride, num_threads);
}

extern "C" void softcap(const void* x, void* out, int64_t num_rows, int64_t n, int64_t stride, float cap,
                        int64_t is_bfloat16, int64_t num_threads) {
    if (is_bfloat16)
        cap_forward((const uint16_t*)x, (uint16_t*)out, num_rows, n, stride, cap, num_threads);
    else
        cap_forward((const float*)x, (float*)out, num_rows, n, stride, cap, num_threads);
}

extern "C" void softcap_backward(const void* x, const void* d_out, void* d_x, int64_t num_rows, int64_t n,
                                 int64_t stride, float cap, int64_t is_bfloat16, int64_t num_threads) {
    if (is_bfloat16)
        cap_backward((const uint16_t*)x, (const uint16_t*)d_out, (uint16_t*)d_x, num_rows, n, stride, cap, num_threads);
    else
        cap_backward((const float*)x, (const float*)d_out, (float*)d_x, num_rows, n, stride, cap, num_threads);
}
