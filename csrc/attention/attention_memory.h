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

// Where packed units of keys are: a unit has a slot from the first tile of queries that sees it to the last. Free slots are given in
// turn, so that units of a window, which come and go in order, lie in order; or each unit has a slot of its own.
class Slots {
public:
    // For units [first, last), of which at most `count` have slots at a time; all of them with slots of their own. slot_of
    // [last - first] and free [count] are memory.
    Slots(int32_t* slot_of, int32_t* free, int64_t first, int64_t last, int64_t count, bool are_own)
        : slot_of_(slot_of - first), free_(free), first_(first), last_(last), count_(count), are_own_(are_own) {
        std::fill(slot_of, slot_of + last - first, NEVER);
        for (int64_t i = 0; i < count; ++i) free[i] = int32_t(i);
    }

    bool has(int64_t unit) const { return unit >= first_ && unit < last_ && slot_of_[unit] >= 0; }
    int32_t of(int64_t unit) const { return slot_of_[unit]; }
    bool never_had(int64_t unit) const { return slot_of_[unit] == NEVER || slot_of_[unit] == REQUESTED; }

    // True once for each unit that has not had a slot.
    bool is_first_request(int64_t unit) {
        if (unit < first_ || unit >= last_ || slot_of_[unit] != NEVER) return false;
        slot_of_[unit] = REQUESTED;
        return true;
    }

    void give(int64_t unit) {
        slot_of_[unit] = are_own_ ? int32_t(unit - first_) : free_[given_];
        given_ = after(given_);
    }
    void take_back(int64_t unit) {
        if (!are_own_) free_[returned_] = slot_of_[unit];
        returned_ = after(returned_);
        slot_of_[unit] = LEFT;
    }

private:
    static constexpr int32_t NEVER = -1, REQUESTED = -2, LEFT = -3;
    int64_t after(int64_t i) const { return i + 1 == count_ ? 0 : i + 1; }

    int32_t *slot_of_, *free_;      // the free ones are those from given_ to returned_
    int64_t first_, last_, count_, given_ = 0, returned_ = 0;
    bool are_own_;
};

// Rows that will be read or written soon. The rows of a head are far from each other, so the processor does not fetch them ahead by
// itself; and with more than some 64 lines on their way the next prefetch waits. So products fetch a few lines at each of their steps.
class Fetches {
public:
    // Rows [from, to) of d numbers, unless too much is waiting. Rows that will be written are fetched as if to be read: no other core has
    // them.
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
    static constexpr int64_t LINE = 64, LINES = 16;      // bytes; of a step, about: it ends with a whole row
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
