// One token for each row of logits; torch_impl.py is the definition. The vocabulary is never sorted: a filter keeps what
// has at least some weight, and the threshold is found among the few candidates that can matter.
//
// Weights and their sums are those of softmax_row.hpp, in one order, so a row's result depends on that row alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "softmax_row.hpp"
#include "vector.hpp"

using namespace tunesmith;

namespace {

constexpr uint32_t kOneBits = 0x3f800000;  // the float 1, the largest weight

enum Status : int32_t { kFine = 0, kNotFinite = 1, kNothingLeft = 2, kOverflow = 3 };

}  // namespace

extern "C" struct SampleArguments {
    const void* logits;         // [num_rows, num_tokens], rows `logits_stride` elements apart
    int64_t num_rows, num_tokens, logits_stride;
    int64_t is_bfloat16;        // else float32
    int64_t num_threads;
    const double *temperature, *top_p, *min_p, *penalty;          // [num_rows]
    const int64_t *top_k, *seed, *prompt, *sample, *position;     // [num_rows]
    const int64_t *bias_offset, *bias_token;                      // [num_rows + 1], [bias_offset[num_rows]]; or null
    const float* bias_value;
    const uint8_t* seen;        // [num_slots, num_tokens], 1 where the penalty applies; or null
    const int64_t* slot;        // [num_rows], row of `seen`
    int64_t* token;             // [num_rows], a result
    float *logp, *raw_logp;     // [num_rows], results
    int32_t* status;            // [num_rows], Status
};

namespace {

struct Candidate {
    int32_t token;
    float weight;
};

// Working memory of one thread, kept between calls: fresh pages would cost more than the work.
struct Scratch {
    std::vector<float> logits, weights, block_max, selection;
    std::vector<double> block_sum, histogram;
    std::vector<Candidate> candidates;  // as many as the vocabulary has tokens
    int64_t num_candidates = 0;
};

// Philox4x32-10 (Salmon et al. 2011), first two of four words as a double in [0, 1) with 53 bits.
double uniform(uint64_t seed, uint32_t prompt, uint32_t sample, uint32_t position) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t counter[4] = {prompt, sample, position, 0};
    for (int round = 0; round < 10; ++round) {
        uint64_t first = 0xD2511F53ull * counter[0], second = 0xCD9E8D57ull * counter[2];
        uint32_t next[4] = {(uint32_t)(second >> 32) ^ counter[1] ^ key[0], (uint32_t)second,
                            (uint32_t)(first >> 32) ^ counter[3] ^ key[1], (uint32_t)first};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (double)((((uint64_t)counter[0] << 32) | counter[1]) >> 11) * 0x1p-53;
}

class Row {
  public:
    Row(const SampleArguments& a, int64_t row, Scratch& scratch)
        : a_(a), row_(row), s_(scratch), num_tokens_(a.num_tokens), num_blocks_((a.num_tokens + kBlock - 1) / kBlock) {
        s_.logits.resize(num_blocks_ * kBlock);
        s_.weights.resize(num_blocks_ * kBlock);
        s_.block_max.resize(num_blocks_);
        s_.block_sum.resize(num_blocks_);
        s_.candidates.resize(num_blocks_ * kBlock);
    }

    template <class T> Status draw(const T* logits) {
        if (!read(logits)) return kNotFinite;
        inverse_temperature_ = is_greedy() ? 1.0 : 1.0 / a_.temperature[row_];
        largest_ = largest();
        total_ = weigh();
        double raw_largest = largest_, raw_total = total_;
        if (is_changed()) {
            change();
            largest_ = largest();
            if (largest_ == -std::numeric_limits<float>::infinity()) return kNothingLeft;
            if (!(largest_ < std::numeric_limits<float>::infinity())) return kOverflow;
            total_ = weigh();
        }
        double mass = total_;
        int64_t token = is_greedy() ? first_largest() : is_filtered() ? pick_filtered(mass) : pick();
        a_.token[row_] = token;
        a_.logp[row_] = log_prob(s_.logits[token], largest_, mass, inverse_temperature_);
        a_.raw_logp[row_] = log_prob(load_one(logits + token), raw_largest, raw_total, inverse_temperature_);
        return kFine;
    }

  private:
    // Copies the row as float32, padded with -inf; false if a logit is not finite.
    template <class T> bool read(const T* from) {
        float* to = s_.logits.data();
        Ints bad = {};
        int64_t token = 0;
        for (; token + kLanes <= num_tokens_; token += kLanes) {
            Floats values = load(from + token);
            bad |= ((Ints)values & 0x7f800000) == 0x7f800000;
            store(to + token, values);
        }
        bool finite = true;
        for (int lane = 0; lane < kLanes; ++lane) finite &= bad[lane] == 0;
        for (; token < num_tokens_; ++token) finite &= std::isfinite(to[token] = load_one(from + token));
        std::fill(to + num_tokens_, to + num_blocks_ * kBlock, -std::numeric_limits<float>::infinity());
        return finite;
    }

