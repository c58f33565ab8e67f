// Norms of gradients, and AdamW in one pass over gradient, moments, master and 16-bit weight; torch_impl.py is the
// definition. Blocks of a fixed size are shared out among the threads, so no bit depends on how many there are.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector.hpp"

using namespace tunesmith;

// The fields are those of the structures of the same names in api.py.
struct Gradient {
    const void* values;
    int64_t size;
    int64_t is_bfloat16;
};

struct Parameter {
    Gradient gradient;
    float* master;
    uint16_t* weight;        // null where the master is the weight
    void* exp_avg;           // float, or codes of 8 bits
    void* exp_avg_sq;        // float, or codes of its root
    float* exp_avg_scale;    // null for float moments; else one for each kCoded elements
    float* exp_avg_sq_scale;
    uint32_t seed;           // of the rounding to codes
    float step_size;         // learning rate / (1 - beta1^t)
    float keep;              // 1 - learning rate * weight decay
    float root_factor;       // 1 / sqrt(1 - beta2^t)
};

struct Settings {
    float gradient_factor;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    const float* signed_levels;    // 128 magnitudes, ascending from 0 to 1
    const float* unsigned_levels;  // 256
};

namespace {

constexpr int64_t kBlock = 16384;  // elements; all that a block touches fits into a second-level cache
constexpr int64_t kCoded = 256;    // elements that share a scale; divides kBlock

// Which tensor a block belongs to: `first[i]` is the number of the first block of tensor i.
struct Blocks {
    std::vector<int64_t> first{0};

    void add(int64_t size) { first.push_back(first.back() + (size + kBlock - 1) / kBlock); }

    int64_t total() const { return first.back(); }

    int64_t tensor_of(int64_t block) const {
        return std::upper_bound(first.begin(), first.end(), block) - first.begin() - 1;
    }
};

// Calls `work(block, tensor, offset of the block in the tensor)` for each block.
template <class Work> void each_block(const Blocks& blocks, int64_t num_threads, Work work) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1 && blocks.total() > 2)
    for (int64_t block = 0; block < blocks.total(); ++block) {
        int64_t tensor = blocks.tensor_of(block);
        work(block, tensor, (block - blocks.first[tensor]) * kBlock);
    }
}

inline TUNESMITH_INLINE Floats root_of(Floats values) {
    float lane[kLanes];
    store(lane, values);
    for (float& value : lane) value = std::sqrt(value);
    return load(lane);
}

