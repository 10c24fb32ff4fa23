// Copies of the factors of a product in the order in which product_kernel.h reads them.
//
// Numbers are packed for products as they are in fp32, and as pairs of neighbours in the summed dimension in bf16. `Packed` is the
// type of such a number, PER the numbers in it. B becomes panels [packed numbers of a sum, columns of PANEL], A becomes tiles
// [packed numbers of a sum, TALL]. Where numbers of a sum lie together, squares of sixteen packed numbers are transposed; where
// they lie apart, rows are copied or merged, SUM of them before the next columns: each row is on a page of its own, and few pages
// at a time are quickly found.
//
// Sizes are any: copies have zeros beyond the last row, column and number of an odd sum.
//
// Only for processors with AVX-512 F, BW, DQ, VL and, for bf16, BF16: product.cpp asks before it calls anything here.

#pragma once

#include "../common/bf16_vectors.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr int64_t TALL = 8, REGISTERS = 3, PANEL = REGISTERS * WIDE;      // rows of a tile; its columns
constexpr int64_t SUM = 2 * WIDE;

// Numbers of a sum in a chunk, so that a tile of A takes half of the fastest cache.
template <typename N>
constexpr int64_t LONGEST_SUM = 512 * N::PER;

// Element (i, j) is at data[i * row + j * column]; one of the two is 1.
template <typename Number>
struct Matrix {
    const Number* data;
    int64_t row, column;

    const Number* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
};

// [from, from + count) of rows, columns or numbers of a sum.
struct Range {
    int64_t from, count;
};

template <typename N>
constexpr int64_t packed(int64_t numbers) {
    return (numbers + N::PER - 1) / N::PER;
}

INLINE __mmask16 first_of_16(int64_t count) { return __mmask16(first_of_32(std::min<int64_t>(count, 16))); }
INLINE __m512i load_first(const uint16_t* x, int64_t count) { return _mm512_maskz_loadu_epi16(first_of_32(count), x); }
INLINE __m512i load_first(const float* x, int64_t count) { return _mm512_maskz_loadu_epi32(first_of_16(count), x); }

INLINE void fetch(const void* x) { __builtin_prefetch(x); }

// Sixteen rows of a register of numbers → the packed numbers of sixteen columns. Zeros beyond `rows` and `count`.
template <typename Number>
INLINE void load_columns(const Number* x, int64_t stride, int64_t rows, int64_t count, __m512i* columns) {
    for (int64_t i = 0; i < WIDE; ++i) {
        fetch(x + std::min(i, rows - 1) * stride + 64 / sizeof(Number));
        columns[i] = load_first(x + i * stride, i < rows ? count : 0);
    }
    transpose(columns);
}

// A row of 16 numbers, or two rows of 32 numbers → their packed numbers.
INLINE void load_rows(const float* x, int64_t, int64_t, int64_t count, __m512i* rows) {
    fetch(x + WIDE);
    rows[0] = load_first(x, count);
}
INLINE void load_rows(const uint16_t* x, int64_t stride, int64_t left, int64_t count, __m512i* rows) {
    const __m512i first = load_first(x, count), second = load_first(x + stride, left > 1 ? count : 0);
    fetch(x + 2 * WIDE);
    fetch(x + (left > 1 ? stride : 0) + 2 * WIDE);
    rows[0] = lower_pairs(first, second);
    rows[1] = upper_pairs(first, second);
}

// Columns [column, column + columns) of B, at most a panel, whose columns lie together.
template <typename N>
void pack_columns_of_b(const Matrix<typename N::Number>& b, int64_t column, int64_t columns, Range sum, typename N::Packed* panel) {
    const int64_t registers = (columns + WIDE - 1) / WIDE;
    for (int64_t j = 0; j < registers; ++j)
        for (int64_t k = 0; k < sum.count; k += N::PER * WIDE) {
            __m512i rows[WIDE];
            load_columns(b.at(sum.from + k, column + j * WIDE), b.column, columns - j * WIDE, sum.count - k, rows);
            for (int64_t i = 0; i < std::min(WIDE, packed<N>(sum.count - k)); ++i)
                store(panel + (k / N::PER + i) * registers * WIDE + j * WIDE, rows[i]);
        }
}

// Two tiles of A, whose rows lie together.
template <typename N>
void pack_rows_of_a(const Matrix<typename N::Number>& a, int64_t row, int64_t rows, Range sum, typename N::Packed* tiles) {
    const int64_t size = packed<N>(sum.count) * TALL;
    for (int64_t k = 0; k < sum.count; k += N::PER * WIDE) {
        __m512i columns[WIDE];
        load_columns(a.at(row, sum.from + k), a.row, rows, sum.count - k, columns);
        for (int64_t i = 0; i < std::min(WIDE, packed<N>(sum.count - k)); ++i) {
            typename N::Packed* at = tiles + (k / N::PER + i) * TALL;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(columns[i]));
            if (rows > TALL) _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + size), _mm512_extracti64x4_epi64(columns[i], 1));
        }
    }
}

// Numbers [k, k + SUM) of the sums, of all columns of the range; rows of B lie together.
template <typename N>
void pack_rows_of_b(const Matrix<typename N::Number>& b, Range columns, Range sum, int64_t k, typename N::Packed* panels) {
    for (int64_t first = 0; first < columns.count; first += PANEL) {
        const int64_t some = std::min(PANEL, columns.count - first), registers = (some + WIDE - 1) / WIDE;
        for (int64_t i = k; i < std::min(k + SUM, sum.count); i += N::PER) {
            typename N::Packed* at = panels + first * packed<N>(sum.count) + i / N::PER * registers * WIDE;
            for (int64_t j = 0; j < registers; j += N::PER) {
                __m512i rows[N::PER];
                load_rows(b.at(sum.from + i, columns.from + first + j * WIDE), b.row, sum.count - i, some - j * WIDE, rows);
                for (int64_t r = 0; r < std::min(N::PER, registers - j); ++r) store(at + (j + r) * WIDE, rows[r]);
            }
        }
    }
}

// The same of all rows of A of the range, whose columns lie together.
template <typename N>
void pack_columns_of_a(const Matrix<typename N::Number>& a, Range rows, Range sum, int64_t k, typename N::Packed* tiles) {
    constexpr int64_t AT_ONCE = N::PER * WIDE / TALL;      // tiles
    const int64_t size = packed<N>(sum.count) * TALL;
    for (int64_t first = 0; first < rows.count; first += AT_ONCE * TALL)
        for (int64_t i = k; i < std::min(k + SUM, sum.count); i += N::PER) {
            __m512i columns[N::PER];
            load_rows(a.at(rows.from + first, sum.from + i), a.column, sum.count - i, rows.count - first, columns);
            for (int64_t tile = 0; tile < AT_ONCE; ++tile) {
                if (first + tile * TALL >= rows.count) break;
                const __m512i of = columns[tile / 2];
                const __m256i half = tile % 2 ? _mm512_extracti64x4_epi64(of, 1) : _mm512_castsi512_si256(of);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(tiles + (first / TALL + tile) * size + i / N::PER * TALL), half);
            }
        }
}

}  // namespace

#pragma GCC pop_options
