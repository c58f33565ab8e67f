// A number for the bytes of each tensor, at the speed of memory; torch_impl.py is the definition. Blocks are shared out
// among the threads, and sums of integers do not depend on their order.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// The fields are those of the structure of the same name in api.py.
struct Bytes {
    const unsigned char* values;
    int64_t size;
};

namespace {

constexpr int64_t kPairs = 1024;            // pairs of words of 4 bytes in a block
constexpr int64_t kBlock = 2 * kPairs * 4;  // bytes; with its keys it fits into a first-level cache

typedef uint32_t Word __attribute__((aligned(1), may_alias));

inline uint64_t mixed(uint64_t word, uint64_t place) {
    word += (place + 1) * 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

struct Keys {
    uint32_t first[2 * kPairs], second[2 * kPairs];

    Keys() {
        for (int64_t i = 0; i < 2 * kPairs; ++i) {
            first[i] = (uint32_t)mixed(0, (uint64_t)i);
            second[i] = (uint32_t)(mixed(0, (uint64_t)i) >> 32);
        }
    }
};

inline uint64_t product(uint32_t a, uint32_t b) { return (uint64_t)((int64_t)(int32_t)a * (int32_t)b); }

uint64_t block_digest(const Word* words, const Keys& keys, uint64_t block) {
    uint64_t first = 0, second = 0;
    for (int64_t i = 0; i < kPairs; ++i) {
        uint32_t a = words[i], b = words[i + kPairs];
        first += product(a + keys.first[i], b + keys.first[i + kPairs]);
        second += product(a + keys.second[i], b + keys.second[i + kPairs]);
    }
    return mixed(mixed(first, block) + second, block);
}

}  // namespace

extern "C" void digests(const Bytes* tensors, int64_t count, uint64_t* found, int64_t num_threads) {
    static const Keys keys;
    std::vector<int64_t> start{0};
    for (int64_t i = 0; i < count; ++i) {
        found[i] = mixed((uint64_t)tensors[i].size, UINT64_MAX - 1);
        start.push_back(start.back() + (tensors[i].size + kBlock - 1) / kBlock);
    }
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (num_threads > 1 && start.back() > 16)
    for (int64_t i = 0; i < start.back(); ++i) {
        int64_t tensor = std::upper_bound(start.begin(), start.end(), i) - start.begin() - 1, block = i - start[tensor];
        const unsigned char* values = tensors[tensor].values + block * kBlock;
        int64_t size = tensors[tensor].size - block * kBlock;
        unsigned char padded[kBlock];
        if (size < kBlock) {
            std::memset(padded, 0, kBlock);
            std::memcpy(padded, values, size);
            values = padded;
        }
        uint64_t digest = block_digest((const Word*)values, keys, (uint64_t)block);
#pragma omp atomic
        found[tensor] += digest;
    }
}