// In float64: no square of a float32 overflows there, so the sum is finite where all elements are.
template <class T> double sum_of_squares(const T* from, int64_t size) {
    double sum[kLanes] = {};
    each_vector(size, [&](int64_t i, int count) TUNESMITH_INLINE {
        float values[kLanes];
        store(values, load(from + i, count));
        for (int lane = 0; lane < kLanes; ++lane) sum[lane] += (double)values[lane] * values[lane];
    });
    for (int lane = 0; lane < kLanes / 2; ++lane) sum[lane] += sum[lane + kLanes / 2];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

template <class A, class B>
void add(const void* a, const void* b, float* sum, int64_t begin, int64_t size) {
    const A* from_a = (const A*)a + begin;
    const B* from_b = (const B*)b + begin;
    each_vector(size, [&](int64_t i, int count) TUNESMITH_INLINE {
        store(sum + begin + i, load(from_a + i, count) + load(from_b + i, count), count);
    });
}

// One vector of elements: moments `m` and `v` are brought up to date, master and weight at `at` are written.
template <class T>
inline TUNESMITH_INLINE void advance(const Parameter& p, const Settings& s, int64_t at, int count, Floats& m,
                                     Floats& v) {
    Floats g = load((const T*)p.gradient.values + at, count) * s.gradient_factor;
    m = m + (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + g * g * s.one_minus_beta2;
    Floats x = load(p.master + at, count) * p.keep - m * p.step_size / (root_of(v) * p.root_factor + s.eps);
    store(p.master + at, x, count);
    if (!p.weight) return;
    Halves halves = to_nearest_halves(x);
    std::memcpy(p.weight + at, &halves, count * sizeof(uint16_t));
}

template <class T> void update(const Parameter& p, const Settings& s, int64_t begin, int64_t size) {
    float *exp_avg = (float*)p.exp_avg + begin, *exp_avg_sq = (float*)p.exp_avg_sq + begin;
    each_vector(size, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats m = load(exp_avg + i, count), v = load(exp_avg_sq + i, count);
        advance<T>(p, s, begin + i, count, m, v);
        store(exp_avg + i, m, count);
        store(exp_avg_sq + i, v, count);
    });
}

// Rounds magnitudes in [0, 1] to levels: a table over the upper bits of the float leads to the level below or to the one
// before it, since no two levels share a cell.
class Levels {
public:
    Levels(const float* levels, int count) : values(levels, levels + count), table_(kCells) {
        values.push_back(2.0f);  // so that the highest has a neighbour; nothing is ever rounded up to it
        for (int cell = 0, code = 0; cell < kCells; ++cell) {
            uint32_t bits = kLowest + ((uint32_t)cell << kShift);
            float edge;
            std::memcpy(&edge, &bits, sizeof edge);
            while (code < count - 1 && values[code + 1] <= edge) ++code;
            table_[cell] = cell ? code : 0;
        }
    }

    // Up or down, up with the probability that makes the mean exact. `chance` is drawn from [0, 1).
    inline TUNESMITH_INLINE int32_t rounded(float magnitude, float chance) const {
        int32_t bits;
        std::memcpy(&bits, &magnitude, sizeof bits);
        int32_t cell = std::max(0, bits - (int32_t)kLowest) >> kShift;
        int32_t code = table_[cell];
        code += values[code + 1] <= magnitude;
        float low = values[code];
        return code + (magnitude - low > chance * (values[code + 1] - low));
    }

    std::vector<float> values;

private:
    static constexpr int kShift = 15;                      // cells of 1 / 256 of an octave
    static constexpr uint32_t kLowest = (127 - 24) << 23;  // 2^-24, below which there is no level but 0
    static constexpr int kCells = (24 << (23 - kShift)) + 1;
    std::vector<int32_t> table_;
};

struct Codes {
    Codes(const Settings& s) : with_sign(s.signed_levels, 128), without_sign(s.unsigned_levels, 256) {
        for (int code = 0; code < 128; ++code) {
            mean_of[code] = s.signed_levels[code];
            mean_of[code + 128] = -s.signed_levels[code];
        }
    }

    Levels with_sign, without_sign;
    float mean_of[256];
};

// A number drawn for element `i`, from the mixer of MurmurHash3.
inline TUNESMITH_INLINE uint32_t drawn(uint32_t seed, uint32_t i) {
    uint32_t x = seed + i * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// The moments of `size` elements that share their scales, from codes to codes.
template <class T>
void update_coded(const Parameter& p, const Settings& s, const Codes& codes, int64_t begin, int64_t size) {
    uint8_t *m_code = (uint8_t*)p.exp_avg + begin, *r_code = (uint8_t*)p.exp_avg_sq + begin;
    float &m_scale = p.exp_avg_scale[begin / kCoded], &r_scale = p.exp_avg_sq_scale[begin / kCoded];
    float m[kCoded] = {}, r[kCoded] = {};
    for (int64_t i = 0; i < size; ++i) {
        m[i] = codes.mean_of[m_code[i]] * m_scale;
        r[i] = codes.without_sign.values[r_code[i]] * r_scale;
    }
    Floats m_largest = {}, r_largest = {};
    each_vector(size, [&](int64_t i, int count) TUNESMITH_INLINE {
        Floats m_now = load(m + i), r_now = load(r + i);
        Floats v = r_now * r_now;
        advance<T>(p, s, begin + i, count, m_now, v);
        r_now = root_of(v);
        m_largest = larger(m_largest, magnitude(m_now));
        r_largest = larger(r_largest, r_now);
        store(m + i, m_now);
        store(r + i, r_now);
    });
    m_scale = largest_of_lanes(m_largest), r_scale = largest_of_lanes(r_largest);
    for (int64_t i = 0; i < kCoded; ++i) {
        m[i] = m_scale > 0 ? m[i] / m_scale : 0;
        r[i] = r_scale > 0 ? r[i] / r_scale : 0;
    }
    int32_t m_new[kCoded], r_new[kCoded];
    for (int64_t i = 0; i < kCoded; ++i) {
        uint32_t random = drawn(p.seed, (uint32_t)(begin + i));
        m_new[i] = codes.with_sign.rounded(std::fabs(m[i]), (float)(int32_t)(random >> 16) * 0x1p-16f);
        m_new[i] |= m[i] < 0 ? 128 : 0;
        // A root of 0 under a mean that is not 0 would be a step without bound.
        int32_t code = codes.without_sign.rounded(r[i], (float)(int32_t)(random & 0xffff) * 0x1p-16f);
        r_new[i] = r[i] > 0 ? std::max(1, code) : 0;
    }
    for (int64_t i = 0; i < size; ++i) {
        m_code[i] = (uint8_t)m_new[i];
        r_code[i] = (uint8_t)r_new[i];
    }
}

}  // namespace

// The sum of the squares of each gradient, into `sums[count]`.
extern "C" void sums_of_squares(const Gradient* gradients, int64_t count, double* sums, int64_t num_threads) {
    Blocks blocks;
    for (int64_t i = 0; i < count; ++i) blocks.add(gradients[i].size);
    std::vector<double> parts(blocks.total());
    each_block(blocks, num_threads, [&](int64_t block, int64_t tensor, int64_t begin) {
        const Gradient& g = gradients[tensor];
        int64_t size = std::min(kBlock, g.size - begin);
        parts[block] = g.is_bfloat16 ? sum_of_squares((const uint16_t*)g.values + begin, size)
                                     : sum_of_squares((const float*)g.values + begin, size);
    });
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = 0;
        for (int64_t block = blocks.first[i]; block < blocks.first[i + 1]; ++block) sums[i] += parts[block];
    }
}

