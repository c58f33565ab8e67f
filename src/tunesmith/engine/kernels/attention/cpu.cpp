// Causal attention over a cache of blocks of 16 tokens; torch_impl.py is the definition.
//
// A row is one query head of one token. The rows of a tile share each load of keys and values: the query heads of one
// key/value head, of neighbouring tokens of a sequence, or of tokens whose sequences begin with the same blocks. The softmax goes in spans of 512 keys that begin at position
// 0, and every sum of a row runs in an order that its position decides alone. So the bits of a row do not depend on the
// tile, on other rows, or on how a prompt was split.
#include <vector>

#include "attention_layer.hpp"

using namespace tunesmith;

extern "C" struct AttendArguments {
    Layer layer;
    const void *q, *k, *v;                // [num_rows, heads * head_dim], rows a stride apart
    void *keys, *values;                  // the cache: [num_blocks, num_kv_heads * 16 * head_dim] each
    void* out;                            // [num_rows, num_heads * head_dim]
    const int32_t *position, *table_row;  // [num_rows + num_copies]
    const int32_t* tables;                // [num_tables, table_width]
    const int32_t* copied;                // [num_copies], tokens whose keys and values are copied to one more place each
    int64_t num_rows, q_stride, k_stride, v_stride;
    int64_t num_blocks, num_tables, table_width, num_positions, num_copies;
};

namespace {

constexpr int kSpanBlocks = 32;
constexpr int kSpan = kSpanBlocks * kBlock;
constexpr int kTileRows = 16;
constexpr int64_t kLeastShared = 4;       // blocks from which on it pays to take several sequences together

// Turns the products of a span into weights, in place as steps of P, and adds them to the state. Returns the factor by
// which what was added up before is to be multiplied. `first` is the position of the first key.
template <class P>
__attribute__((noinline)) float weigh(float* row, int64_t num_keys, int64_t first, const Layer& layer, RowState& state) {
    float scale = (float)layer.scale, softcap = (float)layer.softcap;
    Floats top = splat(kNever);
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats score = load(row + i) * scale;
        if (softcap > 0) score = tanh_of(score / softcap) * softcap;
        score = seen_score(score, first + i, state);
        store(row + i, score);
        top = larger(score, top);
    }
    float largest = std::max(state.largest, largest_of_lanes(top));
    if (largest == kNever) {
        std::fill(row, row + num_keys, 0.0f);
        return 1;
    }
    float factor = state.largest == kNever ? 0.0f : exp_or_nan(splat(state.largest - largest))[0];
    Floats sum = {};
    for (int64_t i = 0; i < num_keys; i += kBlock) {
        Floats weight = exp_or_nan(load(row + i) - largest);
        sum += weight;
        P::store_steps(row + i / P::kPerStep, weight);
    }
    state.largest = largest;
    state.total = state.total * factor + sum_of_lanes(sum);
    return factor;
}

// Working memory of one thread, kept between calls: fresh pages would cost more than the work.
struct Scratch {
    std::vector<float> queries, products, sums, factors;
    std::vector<RowState> states;
    std::vector<float> turned;            // one head

    template <class T> T* head() { return (T*)turned.data(); }
};

// Consecutive tokens of the list: neighbours of one sequence, or one of each of several sequences.
// They have the first `shared` blocks in common; neighbours have all.
struct Tile {
    int64_t token, count, shared;
    bool joined = false;                  // of several sequences
};

