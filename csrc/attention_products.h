// Products of fp32 and of bf16 numbers, whose sums stay in registers, and copies of rows in the order in which they are read.
//
// Of a product C = A B, packed numbers of A are single ones in memory, of any strides; those of B are rows of sixteen or more. One
// function serves all seven products of attention.
//
// Only for processors with AVX-512 F, BW, DQ and VL, and with BF16 where numbers are bf16: attention.cpp asks before it calls
// anything here.

#pragma once

#include <limits>

#include "bf16_vectors.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr int64_t ROWS = 64, REGISTERS = ROWS / WIDE;      // queries of a tile, and its registers
constexpr int64_t UNITS = 4;      // of keys worked on at once, in forward PER times as many

// Rows of one head: the numbers of a row lie together.
template <typename T>
struct Rows {
    T* data;
    int64_t stride;
    T* operator[](int64_t row) const { return data + row * stride; }
    Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

// ------------------------------------------------------------------------------------------------------------- products
// A of M rows and `depth` packed numbers with any strides, B of `depth` rows of R registers. Of several parts, A begins at multiples
// of `a_part`, which are anywhere, and B continues: the sums of all parts stay in registers.
template <typename Packed>
struct Factors {
    const Packed* a;
    int64_t a_row, a_step;
    const Packed* b;
    int64_t b_row, depth;
    const int32_t* parts = nullptr;
    int64_t count = 1, a_part = 0;
};

enum class Put { SCALED, ADDED, RESCALED };      // C = factor A B,    C += A B,    C = C factor[column] + A B

template <Put put, int M, int R, typename Packed>
INLINE void multiply_of(const Factors<Packed>& x, float* c, int64_t c_row, const float* factor) {
    __m512 sums[M][R];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) {
            const float* at = c + i * c_row + j * WIDE;
            if (put == Put::SCALED) sums[i][j] = _mm512_setzero_ps();
            if (put == Put::ADDED) sums[i][j] = _mm512_loadu_ps(at);
            if (put == Put::RESCALED) sums[i][j] = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(factor + j * WIDE));
        }
    const Packed* b = x.b;
    for (int64_t part = 0; part < x.count; ++part) {
        const Packed* a = x.a + (x.parts ? x.parts[part] * x.a_part : 0);
        for (int64_t k = 0; k < x.depth; ++k, a += x.a_step, b += x.b_row) {
            decltype(register_of(b)) row[R];
#pragma GCC unroll 16
            for (int j = 0; j < R; ++j) row[j] = register_of(b + j * WIDE);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const auto one = broadcast(a[i * x.a_row]);
#pragma GCC unroll 16
                for (int j = 0; j < R; ++j) sums[i][j] = sum_of(sums[i][j], one, row[j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) {
            if (put == Put::SCALED) sums[i][j] = _mm512_mul_ps(sums[i][j], _mm512_set1_ps(*factor));
            _mm512_storeu_ps(c + i * c_row + j * WIDE, sums[i][j]);
        }
}

template <Put put, int M, int R, typename Packed>
INLINE void multiply_in_steps(Factors<Packed> x, int64_t rows, float* c, int64_t c_row, const float* factor) {
    for (int64_t i = 0; i < rows; i += M, x.a += M * x.a_row) multiply_of<put, M, R>(x, c + i * c_row, c_row, factor);
}

// C of `rows`, a multiple of WIDE, and 1 to 4 registers: as many sums at once as hide the time that one takes.
template <Put put, typename Packed>
INLINE void multiply(const Factors<Packed>& x, int64_t rows, int64_t registers, float* c, int64_t c_row,
                     const float* factor = nullptr) {
    switch (registers) {
        case 4: return multiply_in_steps<put, 4, 4>(x, rows, c, c_row, factor);
        case 3: return multiply_in_steps<put, 4, 3>(x, rows, c, c_row, factor);
        case 2: return multiply_in_steps<put, 8, 2>(x, rows, c, c_row, factor);
        default: return multiply_in_steps<put, 16, 1>(x, rows, c, c_row, factor);
    }
}

// -------------------------------------------------------------------------------------------------------------- packing
// `count` rows, at most ROWS → columns [d / PER, ROWS]; zeros after them.
template <typename N>
void take_columns(Rows<const typename N::Number> x, int64_t count, int64_t d, typename N::Packed* y) {
    for (int64_t row = 0; row < ROWS; row += WIDE)
        for (int64_t j = 0; j < d / N::PER; j += WIDE) {
            __m512i tile[WIDE];
            for (int64_t i = 0; i < WIDE; ++i)
                tile[i] = row + i < count ? load(x[row + i] + N::PER * j) : _mm512_setzero_si512();
            transpose(tile);
            for (int64_t i = 0; i < WIDE; ++i) store(y + (j + i) * ROWS + row, tile[i]);
        }
}

// `count` rows → [count, d / PER]; zeros after them, up to a multiple of WIDE rows.
template <typename N>
INLINE void take_rows(Rows<const typename N::Number> x, int64_t count, int64_t d, typename N::Packed* y) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < d / N::PER; j += WIDE) store(y + i * d / N::PER + j, load(x[i] + N::PER * j));
    std::memset(y + count * d / N::PER, 0, size_t(rounded_up(count, WIDE) - count) * size_t(d) * sizeof(typename N::Number));
}

