// Gradients of the attention of one head, block by block of its keys; attention_kernel.h has the formulas.

#pragma once

#include "attention_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

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
        const Rows<uint16_t> dq_rows{wanted.dq_rows[query], wanted.dq_rows.stride};
        if (wanted.dq && seen == all_seen) rows_of_columns(dq_block, factor, rows, s.d, dq_rows);
    }
}

}  // namespace

#pragma GCC pop_options
