// One row of bf16 numbers times a matrix whose rows are those of a sum, as in the generation of text: y = W x + bias.
//
// W is read once, so its bytes are the time. Sixteen rows of W are worked on at a time, eight sums in registers. An element is the
// same sum in the same order on any number of threads.
//
// Only for processors with AVX-512 F, BW, DQ, VL and BF16: product.cpp asks before it calls anything here.

#pragma once

#include "product_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

// y [rows] = W [rows, length] x + bias; rows of W are `stride` apart.
struct RowProduct {
    const uint16_t *w, *x, *bias;      // bias: null without
    uint16_t* y;
    int64_t rows, length, stride;
};

template <int N>
INLINE void take_dots(const uint16_t* w, const RowProduct& call, float* dots) {
    __m512 sums[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) sums[i] = _mm512_setzero_ps();
    int64_t j = 0;
    for (; j + PAIRED <= call.length; j += PAIRED) {
        const __m512i x = load(call.x + j);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sums[i] = sum_of(sums[i], load(w + i * call.stride + j), x);
    }
    if (j < call.length) {
        const __mmask32 some = first_of_32(call.length - j);
        const __m512i x = _mm512_maskz_loadu_epi16(some, call.x + j);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sums[i] = sum_of(sums[i], _mm512_maskz_loadu_epi16(some, w + i * call.stride + j), x);
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) dots[i] = _mm512_reduce_add_ps(sums[i]);
}

// Elements [from, to) of y; `from` is a multiple of WIDE.
inline void multiply_row(const RowProduct& call, int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row += WIDE) {
        alignas(64) float dots[WIDE] = {};
        const uint16_t* w = call.w + row * call.stride;
        const int64_t count = std::min(WIDE, to - row);
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) take_dots<8>(w + i * call.stride, call, dots + i);
        for (; i < count; ++i) take_dots<1>(w + i * call.stride, call, dots + i);
        const __mmask16 some = first_of_16(count);
        __m512 value = _mm512_load_ps(dots);
        if (call.bias) value = _mm512_add_ps(value, load_wide(call.bias + row, some));
        store_first(call.y + row, some, (__m256i)_mm512_cvtneps_pbh(value));
    }
}

}  // namespace

#pragma GCC pop_options
