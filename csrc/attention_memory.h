// Memory of a thread: arrays, slots of packed units of keys, and rows that are fetched ahead.

#pragma once

#include "attention_plan.h"

namespace {

// Takes aligned arrays from a thread's memory; without memory it counts them.
class Arena {
public:
    explicit Arena(char* memory) : memory_(memory) {}

    template <typename T>
    void take(T*& array, int64_t count) {
        array = reinterpret_cast<T*>(memory_ + used_);
        used_ += rounded_up(count * int64_t(sizeof(T)), ALIGNMENT);
    }
    int64_t used() const { return used_ + ALIGNMENT; }

    static char* aligned(uintptr_t x) { return reinterpret_cast<char*>(rounded_up(intptr_t(x), ALIGNMENT)); }

private:
    static constexpr int64_t ALIGNMENT = 64;
    char* memory_;
    int64_t used_ = 0;
};

// Which packed unit of keys a slot has. With a slot for each unit they lie in order; with fewer, a unit that is packed takes the slot
// of the one that was packed first.
class Slots {
public:
    static constexpr int32_t NONE = -1;

    // Of units [first, last), of which `reach` have to have slots at a time. There is memory for `most` slots, at least as many:
    // slot_of [last - first], unit_in [most].
    Slots(int32_t* slot_of, int32_t* unit_in, int64_t first, int64_t last, int64_t reach, int64_t most)
        : slot_of_(slot_of - first), unit_in_(unit_in), first_(first), last_(last),
          is_in_order_(last - first <= std::min(most, 2 * reach)), count_(is_in_order_ ? last - first : std::max<int64_t>(1, reach)) {
        std::fill(slot_of, slot_of + last - first, NEVER);
        std::fill(unit_in, unit_in + count_, NONE);
    }

    bool has(int64_t unit) const { return slot_of_[unit] >= 0; }
    int32_t of(int64_t unit) const { return slot_of_[unit]; }
    bool never_had(int64_t unit) const { return slot_of_[unit] == NEVER || slot_of_[unit] == REQUESTED; }

    // True once for each unit that has not been packed.
    bool is_first_request(int64_t unit) {
        if (unit < first_ || unit >= last_ || slot_of_[unit] != NEVER) return false;
        slot_of_[unit] = REQUESTED;
        return true;
    }

    // Gives a unit a slot; returns the unit that had it, or NONE.
    int32_t take(int64_t unit) {
        const int32_t slot = is_in_order_ ? int32_t(unit - first_) : next_;
        const int32_t before = unit_in_[slot];
        if (before != NONE) slot_of_[before] = LEFT;
        unit_in_[slot] = int32_t(unit);
        slot_of_[unit] = slot;
        next_ = slot + 1 == count_ ? 0 : slot + 1;
        return before;
    }

private:
    static constexpr int32_t NEVER = -1, REQUESTED = -2, LEFT = -3;
    int32_t *slot_of_, *unit_in_;
    int64_t first_, last_;
    bool is_in_order_;
    int64_t count_;
    int32_t next_ = 0;
};

// Rows that will be read or written soon. The rows of a head are far from each other, so the processor does not fetch them ahead by
// itself; and with more than some 64 lines on their way the next prefetch waits. So products fetch a few lines at each of their steps.
class Fetches {
public:
    // Rows [from, to) of d numbers, unless too much is waiting.
    template <typename T>
    void add(const Rows<T>& x, int64_t from, int64_t to, int64_t d) {
        if (from >= to || waiting_ == MOST) return;
        blocks_[(first_ + waiting_++) % MOST] = {reinterpret_cast<const char*>(x[from]), x.stride * int64_t(sizeof(T)), to - from,
                                                 d * int64_t(sizeof(T))};
    }

    INLINE_MEMBER void step() {
        if (waiting_ > 0) fetch();
    }

private:
    static constexpr int64_t LINE = 64, LINES = 8;       // bytes; of a step
    static constexpr int MOST = 64;
    struct Block {
        const char* row;
        int64_t stride, rows, bytes;
    };

    // Not within each product, whose loops have no registers left.
    __attribute__((noinline)) void fetch() {
        Block& block = blocks_[first_];
        for (int64_t fetched = 0; fetched < LINES * LINE && block.rows > 0; fetched += block.bytes) {
            for (int64_t at = 0; at < block.bytes; at += LINE) _mm_prefetch(block.row + at, _MM_HINT_T0);
            block.row += block.stride;
            --block.rows;
        }
        if (block.rows > 0) return;
        first_ = (first_ + 1) % MOST;
        --waiting_;
    }

    Block blocks_[MOST];
    int first_ = 0, waiting_ = 0;
};

}  // namespace
