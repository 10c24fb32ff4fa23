// The symbols of a piece → ids: of all neighbours that can be merged, the pair that was learned first, until no pair can be
// (Sennrich et al. 2016, arXiv:1508.07909, algorithm 1). By scanning where symbols are few, with a queue where they are many.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace {

using Ids = std::vector<int32_t>;

constexpr size_t FEW = 48;                      // symbols up to which scanning all pairs beats a queue
constexpr uint32_t NO_RANK = UINT32_MAX;

uint64_t mix(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd1b54a32d192ed03ull);
    return uint64_t(product) ^ uint64_t(product >> 64);
}

struct Merge {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = NO_RANK;
    int32_t id = 0;
};

class Merges {
public:
    explicit Merges(size_t count) {
        size_t size = 16;
        while (size < 2 * count) size *= 2;
        slots_.resize(size);
    }

    void set(int32_t left, int32_t right, uint32_t rank, int32_t id) {
        const uint64_t pair = key(left, right);
        slots_[place(pair)] = {pair, rank, id};
    }

    const Merge& get(int32_t left, int32_t right) const { return slots_[place(key(left, right))]; }

private:
    static uint64_t key(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }

    size_t place(uint64_t pair) const {
        const size_t mask = slots_.size() - 1;
        size_t i = mix(pair, pair) & mask;
        while (slots_[i].pair != pair && slots_[i].pair != UINT64_MAX) i = (i + 1) & mask;
        return i;
    }

    std::vector<Merge> slots_;
};

void merge_few(const Merges& merges, Ids& ids) {
    std::array<Merge, FEW> pairs;
    size_t n = ids.size();
    for (size_t i = 0; i + 1 < n; ++i) pairs[i] = merges.get(ids[i], ids[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; ++i)
            if (pairs[i].rank < pairs[best].rank) best = i;
        if (pairs[best].rank == NO_RANK) break;
        ids[best] = pairs[best].id;
        std::copy(ids.begin() + best + 2, ids.begin() + n, ids.begin() + best + 1);
        if (best + 2 < n) std::copy(pairs.begin() + best + 2, pairs.begin() + n - 1, pairs.begin() + best + 1);
        --n;
        if (best > 0) pairs[best - 1] = merges.get(ids[best - 1], ids[best]);
        if (best + 1 < n) pairs[best] = merges.get(ids[best], ids[best + 1]);
    }
    ids.resize(n);
}

// As merge_few, with a queue and a linked list: a text without spaces is one piece of any length.
void merge_many(const Merges& merges, Ids& ids) {
    const size_t n = ids.size(), none = n;
    std::vector<size_t> before(n), after(n);
    using Entry = std::pair<uint64_t, int32_t>;                  // rank and index, in this order; the merged id
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    const auto offer = [&](size_t i) {
        if (i == none || after[i] == none) return;
        const Merge& merge = merges.get(ids[i], ids[after[i]]);
        if (merge.rank != NO_RANK) queue.push({uint64_t(merge.rank) << 32 | i, merge.id});
    };
    for (size_t i = 0; i < n; ++i) {
        before[i] = i ? i - 1 : none;
        after[i] = i + 1;                                        // n at the end, which is `none`
    }
    for (size_t i = 0; i < n; ++i) offer(i);
    while (!queue.empty()) {
        const auto [order, id] = queue.top();
        queue.pop();
        const size_t i = order & UINT32_MAX, j = ids[i] < 0 ? none : after[i];
        if (j == none) continue;
        const Merge& merge = merges.get(ids[i], ids[j]);
        if (merge.rank != order >> 32) continue;                 // one of the two has been merged with another since
        ids[i] = id;
        ids[j] = -1;
        after[i] = after[j];
        if (after[j] != none) before[after[j]] = i;
        offer(before[i]);
        offer(i);
    }
    ids.erase(std::remove(ids.begin(), ids.end(), -1), ids.end());
}

}  // namespace
