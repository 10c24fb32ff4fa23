// GELU with tanh of bf16 numbers, forward and backward, for AVX-512; gelu.cpp has the maths.
//
// Numbers stay in registers between loading and storing. The last numbers, fewer than 32, are loaded and stored under a mask and
// pass through the same instructions: a result does not depend on where its number lies.
//
// Precision: fused multiply-adds. 2^f has a relative error below 2e-7 with its rounding, and t, the power's exponent, one of 2e-7 |t|:
// 1e-6 of y for x > -2.5, 2e-5 at -10. A bf16 result has 4e-3 between neighbours.
//
// Division: a quotient takes less time than an approximate reciprocal and its correction, because other instructions run meanwhile,
// and it has the same bits on every processor.
//
// Small results: the instruction that rounds to bf16 makes results below 2^-126 zero.
//
// Only where has_products() is true.

#pragma once

#include "../common/bf16_vectors.h"

namespace {

constexpr float C = 0.7978845608f, K = 0.044715f;

}  // namespace

#ifdef HAS_BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr float END = 10;      // from here on y is x or less than 1e-36 in size, and its slope 1 or 0; e = 2^126 is in range

// NaN stays NaN: of two numbers, one of them NaN, these instructions take the second.
INLINE __m512 not_below_end(__m512 x) { return _mm512_max_ps(broadcast(-END), x); }
INLINE __m512 not_above_end(__m512 x) { return _mm512_min_ps(broadcast(END), x); }

INLINE __m512 plus(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
INLINE __m512 times(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }

// 2^t = 2^i 2^f, 2^f by a polynomial on [-1/2, 1/2] with the smallest maximum of the relative error, 1e-7, of those with p(0) = 1.
INLINE __m512 exp2_of(__m512 t) {
    const __m512 i = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(t, i);
    __m512 p = broadcast(1.32647273e-3f);
    p = sum_of(broadcast(9.67151299e-3f), p, f);
    p = sum_of(broadcast(5.55073358e-2f), p, f);
    p = sum_of(broadcast(2.40222424e-1f), p, f);
    p = sum_of(broadcast(6.93147004e-1f), p, f);
    p = sum_of(broadcast(1.0f), p, f);
    return _mm512_scalef_ps(p, i);
}

// s = 1 / (1 + e) of x in [-END, END]
INLINE __m512 sigmoid(__m512 x, __m512 square) {
    const __m512 t = times(x, sum_of(broadcast(-2 * C * LOG2_E), square, broadcast(-2 * C * LOG2_E * K)));
    return _mm512_div_ps(broadcast(1.0f), plus(broadcast(1.0f), exp2_of(t)));
}

INLINE __m512 gelu(__m512 x) {
    const __m512 above = not_below_end(x), near = not_above_end(above);
    return times(above, sigmoid(near, times(near, near)));
}

// dx = dy (s + s (w - s w)), w = 2c x (1 + 3 k x^2). Where s is near 1, 1 - s has an error of 1e-7, which is as little of the slope.
INLINE __m512 gelu_backward(__m512 x, __m512 dy) {
    const __m512 near = not_above_end(not_below_end(x)), square = times(near, near), s = sigmoid(near, square);
    const __m512 w = times(near, sum_of(broadcast(2 * C), square, broadcast(6 * C * K)));
    return times(dy, sum_of(s, s, _mm512_fnmadd_ps(s, w, w)));
}

INLINE __m512i gelu_of_32(__m512i numbers) {
    const Halves x = widened(numbers);
    return narrowed({gelu(x.even), gelu(x.odd)});
}

INLINE __m512i gelu_backward_of_32(__m512i numbers, __m512i gradients) {
    const Halves x = widened(numbers), dy = widened(gradients);
    return narrowed({gelu_backward(x.even, dy.even), gelu_backward(x.odd, dy.odd)});
}

void forward_in_vectors(const uint16_t* x, uint16_t* y, int64_t count) {
    int64_t i = 0;
    for (; i + PAIRED <= count; i += PAIRED) store(y + i, gelu_of_32(load(x + i)));
    if (i == count) return;
    const __mmask32 rest = first_of_32(count - i);
    _mm512_mask_storeu_epi16(y + i, rest, gelu_of_32(_mm512_maskz_loadu_epi16(rest, x + i)));
}

void backward_in_vectors(const uint16_t* x, const uint16_t* dy, uint16_t* dx, int64_t count) {
    int64_t i = 0;
    for (; i + PAIRED <= count; i += PAIRED) store(dx + i, gelu_backward_of_32(load(x + i), load(dy + i)));
    if (i == count) return;
    const __mmask32 rest = first_of_32(count - i);
    const __m512i last = gelu_backward_of_32(_mm512_maskz_loadu_epi16(rest, x + i), _mm512_maskz_loadu_epi16(rest, dy + i));
    _mm512_mask_storeu_epi16(dx + i, rest, last);
}

}  // namespace

#pragma GCC pop_options
#endif
