// Fisher and Yates' shuffle from the back, with the random numbers of numpy's RandomState and of C++'s mt19937_64.
//
//   for i = n − 1 … 1:  j = a random number in 0 … i;  swap(x[i], x[j])
//
// The numbers j do not depend on what is shuffled. They are drawn a few hundred ahead, and the memory they point to is fetched
// meanwhile: with millions of elements the time of a plain loop is waiting for x[j].

#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

#include "../common/processors.h"

namespace {

constexpr int64_t AHEAD = 256;

// The Mersenne Twister of C++'s mt19937(seed), or at the state that numpy hands out, `key` and `position`, and at last takes
// back. Matsumoto and Nishimura 1998, "Mersenne Twister". The standard library's takes three times as long to twist.
class Twister {
public:
    static constexpr int WORDS = 624;

    Twister(uint32_t* key, int position) : key_(key), position_(position) {}

    static Twister seeded(uint32_t* key, uint32_t seed) {
        key[0] = seed;
        for (uint32_t i = 1; i < WORDS; ++i) key[i] = 1812433253u * (key[i - 1] ^ key[i - 1] >> 30) + i;
        return Twister(key, WORDS);
    }

    int position() const { return position_; }

    INLINE_MEMBER uint32_t operator()() {
        if (position_ == WORDS) twist();
        uint32_t y = key_[position_++];
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c5680u;
        y ^= y << 15 & 0xefc60000u;
        return y ^ y >> 18;
    }

private:
    static constexpr int MIDDLE = 397;

    static uint32_t mixed(uint32_t high, uint32_t low, uint32_t far) {
        const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
        return far ^ y >> 1 ^ ((0u - (y & 1)) & 0x9908b0dfu);
    }

    void twist() {
        int i = 0;
        for (; i < WORDS - MIDDLE; ++i) key_[i] = mixed(key_[i], key_[i + 1], key_[i + MIDDLE]);
        for (; i < WORDS - 1; ++i) key_[i] = mixed(key_[i], key_[i + 1], key_[i + MIDDLE - WORDS]);
        key_[i] = mixed(key_[i], key_[0], key_[MIDDLE - 1]);
        position_ = 0;
    }

    uint32_t* key_;
    int position_;
};

// x[0 … n − 1] as numpy.random.RandomState.shuffle leaves it; n <= 2^32. numpy draws j under the smallest mask of ones that
// covers i, again while it is larger than i.
template <typename Element>
void shuffle_as_numpy(Element* x, int64_t n, Twister& random) {
    uint32_t drawn[AHEAD];
    for (int64_t i = n - 1; i > 0;) {
        uint32_t mask = static_cast<uint32_t>(i);
        for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
        const int64_t count = std::min(AHEAD, i - (mask >> 1));     // i … mask / 2 + 1 have this mask
        for (int64_t k = 0; k < count;) {
            const uint32_t j = random() & mask;
            drawn[k] = j;
            PREFETCH(x + j);
            k += j <= static_cast<uint64_t>(i - k);                 // kept or drawn again, without a jump
        }
        for (int64_t k = 0; k < count; ++k) std::swap(x[i - k], x[drawn[k]]);
        i -= count;
    }
}

// Rows of WIDTH numbers, j = mt19937_64(seed) % (i + 1).
template <int WIDTH, typename Number>
void shuffle_rows(Number* rows, int64_t n, uint64_t seed) {
    std::mt19937_64 random(seed);
    int64_t drawn[AHEAD];
    for (int64_t i = n - 1; i > 0;) {
        const int64_t count = std::min(AHEAD, i);
        for (int64_t k = 0; k < count; ++k) {
            drawn[k] = static_cast<int64_t>(random() % static_cast<uint64_t>(i - k + 1));
            PREFETCH(rows + WIDTH * drawn[k]);
        }
        for (int64_t k = 0; k < count; ++k)
            std::swap_ranges(rows + WIDTH * (i - k), rows + WIDTH * (i - k + 1), rows + WIDTH * drawn[k]);
        i -= count;
    }
}

}  // namespace