// `count` rows → [count / PER, d], of bf16 pairs of rows; zeros as above.
INLINE void take_pairs(Rows<const float> x, int64_t count, int64_t d, float* y) { take_rows<Fp32>(x, count, d, y); }
INLINE void take_pairs(Rows<const uint16_t> x, int64_t count, int64_t d, uint32_t* y) {
    for (int64_t i = 0; i < rounded_up(count, WIDE); i += 2)
        for (int64_t j = 0; j < d; j += 2 * WIDE) {
            const __m512i first = i < count ? load(x[i] + j) : _mm512_setzero_si512();
            const __m512i second = i + 1 < count ? load(x[i + 1] + j) : _mm512_setzero_si512();
            store(y + i / 2 * d + j, lower_pairs(first, second));
            store(y + i / 2 * d + j + WIDE, upper_pairs(first, second));
        }
}

// Rows of a head are far from each other, so the processor does not fetch them ahead by itself.
template <typename Number>
INLINE void fetch(Rows<const Number> x, int64_t first, int64_t end, int64_t d) {
    constexpr int64_t LINE = 64 / sizeof(Number);
    for (int64_t i = first; i < end; ++i)
        for (int64_t j = 0; j < d; j += LINE) _mm_prefetch(reinterpret_cast<const char*>(x[i] + j), _MM_HINT_T1);
}

INLINE void put_row(float* y, __m512 x) { _mm512_storeu_ps(y, x); }
INLINE void put_row(uint16_t* y, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), (__m256i)_mm512_cvtneps_pbh(x)); }

// Probabilities of two keys, of which the first is even → [keys / PER, ROWS]: of bf16 pairs of keys.
INLINE void put_keys(float* y, __m512 first, __m512 second) {
    _mm512_storeu_ps(y, first);
    _mm512_storeu_ps(y + ROWS, second);
}
INLINE void put_keys(uint32_t* y, __m512 first, __m512 second) { store(y, paired_halves(narrow(first, second))); }

// [count, d] → rows.
template <typename Number>
void put_rows(const float* x, int64_t count, int64_t d, Rows<Number> y) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < d; j += WIDE) put_row(y[i] + j, _mm512_loadu_ps(x + i * d + j));
}

// [d, ROWS] times a factor of each column → `count` rows.
template <typename Number>
void put_columns(const float* x, const float* factor, int64_t count, int64_t d, Rows<Number> y) {
    for (int64_t row = 0; row < count; row += WIDE)
        for (int64_t j = 0; j < d; j += WIDE) {
            __m512i tile[WIDE];
            const __m512 factors = _mm512_loadu_ps(factor + row);
            for (int64_t i = 0; i < WIDE; ++i)
                tile[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + (j + i) * ROWS + row), factors));
            transpose(tile);
            for (int64_t i = 0; i < std::min(WIDE, count - row); ++i) put_row(y[row + i] + j, _mm512_castsi512_ps(tile[i]));
        }
}

}  // namespace

#pragma GCC pop_options
