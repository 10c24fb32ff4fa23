// Philox 4x64-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): the
// bits of numpy.random.Philox and of megatron_ds/ops/keep_tables.py.
//
//   table of a key, rows x cols: number (r, c) is the c % 16th of counter 1 + r ceil(cols / 16) + c / 16
//   words of a counter w0 w1 w2 w3, 16 bits a number, the lowest first:
//                                                0..3 of w0 | 4..7 of w1 | 8..11 of w2 | 12..15 of w3
//   an element is kept when its number is below a threshold of 1 .. 65536 (kept of 65536)
//
//   Words w = philox(counter_of(row, cols, c / 16), key);
//   bool keep = number(w.at[c % 16 / 4], c % 4) < threshold;
//
// Only the lowest of the four words of a counter and of the two of a key is not 0. Cost: 19 products of
// 64 x 64 bits for 16 numbers (one of the first round is 0), on sm_90 200 instructions; 30 registers.
#pragma once
#include "device.cuh"

struct Words { uint64_t at[4]; };

constexpr int NUMBERS = 16;                                              // of a counter
constexpr int ROUNDS = 10;

INLINE Words philox(uint64_t counter, uint64_t key) {
    constexpr uint64_t M0 = 0xD2E7470EE14C6C93u, M1 = 0xCA5A826395121157u;
    constexpr uint64_t STEP0 = 0x9E3779B97F4A7C15u, STEP1 = 0xBB67AE8584CAA73Bu;
    uint64_t x0 = counter, x1 = 0, x2 = 0, x3 = 0, k0 = key, k1 = 0;
    #pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const uint64_t high0 = __umul64hi(x0, M0), low0 = x0 * M0;
        const uint64_t high1 = __umul64hi(x2, M1), low1 = x2 * M1;
        x0 = high1 ^ x1 ^ k0; x1 = low1; x2 = high0 ^ x3 ^ k1; x3 = low0;
        k0 += STEP0; k1 += STEP1;
    }
    return {{x0, x1, x2, x3}};
}

// Counters of a row of a table with `cols` columns; the counter of numbers 16 unit .. 16 unit + 15 of a row.
INLINE int counters_of_row(int cols) { return (cols + NUMBERS - 1) / NUMBERS; }
INLINE uint64_t counter_of(int64_t row, int cols, int unit) {
    return 1 + uint64_t(row) * counters_of_row(cols) + unit;
}

// Number 0..3 of a word, from the half of 32 bits that has it.
INLINE uint32_t number(uint64_t word, int place) {
    return uint32_t(word >> (place & 2 ? 32 : 0)) >> (place & 1 ? 16 : 0) & 0xffff;
}
