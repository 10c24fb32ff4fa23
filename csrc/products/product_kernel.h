// Parts of a product C = A B of matrices in fp32 or bf16: tiles of C, whose sums stay in registers. product_packing.h makes the
// copies of the factors.
//
// A tile has TALL rows and one to three registers of columns: 24 sums, which hide the latency of a product. For each packed number
// of a sum it reads one row of B, and one packed number of A for each row of the tile.
//
// Only for processors with AVX-512 F, BW, DQ, VL and, for bf16, BF16: product.cpp asks before it calls anything here.

#pragma once

#include "product_packing.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

// Where the sums of a tile go: value = sum + before + bias, each of the two or neither, to fp32 or bf16.
template <typename Number>
struct Target {
    const float* before;
    const Number* bias;
    float* wide;             // or
    uint16_t* narrow;
    int64_t row;             // of `before` and `wide`, or
    int64_t narrow_row;

    void fetch_to_write(int64_t i, int64_t j) const {
        wide ? __builtin_prefetch(wide + i * row + j, 1) : __builtin_prefetch(narrow + i * narrow_row + j, 1);
    }
    Target at(int64_t i, int64_t j) const {
        return {before ? before + i * row + j : nullptr, bias ? bias + j : nullptr, wide ? wide + i * row + j : nullptr,
                narrow ? narrow + i * narrow_row + j : nullptr, row, narrow_row};
    }
};

INLINE __m512 load_wide(const float* x, __mmask16 some) { return _mm512_maskz_loadu_ps(some, x); }
INLINE __m512 load_wide(const uint16_t* x, __mmask16 some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, x)), 16));
}

// Almost all registers are whole, and need no mask.
INLINE void store_first(uint16_t* x, __mmask16 some, __m256i value) {
    if (some == 0xffff)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), value);
    else
        _mm256_mask_storeu_epi16(x, some, value);
}

template <int N, typename Number>
INLINE void put(const __m512 (&sums)[TALL][N], const Target<Number>& c, int64_t rows, int64_t columns) {
#pragma GCC unroll 8
    for (int i = 0; i < TALL; ++i) {
        if (i >= rows) return;
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) {
            const __mmask16 some = first_of_16(columns - j * WIDE);
            __m512 value = sums[i][j];
            if (c.before) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, c.before + i * c.row + j * WIDE));
            if (c.bias) value = _mm512_add_ps(value, load_wide(c.bias + j * WIDE, some));
            if (c.wide)
                _mm512_mask_storeu_ps(c.wide + i * c.row + j * WIDE, some, value);
            else
                store_first(c.narrow + i * c.narrow_row + j * WIDE, some, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

template <int N, typename Packed, typename Number>
void tile_of(const Packed* a, const Packed* b, int64_t length, const Target<Number>& c, int64_t rows, int64_t columns) {
    __m512 sums[TALL][N];
    for (auto& row : sums)
        for (__m512& sum : row) sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < N; ++j)
            c.fetch_to_write(i, j * WIDE);
    for (int64_t k = 0; k < length; ++k) {
        decltype(register_of(b)) row[N];
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) row[j] = register_of(b + j * WIDE);
#pragma GCC unroll 8
        for (int i = 0; i < TALL; ++i) {
            const auto one = broadcast(a[i]);
#pragma GCC unroll 3
            for (int j = 0; j < N; ++j) sums[i][j] = sum_of(sums[i][j], one, row[j]);
        }
        a += TALL;
        b += N * WIDE;
    }
    put(sums, c, rows, columns);
}

// A tile of C: TALL rows of A times a panel of B, `length` packed numbers long.
template <typename Packed, typename Number>
void tile(const Packed* a, const Packed* b, int64_t length, const Target<Number>& c, int64_t rows, int64_t columns) {
    switch ((columns + WIDE - 1) / WIDE) {
        case 3: return tile_of<3>(a, b, length, c, rows, columns);
        case 2: return tile_of<2>(a, b, length, c, rows, columns);
        default: return tile_of<1>(a, b, length, c, rows, columns);
    }
}

}  // namespace

#pragma GCC pop_options