    bool is_greedy() const { return a_.temperature[row_] == 0; }

    bool is_changed() const {
        bool penalised = a_.seen && a_.penalty[row_] != 1;
        return penalised || (a_.bias_offset && a_.bias_offset[row_] < a_.bias_offset[row_ + 1]);
    }

    // Bias, then penalty, as transformers orders them.
    void change() {
        float* x = s_.logits.data();
        if (a_.bias_offset)
            for (int64_t i = a_.bias_offset[row_]; i < a_.bias_offset[row_ + 1]; ++i)
                x[a_.bias_token[i]] += a_.bias_value[i];
        if (!a_.seen || a_.penalty[row_] == 1) return;
        const uint8_t* seen = a_.seen + a_.slot[row_] * num_tokens_;
        float penalty = (float)a_.penalty[row_];
        for (int64_t i = 0; i < num_tokens_; ++i) {
            float changed = x[i] < 0 ? x[i] * penalty : x[i] / penalty;
            x[i] = seen[i] ? changed : x[i];
        }
    }

    double largest() {
        const float* x = s_.logits.data();
        for (int64_t block = 0; block < num_blocks_; ++block, x += kBlock) {
            Floats best = load(x);
            for (int i = kLanes; i < kBlock; i += kLanes) best = larger(best, load(x + i));
            s_.block_max[block] = largest_of_lanes(best);
        }
        return *std::max_element(s_.block_max.begin(), s_.block_max.begin() + num_blocks_);
    }

    // Fills weights and block sums; returns the sum of all weights.
    double weigh() {
        const float* x = s_.logits.data();
        float* weight = s_.weights.data();
        Floats offset = splat((float)largest_), scale = splat((float)inverse_temperature_);
        double total = 0;
        for (int64_t block = 0; block < num_blocks_; ++block, x += kBlock, weight += kBlock) {
            total += s_.block_sum[block] = block_sum(
                offset, scale, [&](int i) TUNESMITH_INLINE { return load(x + i); },
                [&](int i, Floats values, Floats) TUNESMITH_INLINE { store(weight + i, values); });
        }
        return total;
    }

    int64_t first_largest() const {
        int64_t block = std::find(s_.block_max.begin(), s_.block_max.end(), (float)largest_) - s_.block_max.begin();
        const float* x = s_.logits.data();
        return std::find(x + block * kBlock, x + (block + 1) * kBlock, (float)largest_) - x;
    }

    double noise() const {
        return uniform((uint64_t)a_.seed[row_], (uint32_t)a_.prompt[row_], (uint32_t)a_.sample[row_],
                       (uint32_t)a_.position[row_]);
    }

    // The first token, in the order of the vocabulary, whose running sum of weights passes a share of the whole.
    int64_t pick() const {
        double target = noise() * total_, sum = 0;
        int64_t block = 0;
        while (block + 1 < num_blocks_ && sum + s_.block_sum[block] <= target) sum += s_.block_sum[block++];
        // A sum over the block in another order may fall short of the target by rounding: then the last with weight.
        while (block > 0 && s_.block_sum[block] == 0) sum -= s_.block_sum[--block];
        int64_t last = block * kBlock;
        for (int64_t token = block * kBlock; token < (block + 1) * kBlock; ++token) {
            if (s_.weights[token] == 0) continue;
            last = token;
            if ((sum += s_.weights[token]) > target) break;
        }
        return last;
    }

    bool has_top_k() const { return a_.top_k[row_] > 0 && a_.top_k[row_] < num_tokens_; }
    bool is_filtered() const { return has_top_k() || a_.top_p[row_] < 1 || a_.min_p[row_] > 0; }

    // Top-k, top-p and min-p; `mass` becomes the sum of the weights that are left.
    int64_t pick_filtered(double& mass) {
        double top_p = a_.top_p[row_];
        float lowest = (float)a_.min_p[row_];
        int64_t count = num_tokens_;
        bool gathered = has_top_k();
        if (gathered) {
            gather(kth_largest(a_.top_k[row_]), 0);
            mass = keep_from(0);
            count = s_.num_candidates;
        }
        if (top_p < 1) {
            // All tokens below this weight together have less than 1 - top_p of the mass, so none of them is kept.
            double bound = (1 - top_p) * mass / (double)count * (1 - 1e-6);
            if (!gathered) gather(-std::numeric_limits<float>::infinity(), (float)bound);
            gathered = true;
            lowest = std::max(lowest, smallest_in_top_p(top_p * mass));
        }
        if (!gathered) gather(-std::numeric_limits<float>::infinity(), lowest);
        mass = keep_from(lowest);
        double target = noise() * mass, sum = 0;
        int64_t last = 0;
        for (const Candidate& candidate : candidates()) {
            if (candidate.weight == 0) continue;
            last = candidate.token;
            if ((sum += candidate.weight) > target) break;
        }
        return last;
    }

