// Gradients of packed attention from queries, keys and values alone: the softmax is computed anew.
//
// For 16 tokens and the query heads of one key/value head, the products with all keys that they see stand in a matrix,
// which is small enough for the cache. Sums and the softmax are in float32; what is multiplied has the dtype given.
#include <vector>

#include "attention_layer.hpp"

using namespace tunesmith;

extern "C" struct GradientArguments {
    Layer layer;
    const void *q, *k, *v, *grad;         // [tokens, heads * head_dim], rows a stride apart
    void *dq, *dk, *dv;                   // the same, without gaps
    const int64_t* starts;                // [num_sequences + 1], first token of each sequence
    int64_t num_sequences, q_stride, k_stride, v_stride, grad_stride;
};

namespace {

// Turns the products of one query with the keys into weights, and those of its gradient with the values into gradients
// of the products; both in place, as steps of P. `slopes` has room for as many.
template <class P>
__attribute__((noinline)) void differentiate(float* row, float* grad, float* slopes, int64_t num_keys, int64_t first,
                                             const Layer& layer, const RowState& state) {
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
    float largest = largest_of_lanes(top);
    Floats sum = {}, dot = {};
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats weight = exp_or_nan(load(row + i) - largest);
        store(row + i, weight);
        sum += weight;
        dot += weight * load(grad + i);
    }
    float inverse = 1.0f / total_of_lanes(sum), mean = total_of_lanes(dot) * inverse;
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats weight = load(row + i) * inverse;
        Floats change = weight * (load(grad + i) - mean) * scale;
        if (softcap > 0) change *= load(slopes + i);
        P::store_steps(row + i / P::kPerStep, weight);
        P::store_steps(grad + i / P::kPerStep, change);
    }
}

// Working memory of one thread of the backward pass.
struct Scratch {
    std::vector<float> keys_across, keys_along, values_across;     // blocks of the whole sequence
    std::vector<float> queries, grads, queries_along, grads_along;  // 16 tokens: steps, and a block for each head
    std::vector<float> products, changes, slopes;                  // their rows against all keys
    std::vector<float> query_sums, key_sums, value_sums, head;
};

