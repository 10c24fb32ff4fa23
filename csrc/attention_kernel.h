// Attention of one head in bf16, by products of AVX-512 BF16: forward, and the gradients from the kept output and log-sum-exp.
//
//   forward     S = c K Qᵀ     m = max S     P = 2^(S - m)     l = Σ P     Oᵀ = Vᵀ P / l     lse = ln 2 (m + log2 l)
//   backward    P = 2^(S - lse / ln 2)       dP = V dOᵀ        dS = P (dP - D)             D = rowsum(dO O)
//               dV = P dO      dK = scale dS Q                 dQᵀ = scale Kᵀ dS           c = scale / ln 2
//
// Formulas: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; blocks of queries outside as in Dao 2023 (arXiv:2307.08691).
//
// Layout: scores are [keys, queries], so that a register holds one key's scores with sixteen queries. The maximum, the sum and
// what belongs to a row are then elementwise; P and dS are written in the order in which the next product reads them.
//
// A product C += A B multiplies pairs: 32 bits with two bf16 numbers that are neighbours in the summed dimension. Pairs of A are
// single numbers in memory, of any strides; those of B are rows of sixteen or more. One function serves all seven products.
//
// Sizes: d is a multiple of 32; rows beyond the last query or key are zero in packed copies, and their scores are hidden.
//
// Only for processors with AVX-512 F, BW, DQ, VL and BF16: attention.cpp asks before it calls anything here.

#pragma once

#include <cmath>
#include <limits>

#include "bf16_vectors.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr int64_t ROWS = 64;      // queries of a block, four registers; also the keys of a block in backward
constexpr int64_t KEYS = 128;     // of a block in forward
constexpr int64_t STEP = 4;       // rows of a product at once: 16 registers of sums
constexpr int64_t AHEAD = 16;     // rows that are fetched before they are copied
constexpr float LN_2 = 0.693147181f, HIDDEN = -std::numeric_limits<float>::infinity();

// Rows of one head: the numbers of a row lie together.
template <typename T>
struct Rows {
    T* data;
    int64_t stride;
    T* operator[](int64_t row) const { return data + row * stride; }
};

// What a call works on: sizes, a causal mask or none.
struct Shape {
    int64_t queries, keys, d;
    bool is_causal;
    float scale;

    int64_t seen(int64_t end) const { return is_causal ? std::min(end, keys) : keys; }      // by queries before `end`
};

// 2^t within 2e-7 for t <= 0; below -150 it is 0. NaN stays NaN: the maximum returns its second argument then.
INLINE __m512 power_of_two(__m512 t) {
    t = _mm512_max_ps(_mm512_set1_ps(-150), t);
    const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(t, whole);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, whole);
}

// ------------------------------------------------------------------------------------------------------------- products
enum class Put { SCALED, ADDED, RESCALED };      // C = factor A B,    C += A B,    C = C factor[column] + A B

template <Put put, int M, int N>
INLINE void product_of(const uint32_t* a, int64_t a_row, int64_t a_pair, const uint32_t* b, int64_t b_pair, int64_t pairs, float* c,
                       int64_t c_row, const float* factor) {
    __m512 sums[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
            float* at = c + i * c_row + j * WIDE;
            if (put == Put::SCALED) sums[i][j] = _mm512_setzero_ps();
            if (put == Put::ADDED) sums[i][j] = _mm512_loadu_ps(at);
            if (put == Put::RESCALED) sums[i][j] = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(factor + j * WIDE));
        }
    for (int64_t k = 0; k < pairs; ++k) {
        __m512i row[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) row[j] = load(b + k * b_pair + j * WIDE);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const __m512i one = _mm512_set1_epi32(int(a[i * a_row + k * a_pair]));
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)one, (__m512bh)row[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) {
            if (put == Put::SCALED) sums[i][j] = _mm512_mul_ps(sums[i][j], _mm512_set1_ps(*factor));
            _mm512_storeu_ps(c + i * c_row + j * WIDE, sums[i][j]);
        }
}

// C of STEP rows and 16 * `registers` columns, at most 64.
template <Put put>
INLINE void product(const uint32_t* a, int64_t a_row, int64_t a_pair, const uint32_t* b, int64_t b_pair, int64_t pairs, float* c,
                    int64_t c_row, int64_t registers, const float* factor = nullptr) {
    switch (registers) {
        case 4: return product_of<put, STEP, 4>(a, a_row, a_pair, b, b_pair, pairs, c, c_row, factor);
        case 3: return product_of<put, STEP, 3>(a, a_row, a_pair, b, b_pair, pairs, c, c_row, factor);
        case 2: return product_of<put, STEP, 2>(a, a_row, a_pair, b, b_pair, pairs, c, c_row, factor);
        default: return product_of<put, STEP, 1>(a, a_row, a_pair, b, b_pair, pairs, c, c_row, factor);
    }
}