    struct Range {
        Candidate *first, *last;
        Candidate* begin() const { return first; }
        Candidate* end() const { return last; }
    };
    Range candidates() const { return {s_.candidates.data(), s_.candidates.data() + s_.num_candidates}; }

    // Drops the candidates below a weight; returns the sum of those that are left.
    double keep_from(float lowest) {
        double sum = 0;
        Candidate* next = s_.candidates.data();
        for (Candidate candidate : candidates()) {
            bool kept = candidate.weight >= lowest;
            *next = candidate;
            next += kept;
            sum += kept ? candidate.weight : 0.0f;
        }
        s_.num_candidates = next - s_.candidates.data();
        return sum;
    }

    // The candidates, in the order of the vocabulary: at least this logit and at least this weight.
    void gather(float lowest_logit, float lowest) {
        // Each token is written and the counter moves on only past those that are kept: a branch would be guessed wrong
        // too often.
        Candidate* next = s_.candidates.data();
        // Blocks are passed over by their largest logit, with a margin for the rounding of a weight.
        double reach = lowest > 0 ? largest_ + std::log((double)lowest) / inverse_temperature_ : -INFINITY;
        float skip_below = std::max(lowest_logit, (float)(reach - 1e-3 * (1 + std::fabs(reach))));
        for (int64_t block = 0; block < num_blocks_; ++block) {
            if (s_.block_max[block] < skip_below) continue;
            int64_t end = std::min((block + 1) * kBlock, num_tokens_);
            for (int64_t token = block * kBlock; token < end; ++token) {
                *next = {(int32_t)token, s_.weights[token]};
                next += (s_.logits[token] >= lowest_logit) & (s_.weights[token] >= lowest);
            }
        }
        s_.num_candidates = next - s_.candidates.data();
    }

    // The k-th largest logit. The k-th largest maximum of a block is a lower bound of it.
    float kth_largest(int64_t k) {
        std::vector<float>& values = s_.selection;
        float bound = -std::numeric_limits<float>::infinity();
        if (k <= num_blocks_) {
            values.assign(s_.block_max.begin(), s_.block_max.begin() + num_blocks_);
            std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
            bound = values[k - 1];
        }
        values.clear();
        for (int64_t block = 0; block < num_blocks_; ++block) {
            if (s_.block_max[block] < bound) continue;
            int64_t end = std::min((block + 1) * kBlock, num_tokens_);
            for (int64_t token = block * kBlock; token < end; ++token)
                if (s_.logits[token] >= bound) values.push_back(s_.logits[token]);
        }
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        return values[k - 1];
    }

    // The smallest weight among the candidates that have less than `target` above them. A histogram over the upper bits
    // of the weights finds the bucket in which the sum passes the target, and that bucket alone is sorted.
    float smallest_in_top_p(double target) {
        std::vector<double>& mass = s_.histogram;
        mass.assign((kOneBits >> 16) + 1, 0.0);
        for (const Candidate& candidate : candidates()) mass[bucket(candidate.weight)] += candidate.weight;
        double sum = 0;
        int64_t crossing = (int64_t)mass.size() - 1;
        while (crossing > 0 && sum + mass[crossing] < target) sum += mass[crossing--];
        std::vector<float>& values = s_.selection;
        values.clear();
        for (const Candidate& candidate : candidates())
            if (bucket(candidate.weight) == (uint32_t)crossing) values.push_back(candidate.weight);
        std::sort(values.begin(), values.end(), std::greater<float>());
        for (float weight : values)
            if ((sum += weight) >= target) return weight;
        return values.empty() ? 0 : values.back();
    }

    static uint32_t bucket(float weight) {
        uint32_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        return std::min(bits, kOneBits) >> 16;
    }

    const SampleArguments& a_;
    const int64_t row_;
    Scratch& s_;
    const int64_t num_tokens_, num_blocks_;
    double inverse_temperature_ = 1, largest_ = 0, total_ = 0;
};

}  // namespace

extern "C" void sample_rows(const SampleArguments* a) {
#pragma omp parallel for schedule(static) num_threads((int)a->num_threads) if (a->num_threads > 1)
    for (int64_t i = 0; i < a->num_rows; ++i) {
        static thread_local Scratch scratch;
        Row row(*a, i, scratch);
        int64_t start = i * a->logits_stride;
        a->status[i] = a->is_bfloat16 ? row.draw((const uint16_t*)a->logits + start)
                                      : row.draw((const float*)a->logits + start);
    }
}