// One sequence and one key/value head.
template <class P> class Sequence {
    typedef typename P::Number Number;

  public:
    Sequence(const GradientArguments& a, int64_t sequence, int64_t head, Scratch& scratch)
        : a_(a), layer_(a.layer), s_(scratch), group_(layer_.num_heads / layer_.num_kv_heads), width_(layer_.head_dim),
          stride_((width_ + kLanes - 1) / kLanes * kLanes), head_size_(kBlock * width_), head_(head),
          start_(a.starts[sequence]), length_(a.starts[sequence + 1] - start_),
          num_blocks_((length_ + kBlock - 1) / kBlock) {}

    void run() {
        s_.head.resize(stride_);
        load_keys();
        s_.key_sums.assign(num_blocks_ * kBlock * stride_, 0.0f);
        s_.value_sums.assign(num_blocks_ * kBlock * stride_, 0.0f);
        for (int64_t block = 0; block < num_blocks_; ++block) {
            load_queries(block);
            differentiate_block(block);
        }
        for (int64_t row = 0; row < length_; ++row) {
            int64_t to = ((start_ + row) * layer_.num_kv_heads + head_) * width_;
            rotate<P>(s_.key_sums.data() + row * stride_, (Number*)a_.dk + to, layer_, row, -1.0f);
            store_row(s_.value_sums.data() + row * stride_, (Number*)a_.dv + to);
        }
    }

  private:
    // Room for `count` numbers, all zero.
    static Number* cleared(std::vector<float>& room, int64_t count) {
        room.assign((count * sizeof(Number) + sizeof(float) - 1) / sizeof(float), 0.0f);
        return (Number*)room.data();
    }

    void store_row(const float* from, Number* to) const {
        each_vector(width_, [&](int64_t i, int count) { store(to + i, load(from + i), count); });
    }

    void load_keys() {
        int64_t count = num_blocks_ * head_size_;
        Number *across = cleared(s_.keys_across, count), *along = cleared(s_.keys_along, count);
        Number *values = cleared(s_.values_across, count), *turned = (Number*)s_.head.data();
        for (int64_t row = 0; row < length_; ++row) {
            int64_t block = row / kBlock * head_size_, token = start_ + row;
            rotate<P>((const Number*)a_.k + token * a_.k_stride + head_ * width_, turned, layer_, row, 1.0f);
            put_crosswise<P>(across + block, row % kBlock, turned, width_);
            P::put_lengthwise(along + block, row % kBlock, turned, width_);
            put_crosswise<P>(values + block, row % kBlock, (const Number*)a_.v + token * a_.v_stride + head_ * width_, width_);
        }
    }

    // Queries of the 16 tokens of a block and gradients of their outputs; row `g * 16 + t` is head g of token t. Tokens
    // behind the end are zeros, which add nothing to any sum.
    void load_queries(int64_t block) {
        Number *queries = cleared(s_.queries_along, group_ * head_size_), *grads = cleared(s_.grads_along, group_ * head_size_);
        s_.queries.assign(group_ * kBlock * stride_, 0.0f);
        s_.grads.assign(group_ * kBlock * stride_, 0.0f);
        Number* turned = (Number*)s_.head.data();
        for (int64_t g = 0; g < group_; ++g)
            for (int64_t t = 0; t < kBlock && block * kBlock + t < length_; ++t) {
                int64_t position = block * kBlock + t, token = start_ + position, row = g * kBlock + t;
                int64_t column = (head_ * group_ + g) * width_;
                rotate<P>((const Number*)a_.q + token * a_.q_stride + column, turned, layer_, position, 1.0f);
                P::store_steps(s_.queries.data() + row * stride_, turned, width_);
                P::put_lengthwise(queries + g * head_size_, t, turned, width_);
                const Number* grad = (const Number*)a_.grad + token * a_.grad_stride + column;
                P::store_steps(s_.grads.data() + row * stride_, grad, width_);
                P::put_lengthwise(grads + g * head_size_, t, grad, width_);
            }
    }

    Blocks<P> blocks(const std::vector<float>& room, int64_t first, int64_t count, std::vector<const Number*>& at) const {
        at.resize(count);
        for (int64_t i = 0; i < count; ++i) at[i] = (const Number*)room.data() + (first + i) * head_size_;
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
            differentiate<P>(products.from(row).data, changes.from(row).data, s_.slopes.data(), num_keys, low * kBlock, layer_, state);
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
            if (position < length_)
                rotate<P>(s_.query_sums.data() + row * stride_,
                          (Number*)a_.dq + ((start_ + position) * layer_.num_heads + head) * width_, layer_, position, -1.0f);
        }
    }

    const GradientArguments& a_;
    const Layer& layer_;
    Scratch& s_;
    const int64_t group_, width_, stride_, head_size_, head_, start_, length_, num_blocks_;
    std::vector<const Number*> at_, more_;
};

template <class P> void run(const GradientArguments& a) {
    const Layer& layer = a.layer;
    int64_t work = 0, num_units = a.num_sequences * layer.num_kv_heads;
    for (int64_t i = 0; i < a.num_sequences; ++i) {
        int64_t length = a.starts[i + 1] - a.starts[i];
        work += length * (length + 64) * layer.num_heads * layer.head_dim;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)layer.num_threads) \
    if (layer.num_threads > 1 && work > kParallelWork)
    for (int64_t unit = 0; unit < num_units; ++unit) {
        static thread_local Scratch scratch;
        Sequence<P>(a, unit / layer.num_kv_heads, unit % layer.num_kv_heads, scratch).run();
    }
}

}  // namespace

extern "C" void attend_backward(const GradientArguments* a) {
    if (!a->layer.is_bfloat16) return run<Single<float>>(*a);
#ifdef __AVX512BF16__
    if (a->layer.head_dim % kLanes == 0) return run<Pairs>(*a);
#endif
    run<Single<uint16_t>>(*a);
}
