// Attention of queries of one head, block by block of its keys; attention_kernel.h has the formulas.

#pragma once

#include "attention_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

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

}  // namespace

#pragma GCC pop_options
