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

// -------------------------------------------------------------------------------------------------------------- forward
// Memory of a thread.
struct ForwardWork {
    uint16_t* keys;            // [keys, d]
    uint32_t* values;          // pairs of keys [keys / 2, d]
    uint32_t* queries;         // pairs of channels [d / 2, ROWS]
    uint32_t* p;               // pairs of keys [KEYS / 2, ROWS]
    float *scores, *out;       // [KEYS, ROWS], [d, ROWS]
};

// Rows of a block: their maxima, sums, and the factor of what was summed before.
struct Softmax {
    float most[ROWS], sum[ROWS], factor[ROWS];
};

// Scores of a block of keys, -inf where hidden.
void score(const Shape& s, const ForwardWork& w, int64_t query, int64_t key, int64_t count) {
    const float factor = s.scale * LOG2_E;
    for (int64_t k = key; k < key + count; k += STEP) {
        const int64_t skipped = registers_before(s, query, k);
        float* row = w.scores + (k - key) * ROWS;
        product<Put::SCALED>(reinterpret_cast<const uint32_t*>(w.keys) + k * s.d / 2, s.d / 2, 1, w.queries + skipped * WIDE, ROWS,
                             s.d / 2, row + skipped * WIDE, ROWS, ROWS / WIDE - skipped, &factor);
        if (k + STEP <= s.keys && (!s.is_causal || k + STEP - 1 <= query)) continue;
        for (int64_t i = 0; i < STEP; ++i)
            for (int64_t j = 0; j < ROWS; j += WIDE) {
                float* at = row + i * ROWS + j;
                _mm512_storeu_ps(at, _mm512_mask_loadu_ps(_mm512_set1_ps(HIDDEN), sees(s, query + j, k + i), at));
            }
    }
}

// Scores become probabilities times the sum so far.
void exponentials(const ForwardWork& w, int64_t count, Softmax& rows) {
    for (int64_t j = 0; j < ROWS; j += WIDE) {
        const __m512 before = _mm512_loadu_ps(rows.most + j);
        __m512 most = before, also = before;
        for (int64_t k = 0; k < count; k += 2) {      // NaN is not the maximum, and reaches the sum
            most = _mm512_max_ps(_mm512_loadu_ps(w.scores + k * ROWS + j), most);
            also = _mm512_max_ps(_mm512_loadu_ps(w.scores + (k + 1) * ROWS + j), also);
        }
        most = _mm512_max_ps(also, most);
        const __m512 factor = power_of_two(_mm512_sub_ps(before, most));
        __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(rows.sum + j), factor), other = _mm512_setzero_ps();
        for (int64_t k = 0; k < count; k += 2) {
            const float* at = w.scores + k * ROWS + j;
            const __m512 first = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at), most));
            const __m512 second = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at + ROWS), most));
            sum = _mm512_add_ps(sum, first);
            other = _mm512_add_ps(other, second);
            store(w.p + k / 2 * ROWS + j, paired_halves(narrow(first, second)));
        }
        _mm512_storeu_ps(rows.most + j, most);
        _mm512_storeu_ps(rows.factor + j, factor);
        _mm512_storeu_ps(rows.sum + j, _mm512_add_ps(sum, other));
    }
}

// Queries [from, to) of a head; `from` is a multiple of ROWS.
void attend(const Shape& s, const ForwardWork& w, Rows<const uint16_t> q, Rows<const uint16_t> k, Rows<const uint16_t> v,
            Rows<uint16_t> out, float* lse, int64_t from, int64_t to) {
    const int64_t all = s.seen(to), padded = rounded_up(all, ROWS);
    copy_rows(k, all, padded, s.d, w.keys);
    pair_rows(v, all, padded, s.d, w.values);
    for (int64_t query = from; query < to; query += ROWS) {
        const int64_t rows = std::min(ROWS, s.queries - query), seen = rounded_up(s.seen(query + rows), STEP);
        fetch_rows(query + ROWS, to, s.d, q);
        columns_of_pairs({q[query], q.stride}, rows, s.d, w.queries);
        std::memset(w.out, 0, sizeof(float) * size_t(s.d * ROWS));
        Softmax of_rows;
        std::fill_n(of_rows.most, ROWS, HIDDEN);
        std::fill_n(of_rows.sum, ROWS, 0.0f);
        for (int64_t key = 0; key < seen; key += KEYS) {
            const int64_t count = std::min(KEYS, seen - key), half = s.is_causal ? query + ROWS / 2 - key : count;
            score(s, w, query, key, count);
            exponentials(w, count, of_rows);
            product_over_keys<Put::RESCALED>(w.values + key / 2 * s.d, s.d, w.p, count / 2, std::min(half, count) / 2, w.out,
                                             of_rows.factor);
        }
        for (int64_t i = 0; i < ROWS; ++i) of_rows.factor[i] = 1 / of_rows.sum[i];
        rows_of_columns(w.out, of_rows.factor, rows, s.d, {out[query], out.stride});
        for (int64_t i = 0; i < rows; ++i) lse[query + i] = of_rows.most[i] * LN_2 + std::log(of_rows.sum[i]);
    }
}

