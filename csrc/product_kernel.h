// Parts of a product C = A B of bf16 matrices, by products of AVX-512 BF16: copies of the factors in the order in which they are
// read, and tiles of C, whose sums stay in registers.
//
// A tile has TALL rows and one to three registers of columns: 24 sums, which hide the latency of a product. For each pair of the
// summed dimension it reads one row of B, and of A one pair for each row of the tile.
//
// Sizes are any: copies have zeros beyond the last row, column and number of an odd sum.
//
// Only for processors with AVX-512 F, BW, DQ, VL and BF16: product.cpp asks before it calls anything here.

#pragma once

#include "bf16_vectors.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr int64_t TALL = 8, REGISTERS = 3, PANEL = REGISTERS * WIDE;      // rows of a tile; its columns
constexpr int64_t PAIR = sizeof(uint32_t);

// Element (i, j) is at data[i * row + j * column]; one of the two is 1.
struct Matrix {
    const uint16_t* data;
    int64_t row, column;

    const uint16_t* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

INLINE __mmask32 first_of_32(int64_t count) { return count >= 32 ? ~__mmask32(0) : count <= 0 ? 0 : (__mmask32(1) << count) - 1; }
INLINE __mmask16 first_of_16(int64_t count) { return __mmask16(first_of_32(std::min<int64_t>(count, 16))); }
INLINE __m512i load_first(const uint16_t* x, int64_t count) { return _mm512_maskz_loadu_epi16(first_of_32(count), x); }

// ------------------------------------------------------------------------------------------------------------- packing
// Both factors become pairs of the summed dimension: B panels [pairs, columns of PANEL], A tiles [pairs, TALL]. Where numbers of
// that dimension lie together, tiles of sixteen by sixteen pairs are transposed; where they lie apart, two rows are merged, SUM of
// them before the next columns: each row is on a page of its own, and few pages at a time are quickly found.
constexpr int64_t SUM = 2 * WIDE;
#ifndef FAR
#define FAR SUM
#endif

INLINE void fetch(const void* x) { __builtin_prefetch(x); }

// Sixteen rows of 32 numbers → the pairs of sixteen columns. Zeros beyond `rows` and `count`.
INLINE void load_columns(const uint16_t* x, int64_t stride, int64_t rows, int64_t count, __m512i* pairs) {
    for (int64_t i = 0; i < WIDE; ++i) {
        fetch(x + std::min(i, rows - 1) * stride + FAR);
        pairs[i] = load_first(x + i * stride, i < rows ? count : 0);
    }
    transpose(pairs);
}

// Two rows of 32 numbers → their pairs.
INLINE void load_pairs(const uint16_t* x, int64_t stride, int64_t rows, int64_t count, __m512i* pairs) {
    const __m512i first = load_first(x, count), second = load_first(x + stride, rows > 1 ? count : 0);
    fetch(x + SUM);
    fetch(x + (rows > 1 ? stride : 0) + SUM);
    pairs[0] = lower_pairs(first, second);
    pairs[1] = upper_pairs(first, second);
}

// Columns [column, column + columns) of B, at most a panel, whose columns lie together.
void pack_columns_of_b(const Matrix& b, int64_t column, int64_t columns, int64_t from, int64_t count, uint32_t* panel) {
    const int64_t registers = (columns + WIDE - 1) / WIDE;
    for (int64_t j = 0; j < registers; ++j)
        for (int64_t k = 0; k < count; k += SUM) {
            __m512i pairs[WIDE];
            load_columns(b.at(from + k, column + j * WIDE), b.column, columns - j * WIDE, count - k, pairs);
            for (int64_t i = 0; i < std::min(WIDE, (count - k + 1) / 2); ++i)
                store(panel + (k / 2 + i) * registers * WIDE + j * WIDE, pairs[i]);
        }
}

// Two tiles of A, whose rows lie together.
void pack_rows_of_a(const Matrix& a, int64_t row, int64_t rows, int64_t from, int64_t count, uint32_t* tiles) {
    const int64_t size = (count + 1) / 2 * TALL;
    for (int64_t k = 0; k < count; k += SUM) {
        __m512i pairs[WIDE];
        load_columns(a.at(row, from + k), a.row, rows, count - k, pairs);
        for (int64_t i = 0; i < std::min(WIDE, (count - k + 1) / 2); ++i) {
            uint32_t* at = tiles + (k / 2 + i) * TALL;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(pairs[i]));
            if (rows > TALL) _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + size), _mm512_extracti64x4_epi64(pairs[i], 1));
        }
    }
}

