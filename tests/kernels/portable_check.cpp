// Calls kernels as they are compiled for another processor, and compares them with sums in double. Prints the number of
// values that are wrong; see test_portable.py.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct LinearArguments {
    const void *x, *weight, *bias;
    void* y;
    int64_t num_rows, num_inputs, num_outputs, block, x_stride, num_threads, is_bfloat16;
};
struct NormArguments {
    const void *x, *residual, *weight;
    void *normed, *sum;
    float* scale;
    int64_t num_rows, n, inner, outer_stride, inner_stride, is_bfloat16, num_threads;
    float epsilon, offset;
};
struct GatedArguments {
    const void *x, *up;
    void* out;
    int64_t num_rows, n, x_stride, up_stride, function, is_bfloat16, num_threads;
    float cap;
};
extern "C" {
int64_t linear_panel_outputs(int64_t);
void linear_pack(const void*, void*, int64_t, int64_t, int64_t, int64_t);
void linear(const LinearArguments*);
void add_rms_norm(const NormArguments*);
void chosen_logp_entropy(const void*, const int64_t*, float*, float*, void*, int64_t, int64_t, int64_t, double, int64_t,
                         int64_t);
void gated(const GatedArguments*);
void masked_softmax(const void*, const int64_t*, const uint8_t*, void*, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, float, int64_t, int64_t);
}

typedef std::vector<float> Numbers;
int num_wrong = 0;

Numbers drawn(int64_t count, unsigned seed) {
    Numbers numbers(count);
    for (float& number : numbers) {
        seed = seed * 1664525u + 1013904223u;
        number = (float)(seed >> 8) / (1 << 22) - 2.0f;
    }
    return numbers;
}

void expect(const char* what, double found, double wanted) {
    if (std::fabs(found - wanted) <= 1e-5 * (1 + std::fabs(wanted))) return;
    ++num_wrong;
    std::printf("%s: %g, not %g\n", what, found, wanted);
}

void check_linear(int64_t inputs, int64_t outputs) {
    int64_t rows = 7, panel = linear_panel_outputs(0), panels = (outputs + panel - 1) / panel;
    Numbers x = drawn(rows * inputs, 1), weight = drawn(outputs * inputs, 2), bias = drawn(outputs, 3);
    Numbers packed(panels * panel * inputs), y(rows * outputs), alone(outputs);
    linear_pack(weight.data(), packed.data(), outputs, inputs, 2, 0);
    LinearArguments given = {x.data(), packed.data(), bias.data(), y.data(), rows, inputs, outputs, 16, inputs, 2, 0};
    linear(&given);
    for (int64_t r = 0; r < rows; ++r) {
        given.x = &x[r * inputs], given.y = alone.data(), given.num_rows = 1;
        linear(&given);
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = bias[o];
            for (int64_t i = 0; i < inputs; ++i) sum += (double)x[r * inputs + i] * weight[o * inputs + i];
            expect("linear", y[r * outputs + o], sum);
            if (alone[o] != y[r * outputs + o]) ++num_wrong, std::printf("linear: other bits for a row alone\n");
        }
    }
}

void check_rows(int64_t rows, int64_t n) {
    Numbers x = drawn(rows * n, 4), weight = drawn(n, 5), normed(rows * n), product(rows * n), softmax(rows * n);
    Numbers scale(rows), logp(rows), entropy(rows);
    std::vector<double> sums(3 * rows);
    std::vector<int64_t> token(rows);
    for (int64_t r = 0; r < rows; ++r) token[r] = (5 * r) % n;
    NormArguments norm = {x.data(), nullptr, weight.data(), normed.data(), nullptr, scale.data(), rows, n, 1, n, 0, 0, 2,
                          1e-5f, 0};
    add_rms_norm(&norm);
    chosen_logp_entropy(x.data(), token.data(), logp.data(), entropy.data(), sums.data(), rows, n, n, 0.7, 0, 2);
    GatedArguments gate = {x.data(), x.data(), product.data(), rows, n, n, n, 0, 0, 2, 0};
    gated(&gate);
    masked_softmax(x.data(), nullptr, nullptr, softmax.data(), rows, 1, 1, n, 0, 0, 1 << 30, 1, 1, 1.0f, 0, 2);
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = &x[r * n];
        double squares = 0, total = 0, plain = 0, nats = 0;
        for (int64_t i = 0; i < n; ++i) {
            squares += (double)row[i] * row[i];
            total += std::exp(row[i] / 0.7), plain += std::exp((double)row[i]);
        }
        for (int64_t i = 0; i < n; ++i) {
            double log_p = row[i] / 0.7 - std::log(total);
            nats -= std::exp(log_p) * log_p;
            expect("rms_norm", normed[r * n + i], row[i] / std::sqrt(squares / n + 1e-5) * weight[i]);
            expect("gated", product[r * n + i], row[i] / (1 + std::exp(-(double)row[i])) * row[i]);
            expect("masked_softmax", softmax[r * n + i], std::exp((double)row[i]) / plain);
        }
        expect("logp", logp[r], row[token[r]] / 0.7 - std::log(total));
        expect("entropy", entropy[r], nats);
    }
}

int main() {
    check_linear(48, 40), check_linear(33, 7);
    check_rows(5, 45), check_rows(3, 128);
    std::printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