// ------------------------------------------------------------------------------------------------------------- backward
struct BackwardWork {
    uint16_t *keys, *values;                                       // [keys, d]
    uint32_t* key_pairs;                                           // pairs of keys [keys / 2, d]
    uint32_t *query_columns, *dout_columns;                        // pairs of channels [d / 2, ROWS]
    uint32_t *query_pairs, *dout_pairs;                            // pairs of queries [ROWS / 2, d]
    uint16_t *p, *ds;                                              // [ROWS keys, ROWS queries]
    uint32_t* ds_pairs;                                            // pairs of keys [ROWS / 2, ROWS]
    float *dq, *dk, *dv;                                           // [d, ROWS], of one block or each, [keys, d], [keys, d]
    int64_t next_dq;                                               // 0 if there is one
};

// Which gradients are wanted: of queries, to be written here; of keys and values, summed in the workspace.
struct Wanted {
    Rows<uint16_t> dq_rows;
    bool dq, keys;
};

// Of the rows of a block: the log-sum-exp to base 2, and D.
struct RowSums {
    float lse[ROWS], d[ROWS];
};

void row_sums(const Shape& s, Rows<const uint16_t> dout, Rows<const uint16_t> out, const float* lse, int64_t rows, RowSums& sums) {
    for (int64_t i = 0; i < ROWS; ++i) {
        sums.lse[i] = i < rows ? lse[i] * LOG2_E : std::numeric_limits<float>::infinity();
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < s.d && i < rows; j += WIDE) {
            const auto wide = [&](const uint16_t* x) {
                const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
            };
            sum = _mm512_fmadd_ps(wide(dout[i] + j), wide(out[i] + j), sum);
        }
        sums.d[i] = _mm512_reduce_add_ps(sum);
    }
}

// P and dS of a block of keys, in the orders of the three products after it.
void differentiate(const Shape& s, const BackwardWork& w, const RowSums& sums, int64_t query, int64_t key, int64_t first_key,
                   int64_t count) {
    const float factor = s.scale * LOG2_E, one = 1;
    float scores[STEP * ROWS], dp[STEP * ROWS];
    for (int64_t k = 0; k < count; k += STEP) {
        const int64_t skipped = registers_before(s, query, key + k), at = (key - first_key + k) * s.d / 2;
        const auto of_step = [&](const uint16_t* a, const uint32_t* b, const float* by, float* c) {
            product<Put::SCALED>(reinterpret_cast<const uint32_t*>(a) + at, s.d / 2, 1, b + skipped * WIDE, ROWS, s.d / 2,
                                 c + skipped * WIDE, ROWS, ROWS / WIDE - skipped, by);
        };
        of_step(w.keys, w.query_columns, &factor, scores);
        of_step(w.values, w.dout_columns, &one, dp);
        for (int64_t j = 0; j < ROWS; j += 2 * WIDE) {
            __m512i last_ds = _mm512_setzero_si512();
            for (int64_t i = 0; i < STEP; ++i) {
                __m512 p[2], ds[2];
                for (int64_t half = 0; half < 2; ++half) {
                    const int64_t column = j + half * WIDE;
                    const float* score = scores + i * ROWS + column;
                    const __mmask16 seen = column < skipped * WIDE ? __mmask16(0) : sees(s, query + column, key + k + i);
                    const __m512 t = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen, score), _mm512_loadu_ps(sums.lse + column));
                    p[half] = _mm512_maskz_mov_ps(seen, power_of_two(t));
                    const __m512 less = _mm512_sub_ps(_mm512_maskz_loadu_ps(seen, dp + i * ROWS + column),
                                                      _mm512_loadu_ps(sums.d + column));
                    ds[half] = _mm512_maskz_mul_ps(seen, p[half], less);
                }
                const __m512i narrow_ds = narrow(ds[0], ds[1]);
                store(w.p + (k + i) * ROWS + j, narrow(p[0], p[1]));
                store(w.ds + (k + i) * ROWS + j, narrow_ds);
                if (i % 2 == 1) {
                    uint32_t* pairs = w.ds_pairs + (k + i) / 2 * ROWS + j;
                    store(pairs, lower_pairs(last_ds, narrow_ds));
                    store(pairs + WIDE, upper_pairs(last_ds, narrow_ds));
                }
                last_ds = narrow_ds;
            }
        }
    }
}