// Numbers [k, k + SUM) of the sums, of all `columns` columns from `column` on; rows of B lie together.
void pack_rows_of_b(const Matrix& b, int64_t column, int64_t columns, int64_t from, int64_t count, int64_t k, uint32_t* panels) {
    const int64_t all_pairs = (count + 1) / 2;
    for (int64_t first = 0; first < columns; first += PANEL) {
        const int64_t some = std::min(PANEL, columns - first), registers = (some + WIDE - 1) / WIDE;
        for (int64_t i = k; i < std::min(k + SUM, count); i += 2) {
            uint32_t* at = panels + first * all_pairs + i / 2 * registers * WIDE;
            for (int64_t j = 0; j < registers; j += 2) {
                __m512i pairs[2];
                load_pairs(b.at(from + i, column + first + j * WIDE), b.row, count - i, some - j * WIDE, pairs);
                store(at + j * WIDE, pairs[0]);
                if (j + 1 < registers) store(at + (j + 1) * WIDE, pairs[1]);
            }
        }
    }
}

// The same of all `rows` rows of A, whose columns lie together.
void pack_columns_of_a(const Matrix& a, int64_t row, int64_t rows, int64_t from, int64_t count, int64_t k, uint32_t* tiles) {
    const int64_t size = (count + 1) / 2 * TALL;
    for (int64_t first = 0; first < rows; first += 4 * TALL)
        for (int64_t i = k; i < std::min(k + SUM, count); i += 2) {
            __m512i pairs[2];
            load_pairs(a.at(row + first, from + i), a.column, count - i, rows - first, pairs);
            for (int64_t tile = 0; tile < 4; ++tile) {
                if (first + tile * TALL >= rows) break;
                const __m512i of = pairs[tile / 2];
                const __m256i half = tile % 2 ? _mm512_extracti64x4_epi64(of, 1) : _mm512_castsi512_si256(of);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(tiles + (first / TALL + tile) * size + i / 2 * TALL), half);
            }
        }
}

// --------------------------------------------------------------------------------------------------------------- tiles
// Where the sums of a tile go: value = sum + before + bias, each of the two or neither, to fp32 or bf16.
struct Target {
    const float* before;
    const uint16_t* bias;
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

INLINE __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// Almost all registers are whole, and need no mask.
INLINE void store_first(uint16_t* x, __mmask16 some, __m256i value) {
    if (some == 0xffff)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), value);
    else
        _mm256_mask_storeu_epi16(x, some, value);
}

template <int N>
INLINE void put(const __m512 (&sums)[TALL][N], const Target& c, int64_t rows, int64_t columns) {
#pragma GCC unroll 8
    for (int i = 0; i < TALL; ++i) {
        if (i >= rows) return;
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) {
            const __mmask16 some = first_of_16(columns - j * WIDE);
            __m512 value = sums[i][j];
            if (c.before) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, c.before + i * c.row + j * WIDE));
            if (c.bias) value = _mm512_add_ps(value, widened(_mm256_maskz_loadu_epi16(some, c.bias + j * WIDE)));
            if (c.wide)
                _mm512_mask_storeu_ps(c.wide + i * c.row + j * WIDE, some, value);
            else
                store_first(c.narrow + i * c.narrow_row + j * WIDE, some, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

template <int N>
void tile_of(const uint32_t* a, const uint32_t* b, int64_t pairs, const Target& c, int64_t rows, int64_t columns) {
    __m512 sums[TALL][N];
    for (auto& row : sums)
        for (__m512& sum : row) sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < N; ++j)
            c.fetch_to_write(i, j * WIDE);
    for (int64_t k = 0; k < pairs; ++k) {
        __m512i row[N];
#pragma GCC unroll 3
        for (int j = 0; j < N; ++j) row[j] = load(b + j * WIDE);
#pragma GCC unroll 8
        for (int i = 0; i < TALL; ++i) {
            const __m512i one = _mm512_set1_epi32(int(a[i]));
#pragma GCC unroll 3
            for (int j = 0; j < N; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)one, (__m512bh)row[j]);
        }
        a += TALL;
        b += N * WIDE;
    }
    put(sums, c, rows, columns);
}

// A tile of C: TALL rows of A times a panel of B.
inline void tile(const uint32_t* a, const uint32_t* b, int64_t pairs, const Target& c, int64_t rows, int64_t columns) {
    switch ((columns + WIDE - 1) / WIDE) {
        case 3: return tile_of<3>(a, b, pairs, c, rows, columns);
        case 2: return tile_of<2>(a, b, pairs, c, rows, columns);
        default: return tile_of<1>(a, b, pairs, c, rows, columns);
    }
}

}  // namespace

#pragma GCC pop_options
