// Gradients of packed attention from queries, keys and values alone: the softmax is computed anew.
//
// For 16 tokens and the query heads of one key/value head, the products with all keys that they see are a matrix,
// which is small enough for the cache. Sums and the softmax are in float32; what is multiplied has the dtype given.
//
// A sequence may go on from another, its parent, which several may share. What its keys and values get from one after
// the other is summed in float32 and in one order, whatever the threads.
#include <memory>
#include <vector>

#include "attention_layer.hpp"

using namespace tunesmith;

extern "C" struct GradientArguments {
    Layer layer;
    const void *q, *k, *v, *grad;         // [tokens, heads * head_dim], rows a stride apart
    void *dq, *dk, *dv;                   // the same, without gaps
    float* d_sinks;                       // [tokens, num_heads] what each token adds to it, or null
    const int64_t* starts;                // [num_sequences + 1], first token of each sequence
    const int64_t* parents;               // [num_sequences], the sequence that each goes on from, or -1
    int64_t num_sequences, q_stride, k_stride, v_stride, grad_stride;
};

namespace {

// Turns the products of one query with the keys into weights, and those of its gradient with the values into gradients
// of the products; both in place, as steps of P. `slopes` has space for as many. Returns the gradient of the sink's score.
template <class P>
__attribute__((noinline)) float differentiate(float* row, float* grad, float* slopes, int64_t num_keys, int64_t first,
                                              const Layer& layer, const RowState& state, float sink) {
    float scale = (float)layer.scale, softcap = (float)layer.softcap;
    Floats top = splat(kNever);
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats score = load(row + i) * scale;
        if (softcap > 0) {
            Floats part = tanh_of(score / softcap);
            store(slopes + i, 1.0f - part * part);
            score = part * softcap;
        }
        score = seen_score(score, first + i, state);
        store(row + i, score);
        top = larger(score, top);
    }
    float largest = std::max(sink, largest_of_lanes(top));
    Floats sum = {}, dot = {};
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats weight = exp_or_nan(load(row + i) - largest);
        store(row + i, weight);
        sum += weight;
        dot += weight * load(grad + i);
    }
    float of_sink = exp_or_nan(splat(sink - largest))[0];
    float inverse = 1.0f / (sum_of_lanes(sum) + of_sink), mean = sum_of_lanes(dot) * inverse;
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats weight = load(row + i) * inverse;
        Floats change = weight * (load(grad + i) - mean) * scale;
        if (softcap > 0) change *= load(slopes + i);
        P::store_steps(row + i / P::kPerStep, weight);
        P::store_steps(grad + i / P::kPerStep, change);
    }
    return -of_sink * inverse * mean;
}

// Working memory of one thread of the backward pass.
struct Scratch {
    std::vector<float> keys_across, keys_along, values_across;     // blocks of the whole sequence
    std::vector<float> queries, grads, queries_along, grads_along;  // 16 tokens: steps, and a block for each head
    std::vector<float> products, changes, slopes;                  // their rows against all keys
    std::vector<float> query_sums, key_sums, value_sums, head;
};

// Neighbouring sequences of one parent, so many that its keys are seldom loaded anew; or one without a parent.
struct Unit {
    int64_t first, count;
    float* sums;                          // what its parent's keys and values get: [heads][2][tokens][stride]
};

constexpr int64_t kSiblings = 4;