// Cᵀ [d, ROWS] of all keys of a block: A are pairs of keys [pairs, d], B [pairs, ROWS]. With `diagonal` the first half of the
// columns, queries, sees the first 32 keys alone.
template <Put put>
void product_over_keys(const uint32_t* a, int64_t d, const uint32_t* b, int64_t pairs, int64_t pairs_of_first_half, float* c,
                       const float* factor = nullptr) {
    constexpr int64_t HALF = ROWS / 2;
    if (pairs_of_first_half == pairs) {
        for (int64_t i = 0; i < d; i += STEP)
            product_of<put, STEP, 4>(a + i, 1, d, b, ROWS, pairs, c + i * ROWS, ROWS, factor);
        return;
    }
    for (int64_t i = 0; i < d; i += 2 * STEP) {
        product_of<put, 2 * STEP, 2>(a + i, 1, d, b, ROWS, pairs_of_first_half, c + i * ROWS, ROWS, factor);
        product_of<put, 2 * STEP, 2>(a + i, 1, d, b + HALF, ROWS, pairs, c + i * ROWS + HALF, ROWS, factor + HALF);
    }
}

// C [STEP, d] += A B of STEP keys with a block of queries: A are pairs of queries [STEP, ROWS / 2], B [ROWS / 2, d].
INLINE void product_over_queries(const uint32_t* a, const uint32_t* b, int64_t d, int64_t first_pair, float* c) {
    for (int64_t column = 0; column < d; column += 4 * WIDE)
        product<Put::ADDED>(a + first_pair, ROWS / 2, 1, b + first_pair * d + column, d, ROWS / 2 - first_pair, c + column, d,
                            std::min<int64_t>(4, (d - column) / WIDE));
}

// -------------------------------------------------------------------------------------------------------------- packing
// Rows of a head are on different pages of memory, so the processor does not fetch them ahead by itself.
INLINE void fetch_row(const uint16_t* x, int64_t d) {
    for (int64_t j = 0; j < d; j += 2 * WIDE) _mm_prefetch(reinterpret_cast<const char*>(x + j), _MM_HINT_T1);
}

template <typename... Tensors>
void fetch_rows(int64_t from, int64_t end, int64_t d, const Tensors&... tensors) {
    for (int64_t i = from; i < std::min(from + ROWS, end); ++i) (fetch_row(tensors[i], d), ...);
}

// `count` rows → [`padded`, d], zeros after them.
void copy_rows(Rows<const uint16_t> x, int64_t count, int64_t padded, int64_t d, uint16_t* y) {
    for (int64_t i = 0; i < count; ++i) {
        if (i + AHEAD < count) fetch_row(x[i + AHEAD], d);
        for (int64_t j = 0; j < d; j += 2 * WIDE) store(y + i * d + j, load(x[i] + j));
    }
    std::memset(y + count * d, 0, size_t(2 * d * (padded - count)));
}

// `count` rows → pairs of rows [`padded` / 2, d].
void pair_rows(Rows<const uint16_t> x, int64_t count, int64_t padded, int64_t d, uint32_t* y) {
    for (int64_t i = 0; i < padded; i += 2) {
        for (int64_t k = i + AHEAD; k < std::min(i + AHEAD + 2, count); ++k) fetch_row(x[k], d);
        for (int64_t j = 0; j < d; j += 2 * WIDE) {
            const __m512i first = i < count ? load(x[i] + j) : _mm512_setzero_si512();
            const __m512i second = i + 1 < count ? load(x[i + 1] + j) : _mm512_setzero_si512();
            store(y + i / 2 * d + j, lower_pairs(first, second));
            store(y + i / 2 * d + j + WIDE, upper_pairs(first, second));
        }
    }
}

// `count` rows of at most ROWS → columns of pairs [d / 2, ROWS].
void columns_of_pairs(Rows<const uint16_t> x, int64_t count, int64_t d, uint32_t* y) {
    for (int64_t row = 0; row < ROWS; row += WIDE)
        for (int64_t j = 0; j < d / 2; j += WIDE) {
            __m512i tile[16];
            for (int i = 0; i < 16; ++i) tile[i] = row + i < count ? load(x[row + i] + 2 * j) : _mm512_setzero_si512();
            transpose(tile);
            for (int i = 0; i < 16; ++i) store(y + (j + i) * ROWS + row, tile[i]);
        }
}

// [d, ROWS] times a factor of each column → `count` rows in bf16.
void rows_of_columns(const float* x, const float* factor, int64_t count, int64_t d, Rows<uint16_t> y) {
    for (int64_t row = 0; row < count; row += WIDE)
        for (int64_t j = 0; j < d; j += WIDE) {
            __m512i tile[16];
            const __m512 factors = _mm512_loadu_ps(factor + row);
            for (int i = 0; i < 16; ++i)
                tile[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + (j + i) * ROWS + row), factors));
            transpose(tile);
            for (int64_t i = 0; i < std::min(WIDE, count - row); ++i)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(y[row + i] + j),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(tile[i])));
        }
}

// [.., d] times a factor → `count` rows in bf16.
void narrow_rows(const float* x, float factor, int64_t count, int64_t d, Rows<uint16_t> y) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < d; j += WIDE)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(y[i] + j),
                                (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(x + i * d + j), _mm512_set1_ps(factor))));
}

// Lanes of sixteen queries from `query` on that see the key.
INLINE __mmask16 sees(const Shape& s, int64_t query, int64_t key) {
    if (key >= s.keys) return 0;
    const int64_t before = s.is_causal ? key - query : 0;
    return before <= 0 ? __mmask16(0xffff) : before >= WIDE ? __mmask16(0) : __mmask16(0xffff << before);
}

// Registers of a block of queries that see nothing of the keys from `key` on.
INLINE int64_t registers_before(const Shape& s, int64_t query, int64_t key) {
    return s.is_causal && key > query ? (key - query) / WIDE : 0;
}

}  // namespace

#pragma GCC pop_options