template <class P> class Forward {
    typedef typename P::Number Number;

  public:
    explicit Forward(const AttendArguments& a)
        : a_(a), layer_(a.layer), group_(layer_.num_heads / layer_.num_kv_heads), width_(layer_.head_dim),
          stride_((width_ + kLanes - 1) / kLanes * kLanes), head_size_(kBlock * width_) {}

    // 0, or a code: 1 position, 2 table row, 3 block out of range.
    int32_t run() {
        if (int32_t status = cut()) return status;
        int64_t work = 0, num_heads = layer_.num_kv_heads, num_units = (int64_t)tiles_.size() * num_heads;
        for (int64_t token = 0; token < a_.num_rows; ++token)
            work += (a_.position[token] + 64) * layer_.num_heads * width_;
#pragma omp parallel num_threads((int)layer_.num_threads) if (layer_.num_threads > 1 && work > kParallelWork)
        {
            static thread_local Scratch kept;
            Scratch& scratch = kept;
            int64_t num_rows = std::max<int64_t>(kTileRows, group_);
            scratch.queries.resize(num_rows * stride_);
            scratch.products.resize(num_rows * kSpan);
            scratch.sums.resize(num_rows * stride_);
            scratch.factors.resize(num_rows);
            scratch.states.resize(num_rows);
            scratch.turned.resize(stride_);
#pragma omp for schedule(static)
            for (int64_t place = 0; place < a_.num_rows + a_.num_copies; ++place) write(place, scratch);
#pragma omp for schedule(dynamic, num_units > 64 ? 4 : 1)
            for (int64_t unit = 0; unit < num_units; ++unit) attend(unit, std::min(unit + 1, num_units - 1), scratch);
        }
        return 0;
    }

  private:
    const int32_t* table(int64_t token) const { return a_.tables + a_.table_row[token] * a_.table_width; }

    // Cuts the tokens into tiles and checks their places.
    int32_t cut() {
        int64_t most = 1;
        while (most * 2 * group_ <= kTileRows) most *= 2;
        for (int64_t token = 0; token < a_.num_rows + a_.num_copies; ++token) {
            int64_t position = a_.position[token], row = a_.table_row[token];
            if (position < 0 || position >= a_.num_positions || position / kBlock >= a_.table_width) return 1;
            if (row < 0 || row >= a_.num_tables) return 2;
            bool is_copy = token >= a_.num_rows;
            if (token && !is_copy && row == a_.table_row[token - 1] && position == a_.position[token - 1] + 1 && position % most) {
                ++tiles_.back().count;
                tiles_.back().shared = num_blocks(token);
                continue;
            }
            for (int64_t i = 0; i <= position / kBlock; ++i)
                if (table(token)[i] < 0 || table(token)[i] >= a_.num_blocks) return 3;
            if (!is_copy) tiles_.push_back({token, 1, num_blocks(token)});
        }
        if (!layer_.window) join();
        return 0;
    }

    // Single tokens whose sequences begin with the same blocks become one tile.
    void join() {
        int64_t most = std::max<int64_t>(1, kTileRows / group_);
        size_t last = 0;
        for (size_t next = 1; next < tiles_.size(); ++next) {
            Tile &into = tiles_[last], from = tiles_[next];
            int64_t shared = 0, limit = std::min(into.shared, from.shared);
            if (from.count == 1 && into.count < most && (into.count == 1 || into.joined))
                while (shared < limit && table(into.token)[shared] == table(from.token)[shared]) ++shared;
            if (shared >= kLeastShared && 2 * shared >= into.shared)
                into = {into.token, into.count + 1, shared, true};
            else
                tiles_[++last] = from;
        }
        if (!tiles_.empty()) tiles_.resize(last + 1);
    }

    int64_t num_blocks(int64_t token) const { return a_.position[token] / kBlock + 1; }

    // Copies keys and values of a token into its block.
    void write(int64_t place, Scratch& scratch) const {
        int64_t position = a_.position[place], width = width_;
        int64_t token = place < a_.num_rows ? place : a_.copied[place - a_.num_rows];
        int64_t start = table(place)[position / kBlock] * layer_.num_kv_heads * head_size_;
        Number* turned = scratch.head<Number>();
        for (int64_t head = 0; head < layer_.num_kv_heads; ++head, start += head_size_) {
            rotate<P>((const Number*)a_.k + token * a_.k_stride + head * width, turned, layer_, position, 1.0f);
            put_crosswise<P>((Number*)a_.keys + start, position % kBlock, turned, width);
            P::put_lengthwise((Number*)a_.values + start, position % kBlock,
                              (const Number*)a_.v + token * a_.v_stride + head * width, width);
        }
    }

    // Pointers to `count` blocks of keys or values of one head; the last used block of the token is repeated for later ones.
    void point(const void* cache, int64_t token, int64_t head, int64_t first, int64_t count, const Number** at) const {
        int64_t last = num_blocks(token) - 1;
        for (int64_t i = 0; i < count; ++i) {
            int64_t block = table(token)[std::min(first + i, last)];
            at[i] = (const Number*)cache + (block * layer_.num_kv_heads + head) * head_size_;
        }
    }

    int64_t lowest_seen(int64_t position) const {
        return layer_.window ? std::max<int64_t>(0, position - layer_.window + 1) : 0;
    }

    // The rows of one tile and key/value head. A unit is a tile times the number of those heads plus a head.
    void attend(int64_t unit, int64_t next_unit, Scratch& scratch) const {
        const Tile &tile = tiles_[unit / layer_.num_kv_heads], &next_tile = tiles_[next_unit / layer_.num_kv_heads];
        int64_t head = unit % layer_.num_kv_heads, num_rows = tile.count * group_, last_token = tile.token + tile.count - 1;
        int64_t end = 0;
        for (int64_t token = tile.token; token <= last_token; ++token) end = std::max(end, num_blocks(token));
        begin(tile, head, scratch);
        const Number *keys[kSpanBlocks], *values[kSpanBlocks], *next[kSpanBlocks];
        for (int64_t block = scratch.states[0].low / kBlock, stop; block < end; block = stop) {
            stop = std::min(end, (block / kSpanBlocks + 1) * kSpanBlocks);
            int64_t count = std::max<int64_t>(0, std::min(stop, tile.shared) - block);
            Rows products = {scratch.products.data(), kSpan};
            point(a_.keys, last_token, head, block, count, keys);
            point(a_.values, last_token, head, block, count, values);
            bool is_last = stop == end;
            int64_t first = is_last ? lowest_seen(a_.position[next_tile.token]) / kBlock : stop;
            point(a_.keys, is_last ? next_tile.token + next_tile.count - 1 : last_token,
                  is_last ? next_unit % layer_.num_kv_heads : head, first, count, next);
            if (count) multiply<P>({scratch.queries.data(), stride_}, num_rows, width_, {keys, values, count}, products);
            Span span = {block, count, stop};
            if (tile.joined) multiply_own(tile, head, span, scratch);
            for (int64_t row = 0; row < num_rows; ++row) {
                int64_t used = tile.joined ? count + num_own(tile.token + row / group_, span) : count;
                if (used)
                    scratch.factors[row] = weigh<P>(products.from(row).data, used * kBlock, block * kBlock, layer_,
                                                    scratch.states[row]);
            }
            if (count)
                add_weighted<P>({products.data, kSpan, 1, scratch.factors.data()}, num_rows, {values, next, count}, width_,
                                {scratch.sums.data(), stride_});
            if (tile.joined) add_own(tile, head, span, scratch);
        }
        finish(tile, head, scratch);
    }

    // Blocks from `block` to `stop`, of which the tile has the first `shared` in common.
    struct Span {
        int64_t block, shared, stop;
    };

    int64_t num_own(int64_t token, const Span& span) const {
        return std::max<int64_t>(0, std::min(span.stop, num_blocks(token)) - span.block - span.shared);
    }

    // Products with the keys that each sequence of the tile has for itself, behind those with the shared ones.
    void multiply_own(const Tile& tile, int64_t head, const Span& span, Scratch& scratch) const {
        const Number* keys[kSpanBlocks];
        for (int64_t i = 0; i < tile.count; ++i) {
            int64_t count = num_own(tile.token + i, span), row = i * group_;
            point(a_.keys, tile.token + i, head, span.block + span.shared, count, keys);
            multiply<P>({scratch.queries.data() + row * stride_, stride_}, count ? group_ : 0, width_, {keys, nullptr, count},
                        {scratch.products.data() + row * kSpan + span.shared * kBlock, kSpan});
        }
    }

    void add_own(const Tile& tile, int64_t head, const Span& span, Scratch& scratch) const {
        const Number* values[kSpanBlocks];
        for (int64_t i = 0; i < tile.count; ++i) {
            int64_t count = num_own(tile.token + i, span), row = i * group_;
            point(a_.values, tile.token + i, head, span.block + span.shared, count, values);
            const float* weights = scratch.products.data() + row * kSpan + span.shared * kBlock / P::kPerStep;
            add_weighted<P>({weights, kSpan, 1, span.shared ? nullptr : scratch.factors.data() + row}, count ? group_ : 0,
                            {values, nullptr, count}, width_, {scratch.sums.data() + row * stride_, stride_});
        }
    }

    void begin(const Tile& tile, int64_t head, Scratch& scratch) const {
        std::fill_n(scratch.sums.data(), tile.count * group_ * stride_, 0.0f);
        for (int64_t row = 0; row < tile.count * group_; ++row) {
            int64_t token = tile.token + row / group_, position = a_.position[token];
            const Number* query = (const Number*)a_.q + token * a_.q_stride + (head * group_ + row % group_) * width_;
            rotate<P>(query, scratch.head<Number>(), layer_, position, 1.0f);
            P::store_steps(scratch.queries.data() + row * stride_, scratch.head<Number>(), width_);
            float sink = sink_of(layer_, head * group_ + row % group_);
            scratch.states[row] = {lowest_seen(position), position, sink, layer_.sinks ? 1.0f : 0.0f};
        }
    }

    void finish(const Tile& tile, int64_t head, Scratch& scratch) const {
        for (int64_t row = 0; row < tile.count * group_; ++row) {
            int64_t token = tile.token + row / group_;
            Number* out = (Number*)a_.out + (token * layer_.num_heads + head * group_ + row % group_) * width_;
            const float* sums = scratch.sums.data() + row * stride_;
            float inverse = 1.0f / scratch.states[row].total;
            each_vector(width_, [&](int64_t i, int count) {
                if (count == kLanes) P::store_numbers(out + i, load(sums + i) * inverse);
                else store(out + i, load(sums + i) * inverse, count);
            });
        }
    }

    const AttendArguments& a_;
    const Layer& layer_;
    const int64_t group_, width_, stride_, head_size_;
    std::vector<Tile> tiles_;
};

}  // namespace

extern "C" int32_t attend(const AttendArguments* a) {
    if (!a->layer.is_bfloat16) return Forward<Single<float>>(*a).run();
#ifdef __AVX512BF16__
    if (a->layer.head_dim % kLanes == 0) return Forward<Pairs>(*a).run();
#endif
    return Forward<Single<uint16_t>>(*a).run();
}