// The sequences of one unit and one key/value head.
template <class P> class Work {
    typedef typename P::Number Number;

  public:
    // `own_sums` is where a parent leaves what its own queries give to its keys and values.
    Work(const GradientArguments& a, const Unit& unit, int64_t head, float* const* own_sums, Scratch& scratch)
        : a_(a), layer_(a.layer), s_(scratch), group_(layer_.num_heads / layer_.num_kv_heads), width_(layer_.head_dim),
          stride_((width_ + kLanes - 1) / kLanes * kLanes), head_size_(kBlock * width_), head_(head), unit_(unit),
          own_sums_(own_sums) {
        int64_t parent = a.parents[unit.first];
        if (parent < 0) return;
        parent_start_ = a.starts[parent];
        prefix_ = a.starts[parent + 1] - parent_start_;
    }

    void run() {
        int64_t longest = 0;
        for (int64_t i = unit_.first; i < unit_.first + unit_.count; ++i)
            longest = std::max(longest, prefix_ + a_.starts[i + 1] - a_.starts[i]);
        int64_t most_blocks = (longest + kBlock - 1) / kBlock;
        s_.head.resize(stride_);
        for (auto* buffer : {&s_.keys_across, &s_.keys_along, &s_.values_across}) cleared(*buffer, most_blocks * head_size_);
        s_.key_sums.assign(most_blocks * kBlock * stride_, 0.0f);
        s_.value_sums.assign(most_blocks * kBlock * stride_, 0.0f);
        load_keys(0, prefix_ / kBlock * kBlock);
        for (int64_t i = unit_.first; i < unit_.first + unit_.count; ++i) run_sequence(i);
        if (unit_.sums) keep_sums(unit_.sums, 0, prefix_);
    }

  private:
    void run_sequence(int64_t sequence) {
        start_ = a_.starts[sequence];
        length_ = prefix_ + a_.starts[sequence + 1] - start_;
        num_blocks_ = (length_ + kBlock - 1) / kBlock;
        clear_behind_prefix();
        load_keys(prefix_ / kBlock * kBlock, length_);
        for (int64_t block = prefix_ / kBlock; block < num_blocks_; ++block) {
            load_queries(block);
            differentiate_block(block);
        }
        if (own_sums_[sequence]) return keep_sums(own_sums_[sequence], prefix_, length_);
        for (int64_t row = prefix_; row < length_; ++row) {
            int64_t to = (token_at(row) * layer_.num_kv_heads + head_) * width_;
            rotate<P>(s_.key_sums.data() + row * stride_, (Number*)a_.dk + to, layer_, row, -1.0f);
            store_row(s_.value_sums.data() + row * stride_, (Number*)a_.dv + to);
        }
    }

    int64_t token_at(int64_t position) const {
        return position < prefix_ ? parent_start_ + position : start_ + position - prefix_;
    }

    // What the last sibling left.
    void clear_behind_prefix() {
        int64_t first = prefix_ / kBlock, count = (num_blocks_ - first) * head_size_;
        for (auto* buffer : {&s_.keys_across, &s_.keys_along, &s_.values_across})
            std::fill_n((Number*)buffer->data() + first * head_size_, count, Number());
        for (auto* sums : {&s_.key_sums, &s_.value_sums})
            std::fill_n(sums->data() + prefix_ * stride_, (num_blocks_ * kBlock - prefix_) * stride_, 0.0f);
    }

    void keep_sums(float* to, int64_t first, int64_t end) const {
        int64_t size = (end - first) * stride_;
        std::copy_n(s_.key_sums.data() + first * stride_, size, to + head_ * 2 * size);
        std::copy_n(s_.value_sums.data() + first * stride_, size, to + (head_ * 2 + 1) * size);
    }

    // Space for `count` numbers, all zero.
    static Number* cleared(std::vector<float>& buffer, int64_t count) {
        buffer.assign((count * sizeof(Number) + sizeof(float) - 1) / sizeof(float), 0.0f);
        return (Number*)buffer.data();
    }

    void store_row(const float* from, Number* to) const {
        each_vector(width_, [&](int64_t i, int count) { store(to + i, load(from + i), count); });
    }

    void load_keys(int64_t first, int64_t end) {
        Number *across = (Number*)s_.keys_across.data(), *along = (Number*)s_.keys_along.data();
        Number *values = (Number*)s_.values_across.data(), *turned = (Number*)s_.head.data();
        for (int64_t row = first; row < end; ++row) {
            int64_t block = row / kBlock * head_size_, token = token_at(row);
            rotate<P>((const Number*)a_.k + token * a_.k_stride + head_ * width_, turned, layer_, row, 1.0f);
            put_crosswise<P>(across + block, row % kBlock, turned, width_);
            P::put_lengthwise(along + block, row % kBlock, turned, width_);
            put_crosswise<P>(values + block, row % kBlock, (const Number*)a_.v + token * a_.v_stride + head_ * width_, width_);
        }
    }

    // Queries of the 16 tokens of a block and gradients of their outputs; row `g * 16 + t` is head g of token t. Tokens
    // of the parent and behind the end are zeros, which add nothing to any sum.
    void load_queries(int64_t block) {
        Number *queries = cleared(s_.queries_along, group_ * head_size_), *grads = cleared(s_.grads_along, group_ * head_size_);
        s_.queries.assign(group_ * kBlock * stride_, 0.0f);
        s_.grads.assign(group_ * kBlock * stride_, 0.0f);
        Number* turned = (Number*)s_.head.data();
        for (int64_t g = 0; g < group_; ++g)
            for (int64_t t = std::max<int64_t>(0, prefix_ - block * kBlock); t < kBlock && block * kBlock + t < length_; ++t) {
                int64_t position = block * kBlock + t, token = token_at(position), row = g * kBlock + t;
                int64_t column = (head_ * group_ + g) * width_;
                rotate<P>((const Number*)a_.q + token * a_.q_stride + column, turned, layer_, position, 1.0f);
                P::store_steps(s_.queries.data() + row * stride_, turned, width_);
                P::put_lengthwise(queries + g * head_size_, t, turned, width_);
                const Number* grad = (const Number*)a_.grad + token * a_.grad_stride + column;
                P::store_steps(s_.grads.data() + row * stride_, grad, width_);
                P::put_lengthwise(grads + g * head_size_, t, grad, width_);
            }
    }

    Blocks<P> blocks(const std::vector<float>& buffer, int64_t first, int64_t count, std::vector<const Number*>& at) const {
        at.resize(count);
        for (int64_t i = 0; i < count; ++i) at[i] = (const Number*)buffer.data() + (first + i) * head_size_;
        return {at.data(), nullptr, count};
    }

    void differentiate_block(int64_t block) {
        int64_t low = layer_.window ? std::max<int64_t>(0, block * kBlock - layer_.window + 1) / kBlock : 0;
        int64_t count = block + 1 - low, num_keys = count * kBlock, num_rows = group_ * kBlock;
        s_.products.resize(num_rows * num_keys);
        s_.changes.resize(num_rows * num_keys);
        s_.slopes.resize(num_keys);
        Rows products = {s_.products.data(), num_keys}, changes = {s_.changes.data(), num_keys};
        multiply<P>({s_.queries.data(), stride_}, num_rows, width_, blocks(s_.keys_across, low, count, at_), products);
        multiply<P>({s_.grads.data(), stride_}, num_rows, width_, blocks(s_.values_across, low, count, at_), changes);
        for (int64_t row = 0; row < num_rows; ++row) {
            int64_t position = block * kBlock + row % kBlock;
            RowState state = {layer_.window ? std::max<int64_t>(0, position - layer_.window + 1) : 0, position, kNever, 0.0f};
            int64_t head = head_ * group_ + row / kBlock;
            float d_sink = differentiate<P>(products.from(row).data, changes.from(row).data, s_.slopes.data(), num_keys,
                                            low * kBlock, layer_, state, sink_of(layer_, head));
            if (a_.d_sinks && position >= prefix_ && position < length_)
                a_.d_sinks[token_at(position) * layer_.num_heads + head] = d_sink;
        }
        s_.query_sums.assign(num_rows * stride_, 0.0f);
        add_weighted<P>({changes.data, num_keys, 1, nullptr}, num_rows, blocks(s_.keys_along, low, count, at_), width_,
                        {s_.query_sums.data(), stride_});
        store_queries(block);
        for (int64_t row = 0; row < num_rows; row += 2) {
            P::pair_rows(products.from(row).data, num_keys, num_keys);
            P::pair_rows(changes.from(row).data, num_keys, num_keys);
        }
        // Now the keys are the rows, and the steps go over heads and tokens.
        Blocks<P> grads = blocks(s_.grads_along, 0, group_, at_), queries = blocks(s_.queries_along, 0, group_, more_);
        int64_t step = P::kPerStep * num_keys, to = low * kBlock * stride_;
        add_weighted<P>({products.data, 1, step, nullptr}, num_keys, grads, width_, {s_.value_sums.data() + to, stride_});
        add_weighted<P>({changes.data, 1, step, nullptr}, num_keys, queries, width_, {s_.key_sums.data() + to, stride_});
    }

    void store_queries(int64_t block) const {
        for (int64_t row = 0; row < group_ * kBlock; ++row) {
            int64_t position = block * kBlock + row % kBlock, head = head_ * group_ + row / kBlock;
            if (position >= prefix_ && position < length_)
                rotate<P>(s_.query_sums.data() + row * stride_,
                          (Number*)a_.dq + (token_at(position) * layer_.num_heads + head) * width_, layer_, position, -1.0f);
        }
    }

    const GradientArguments& a_;
    const Layer& layer_;
    Scratch& s_;
    const int64_t group_, width_, stride_, head_size_, head_;
    const Unit& unit_;
    float* const* own_sums_;
    int64_t parent_start_ = 0, prefix_ = 0, start_ = 0, length_ = 0, num_blocks_ = 0;
    std::vector<const Number*> at_, more_;
};

