// Functions of one number that loops over arrays vectorize: powers of two, and conversions between fp32 and bf16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "processors.h"

#if !defined(__GNUC__)
#define __restrict__ __restrict
#endif

namespace {

constexpr float LOG2_E = 1.44269504f;

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// 2^t = 2^i 2^f, 2^f by its Taylor polynomial on [-1/2, 1/2], within 1e-8. t is kept in [-126, 126].
INLINE float exp2_of(float t) {
    t = t > 126.0f ? 126.0f : t;
    t = t < -126.0f ? -126.0f : t;
    constexpr float ROUND = 12582912.0f;      // 1.5 * 2^23: the sum's last bits are t, rounded to a whole number
    const float rounded = t + ROUND, f = t - (rounded - ROUND);
    float p = 1.52527338e-5f;                 // ln(2)^n / n!
    p = p * f + 1.54035304e-4f;
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return p * float_of((bits_of(rounded) - bits_of(ROUND) + 127) << 23);
}

// Rounded to nearest, ties to even; NaN stays a quiet NaN. A choice, not a branch: loops vectorize.
INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x), quiet = bits | 0x400000, nearest = bits + 0x7fff + (bits >> 16 & 1);
    return uint16_t(((bits & 0x7fffffff) > 0x7f800000 ? quiet : nearest) >> 16);
}

INLINE void widen(const uint16_t* __restrict__ x, float* __restrict__ y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = float_of(uint32_t(x[i]) << 16);
}

INLINE void narrow(const float* __restrict__ x, uint16_t* __restrict__ y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = to_bf16(x[i]);
}

}  // namespace