// What queries [from, to) of one query head contribute to dq, and to dk and dv of the keys [first_key, last_key), whose packed
// copies are in the workspace. All bounds but the ends are multiples of ROWS. Called for one run of keys after the other, if more
// than one: dq begins with the first and is written out after the last that a query sees.
void differentiate_head(const Shape& s, const BackwardWork& w, Rows<const uint16_t> q, Rows<const uint16_t> out,
                        Rows<const uint16_t> dout, const float* lse, int64_t from, int64_t to, int64_t first_key, int64_t last_key,
                        const Wanted& wanted) {
    for (int64_t query = s.is_causal ? std::max(from, first_key) : from; query < to; query += ROWS) {
        const int64_t rows = std::min(ROWS, s.queries - query);
        fetch_rows(query + ROWS, to, s.d, q, dout, out);
        const Rows<const uint16_t> q_block{q[query], q.stride}, dout_block{dout[query], dout.stride};
        columns_of_pairs(q_block, rows, s.d, w.query_columns);
        columns_of_pairs(dout_block, rows, s.d, w.dout_columns);
        if (wanted.keys) pair_rows(q_block, rows, ROWS, s.d, w.query_pairs);
        if (wanted.keys) pair_rows(dout_block, rows, ROWS, s.d, w.dout_pairs);
        RowSums sums;
        row_sums(s, dout_block, {out[query], out.stride}, lse + query, rows, sums);
        float* dq_block = w.dq + query / ROWS * w.next_dq;
        if (wanted.dq && first_key == 0) std::memset(dq_block, 0, sizeof(float) * size_t(s.d * ROWS));
        const int64_t all_seen = s.seen(query + rows), seen = std::min(all_seen, last_key);
        for (int64_t key = first_key; key < seen; key += ROWS) {
            const int64_t count = rounded_up(std::min(ROWS, seen - key), STEP), at = (key - first_key) * s.d;
            differentiate(s, w, sums, query, key, first_key, count);
            for (int64_t k = 0; k < count && wanted.keys; k += STEP) {
                const int64_t pair = registers_before(s, query, key + k) * WIDE / 2;
                const auto pairs_at = [&](const uint16_t* x) { return reinterpret_cast<const uint32_t*>(x + k * ROWS); };
                product_over_queries(pairs_at(w.p), w.dout_pairs, s.d, pair, w.dv + at + k * s.d);
                product_over_queries(pairs_at(w.ds), w.query_pairs, s.d, pair, w.dk + at + k * s.d);
            }
            const int64_t half = s.is_causal ? query + ROWS / 2 - key : count;
            if (wanted.dq)
                product_over_keys<Put::ADDED>(w.key_pairs + at / 2, s.d, w.ds_pairs, count / 2, std::min(half, count) / 2,
                                            dq_block);
        }
        float factor[ROWS];
        std::fill_n(factor, ROWS, s.scale);
        if (wanted.dq && seen == all_seen) rows_of_columns(dq_block, factor, rows, s.d, {wanted.dq_rows[query], wanted.dq_rows.stride});
    }
}

}  // namespace

#pragma GCC pop_options