// `sum` = `held` + `gradient`; `sum` and `held` may be one.
extern "C" void add_gradients(const Gradient* held, const Gradient* gradient, float* sum, int64_t num_threads) {
    Blocks blocks;
    blocks.add(gradient->size);
    each_block(blocks, num_threads, [&](int64_t, int64_t, int64_t begin) {
        int64_t size = std::min(kBlock, gradient->size - begin);
        auto work = held->is_bfloat16 ? (gradient->is_bfloat16 ? add<uint16_t, uint16_t> : add<uint16_t, float>)
                                      : (gradient->is_bfloat16 ? add<float, uint16_t> : add<float, float>);
        work(held->values, gradient->values, sum, begin, size);
    });
}

extern "C" void adamw(const Parameter* parameters, int64_t count, const Settings* settings, int64_t num_threads) {
    Blocks blocks;
    for (int64_t i = 0; i < count; ++i) blocks.add(parameters[i].gradient.size);
    Codes codes(*settings);
    each_block(blocks, num_threads, [&](int64_t, int64_t tensor, int64_t begin) {
        const Parameter& p = parameters[tensor];
        int64_t end = std::min(begin + kBlock, p.gradient.size);
        if (!p.exp_avg_scale) {
            auto work = p.gradient.is_bfloat16 ? update<uint16_t> : update<float>;
            return work(p, *settings, begin, end - begin);
        }
        auto work = p.gradient.is_bfloat16 ? update_coded<uint16_t> : update_coded<float>;
        for (int64_t at = begin; at < end; at += kCoded)
            work(p, *settings, codes, at, std::min(kCoded, end - at));
    });
}