// All sequences. A parent's gradients are stored when those of its children are there.
template <class P> class Backward {
    typedef typename P::Number Number;

  public:
    explicit Backward(const GradientArguments& a)
        : a_(a), layer_(a.layer), stride_((layer_.head_dim + kLanes - 1) / kLanes * kLanes), own_sums_(a.num_sequences) {
        for (int64_t i = 0; i < a_.num_sequences; ++i) {
            bool joins = i && a_.parents[i] >= 0 && a_.parents[i] == a_.parents[i - 1] && units_.back().count < kSiblings;
            if (joins) ++units_.back().count;
            else units_.push_back({i, 1, nullptr});
            if (a_.parents[i] >= 0 && !own_sums_[a_.parents[i]]) own_sums_[a_.parents[i]] = buffer(a_.parents[i]);
        }
        for (Unit& unit : units_)
            if (a_.parents[unit.first] >= 0) unit.sums = buffer(a_.parents[unit.first]);
    }

    void run() {
        int64_t work = 0, heads = layer_.num_kv_heads, num_units = (int64_t)units_.size() * heads;
        for (int64_t i = 0; i < a_.num_sequences; ++i) {
            int64_t own = length(i), seen = own + (a_.parents[i] < 0 ? 0 : length(a_.parents[i]));
            work += own * (seen + 64) * layer_.num_heads * layer_.head_dim;
        }
#pragma omp parallel num_threads((int)layer_.num_threads) if (layer_.num_threads > 1 && work > kParallelWork)
        {
            static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
            for (int64_t unit = 0; unit < num_units; ++unit)
                Work<P>(a_, units_[unit / heads], unit % heads, own_sums_.data(), scratch).run();
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < a_.num_sequences * heads; ++item)
                if (own_sums_[item / heads]) store_parent(item / heads, item % heads);
        }
    }

  private:
    int64_t length(int64_t sequence) const { return a_.starts[sequence + 1] - a_.starts[sequence]; }

    float* buffer(int64_t parent) {
        buffers_.emplace_back(new float[layer_.num_kv_heads * 2 * length(parent) * stride_]);
        return buffers_.back().get();
    }

    void store_parent(int64_t parent, int64_t head) {
        int64_t size = length(parent) * stride_;
        float* sums = own_sums_[parent] + head * 2 * size;
        for (const Unit& unit : units_)
            if (a_.parents[unit.first] == parent)
                for (int64_t i = 0; i < 2 * size; ++i) sums[i] += unit.sums[head * 2 * size + i];
        for (int64_t row = 0; row < length(parent); ++row) {
            int64_t to = ((a_.starts[parent] + row) * layer_.num_kv_heads + head) * layer_.head_dim;
            rotate<P>(sums + row * stride_, (Number*)a_.dk + to, layer_, row, -1.0f);
            const float* values = sums + size + row * stride_;
            each_vector(layer_.head_dim, [&](int64_t i, int count) { store((Number*)a_.dv + to + i, load(values + i), count); });
        }
    }

    const GradientArguments& a_;
    const Layer& layer_;
    const int64_t stride_;
    std::vector<Unit> units_;
    std::vector<float*> own_sums_;                 // of each parent, null for the others
    std::vector<std::unique_ptr<float[]>> buffers_;
};

}  // namespace

extern "C" void attend_backward(const GradientArguments* a) {
    if (!a->layer.is_bfloat16) return Backward<Single<float>>(*a).run();
#ifdef __AVX512BF16__
    if (a->layer.head_dim % kLanes == 0) return Backward<Pairs>(*a).run();
#endif
    Backward<Single<uint16_t>>(*a).run();
}
