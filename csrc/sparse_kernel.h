// Attention of one head to some blocks of keys, in fp32 or in bf16: forward, and the gradients from the kept output and
// log-sum-exp. The mathematics and the layout of scores, [keys, queries], are those of attention_kernel.h.
//
// Work: a tile of ROWS queries is four registers, each of which is a *unit* of WIDE queries; keys are units of WIDE, too. A span is
// a list of units of keys that neighbouring registers of the tile see, and no other register: so a score that the layout hides is
// not computed, whatever the size of its blocks. Only the unit on the diagonal of a causal layout has a mask.
//
// Products: numbers are packed for products as they are in fp32, and as pairs of neighbours in the summed dimension in bf16.
// `Packed` is the type of such a number, PER the numbers in it. Units of keys are gathered into a piece of memory that stays in the
// cache, since the rows of a head are far from each other.
//
// Sizes: d is a multiple of 32, positions one of WIDE.

#pragma once

#include "attention_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {
namespace sparse {

constexpr int64_t REGISTERS = ROWS / WIDE;      // of a tile
constexpr int64_t UNITS = 4;                    // of keys worked on at once, in forward PER times as many
constexpr float EMPTY = std::numeric_limits<float>::infinity();      // log-sum-exp of a row that sees nothing

struct Fp32 {
    using Number = float;
    using Packed = float;
    static constexpr int64_t PER = 1;
};

struct Bf16 {
    using Number = uint16_t;
    using Packed = uint32_t;
    static constexpr int64_t PER = 2;
};

// What all heads of a call share. offset: units from the first query to the first key, which are those of two runs of positions.
struct Call {
    int64_t queries, keys, d, offset;
    bool is_causal;
    float scale;
};

// Units [from, to) of the list that registers [low, high) of a tile see.
struct Span {
    int32_t from, to, low, high;
};

// Of a head: its spans by tile, and the ids of its sample, or null: a query sees keys of its own id.
struct Plan {
    const int32_t* first;      // span of each tile, and of the end
    const Span* spans;
    const int32_t *units, *end;      // of all spans, in the order of the tiles
    const int32_t *query_ids, *key_ids;
};

// ------------------------------------------------------------------------------------------------------------- products
INLINE __m512 register_of(const float* x) { return _mm512_loadu_ps(x); }
INLINE __m512i register_of(const uint32_t* x) { return load(x); }
INLINE __m512 broadcast(float x) { return _mm512_set1_ps(x); }
INLINE __m512i broadcast(uint32_t x) { return _mm512_set1_epi32(int(x)); }
INLINE __m512 sum_of(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE __m512 sum_of(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// A of M rows and `depth` packed numbers with any strides, B of `depth` rows of R registers.
template <typename Packed>
struct Factors {
    const Packed* a;
    int64_t a_row, a_step;
    const Packed* b;
    int64_t b_row, depth;
};

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
    const Packed *a = x.a, *b = x.b;
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

// `count` rows → [count, d / PER].
template <typename N>
INLINE void take_rows(Rows<const typename N::Number> x, int64_t count, int64_t d, typename N::Packed* y) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < d / N::PER; j += WIDE) store(y + i * d / N::PER + j, load(x[i] + N::PER * j));
}

// `count` rows, an even number → [count / PER, d], of bf16 pairs of rows.
INLINE void take_pairs(Rows<const float> x, int64_t count, int64_t d, float* y) { take_rows<Fp32>(x, count, d, y); }
INLINE void take_pairs(Rows<const uint16_t> x, int64_t count, int64_t d, uint32_t* y) {
    for (int64_t i = 0; i < count; i += 2)
        for (int64_t j = 0; j < d; j += 2 * WIDE) {
            const __m512i first = load(x[i] + j), second = load(x[i + 1] + j);
            store(y + i / 2 * d + j, lower_pairs(first, second));
            store(y + i / 2 * d + j + WIDE, upper_pairs(first, second));
        }
}

// Rows of a head are far from each other, so the processor does not fetch them ahead by itself.
template <typename Number>
INLINE void fetch(Rows<const Number> x, int64_t first, int64_t count, int64_t d) {
    constexpr int64_t LINE = 64 / sizeof(Number);
    for (int64_t i = first; i < first + count; ++i)
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
            for (int64_t i = 0; i < WIDE; ++i) put_row(y[row + i] + j, _mm512_castsi512_ps(tile[i]));
        }
}

// ---------------------------------------------------------------------------------------------------------------- masks
// Whether queries of a tile see all of a unit of keys, or which do.
struct Sight {
    const Call& call;
    const Plan& plan;
    int64_t tile;

    bool is_whole(int64_t unit, int64_t low, int64_t high) const {
        const int64_t diagonal = unit + call.offset - tile * REGISTERS;
        return plan.key_ids == nullptr && !(call.is_causal && diagonal >= low && diagonal < high);
    }
    // Lanes of a register that see a key of the unit.
    INLINE_MEMBER __mmask16 lanes(int64_t unit, int64_t key, int64_t column) const {
        const int64_t query_unit = tile * REGISTERS + column;
        const __mmask16 seen = call.is_causal && unit + call.offset == query_unit ? __mmask16(0xffff << key) : __mmask16(0xffff);
        if (plan.key_ids == nullptr) return seen;
        return _mm512_mask_cmpeq_epi32_mask(seen, load(plan.query_ids + query_unit * WIDE),
                                            _mm512_set1_epi32(plan.key_ids[unit * WIDE + key]));
    }
};

// Fetches keys and values of the unit that follows some units later.
template <typename Number>
INLINE void fetch_keys(const Plan& plan, int64_t at, int64_t d, Rows<const Number> k, Rows<const Number> v) {
    const int32_t* later = plan.units + at + UNITS;
    if (later >= plan.end) return;
    fetch(k, *later * WIDE, WIDE, d);
    fetch(v, *later * WIDE, WIDE, d);
}

// -------------------------------------------------------------------------------------------------------------- forward
template <typename N>
struct ForwardWork {
    typename N::Packed *keys, *values, *queries, *p;      // [keys, d / PER], [keys / PER, d], [d / PER, ROWS], [keys / PER, ROWS]
    float *scores, *out;                                  // [keys, ROWS], [d, ROWS]
};

// Scores of some units become probabilities times the sum so far.
template <typename N>
INLINE void exponentials(const float* scores, typename N::Packed* p, int64_t keys, int64_t low, int64_t high, Softmax& rows) {
    for (int64_t j = low * WIDE; j < high * WIDE; j += WIDE) {
        const __m512 before = _mm512_loadu_ps(rows.most + j);
        __m512 most = before, also = before;
        for (int64_t k = 0; k < keys; k += 2) {      // NaN is not the maximum, and reaches the sum
            most = _mm512_max_ps(_mm512_loadu_ps(scores + k * ROWS + j), most);
            also = _mm512_max_ps(_mm512_loadu_ps(scores + (k + 1) * ROWS + j), also);
        }
        most = _mm512_max_ps(also, most);
        // 0 for rows that have seen nothing yet
        const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(most, _mm512_set1_ps(HIDDEN), _CMP_NEQ_UQ), most);
        const __m512 factor = power_of_two(_mm512_sub_ps(before, base));
        __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(rows.sum + j), factor), other = _mm512_setzero_ps();
        for (int64_t k = 0; k < keys; k += 2) {
            const float* at = scores + k * ROWS + j;
            const __m512 first = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at), base));
            const __m512 second = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at + ROWS), base));
            sum = _mm512_add_ps(sum, first);
            other = _mm512_add_ps(other, second);
            put_keys(p + k / N::PER * ROWS + j, first, second);
        }
        _mm512_storeu_ps(rows.most + j, most);
        _mm512_storeu_ps(rows.factor + j, factor);
        _mm512_storeu_ps(rows.sum + j, _mm512_add_ps(sum, other));
    }
}

// Queries of a tile and units [from, to) of a span.
template <typename N>
void attend_units(const Call& call, const ForwardWork<N>& w, const Sight& sight, const Span& span,
                  Rows<const typename N::Number> k, Rows<const typename N::Number> v, Softmax& rows) {
    const int64_t d = call.d, words = d / N::PER, wide = span.high - span.low, count = span.to - span.from, left = span.low * WIDE;
    const float factor = call.scale * LOG2_E;
    for (int64_t u = 0; u < count; ++u) {
        const int64_t unit = sight.plan.units[span.from + u], key = unit * WIDE, at = u * WIDE;
        fetch_keys(sight.plan, span.from + u, d, k, v);
        take_rows<N>({k[key], k.stride}, WIDE, d, w.keys + at * words);
        take_pairs({v[key], v.stride}, WIDE, d, w.values + at / N::PER * d);
        float* scores = w.scores + at * ROWS + left;
        multiply<Put::SCALED>(Factors<typename N::Packed>{w.keys + at * words, words, 1, w.queries + left, ROWS, words}, WIDE, wide,
                              scores, ROWS, &factor);
        if (sight.is_whole(unit, span.low, span.high)) continue;
        for (int64_t i = 0; i < WIDE; ++i)
            for (int64_t j = 0; j < wide; ++j) {
                float* score = scores + i * ROWS + j * WIDE;
                _mm512_storeu_ps(score, _mm512_mask_loadu_ps(_mm512_set1_ps(HIDDEN), sight.lanes(unit, i, span.low + j), score));
            }
    }
    exponentials<N>(w.scores, w.p, count * WIDE, span.low, span.high, rows);
    multiply<Put::RESCALED>(Factors<typename N::Packed>{w.values, 1, d, w.p + left, ROWS, count * WIDE / N::PER}, d, wide,
                            w.out + left, ROWS, rows.factor + left);
}

// Calls part(span of at most `Most` units) for all of a tile.
template <int64_t Most, typename Part>
INLINE void for_each_part(const Plan& plan, int64_t tile, const Part& part) {
    for (int32_t i = plan.first[tile]; i < plan.first[tile + 1]; ++i) {
        const Span& span = plan.spans[i];
        for (int32_t from = span.from; from < span.to; from += int32_t(Most))
            part(Span{from, std::min(from + int32_t(Most), span.to), span.low, span.high});
    }
}

// Tiles [from, to) of a head. sink: of the head, or null.
template <typename N>
void attend(const Call& call, const ForwardWork<N>& w, const Plan& plan, const float* sink, Rows<const typename N::Number> q,
            Rows<const typename N::Number> k, Rows<const typename N::Number> v, Rows<typename N::Number> out, float* lse,
            int64_t from, int64_t to) {
    for (int64_t tile = from; tile < to; ++tile) {
        const int64_t query = tile * ROWS, count = std::min(ROWS, call.queries - query);
        fetch(q, query + ROWS, std::min(ROWS, call.queries - query - ROWS), call.d);
        take_columns<N>({q[query], q.stride}, count, call.d, w.queries);
        std::memset(w.out, 0, sizeof(float) * size_t(call.d * ROWS));
        Softmax rows;
        std::fill_n(rows.most, ROWS, sink == nullptr ? HIDDEN : *sink * LOG2_E);
        std::fill_n(rows.sum, ROWS, sink == nullptr ? 0.0f : 1.0f);
        const Sight sight{call, plan, tile};
        for_each_part<UNITS * N::PER>(plan, tile, [&](const Span& part) { attend_units<N>(call, w, sight, part, k, v, rows); });
        for (int64_t i = 0; i < count; ++i) {
            rows.factor[i] = rows.sum[i] == 0 ? 0 : 1 / rows.sum[i];
            lse[query + i] = rows.sum[i] == 0 ? EMPTY : rows.most[i] * LN_2 + std::log(rows.sum[i]);
        }
        put_columns<typename N::Number>(w.out, rows.factor, count, call.d, {out[query], out.stride});
    }
}

// ------------------------------------------------------------------------------------------------------------- backward
template <typename N>
struct BackwardWork {
    using Packed = typename N::Packed;
    Packed *keys, *values, *key_pairs;              // [keys, d / PER] twice, [keys / PER, d]
    Packed *query_columns, *dout_columns;           // [d / PER, ROWS]
    Packed *query_pairs, *dout_pairs;               // [ROWS / PER, d]
    Packed *p, *ds, *ds_pairs;                      // [keys, ROWS / PER] twice, [keys / PER, ROWS]
    float *dq, *dk, *dv;                            // [d, ROWS], [keys, d] of the call twice
};

INLINE __m512 widened(const float* x) { return _mm512_loadu_ps(x); }
INLINE __m512 widened(const uint16_t* x) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

// lse to base 2 and scale D, D = rowsum(dO O), of the rows of a tile.
template <typename Number>
void take_sums(Rows<const Number> dout, Rows<const Number> out, const float* lse, int64_t count, const Call& call,
               RowSums& sums) {
    for (int64_t i = 0; i < ROWS; ++i) {
        sums.lse[i] = i < count ? lse[i] * LOG2_E : EMPTY;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < call.d && i < count; j += WIDE)
            sum = _mm512_fmadd_ps(widened(dout[i] + j), widened(out[i] + j), sum);
        sums.d[i] = call.scale * _mm512_reduce_add_ps(sum);
    }
}

// P and scale dS of a unit; `at`: its first key in the workspace.
template <typename N>
INLINE void differentiate_unit(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums,
                               const Span& span, int64_t unit, int64_t at) {
    using Packed = typename N::Packed;
    const int64_t words = call.d / N::PER, wide = span.high - span.low, left = span.low * WIDE;
    const float factor = call.scale * LOG2_E;
    alignas(64) float scores[WIDE * ROWS], dp[WIDE * ROWS];
    multiply<Put::SCALED>(Factors<Packed>{w.keys + at * words, words, 1, w.query_columns + left, ROWS, words}, WIDE, wide, scores,
                          ROWS, &factor);
    multiply<Put::SCALED>(Factors<Packed>{w.values + at * words, words, 1, w.dout_columns + left, ROWS, words}, WIDE, wide, dp,
                          ROWS, &call.scale);
    const bool is_whole = sight.is_whole(unit, span.low, span.high);
    for (int64_t j = 0; j < wide; ++j) {
        const int64_t column = left + j * WIDE;
        const __m512 lse = _mm512_loadu_ps(sums.lse + column), of_row = _mm512_loadu_ps(sums.d + column);
        __m512 last_ds = _mm512_setzero_ps();
        for (int64_t i = 0; i < WIDE; ++i) {
            const __mmask16 seen = is_whole ? __mmask16(0xffff) : sight.lanes(unit, i, span.low + j);
            const int64_t there = i * ROWS + j * WIDE;
            const __m512 p = _mm512_maskz_mov_ps(seen, power_of_two(_mm512_sub_ps(_mm512_loadu_ps(scores + there), lse)));
            const __m512 ds = _mm512_maskz_mul_ps(seen, p, _mm512_sub_ps(_mm512_loadu_ps(dp + there), of_row));
            const int64_t row = (at + i) * ROWS + column;
            put_row(reinterpret_cast<typename N::Number*>(w.p) + row, p);
            put_row(reinterpret_cast<typename N::Number*>(w.ds) + row, ds);
            if (N::PER == 2 && i % 2 == 1) put_keys(w.ds_pairs + (at + i) / N::PER * ROWS + column, last_ds, ds);
            last_ds = ds;
        }
    }
}

// What the queries of a tile and units [from, to) of a span contribute to the gradients.
template <typename N>
void differentiate_units(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums, const Span& span,
                         Rows<const typename N::Number> k, Rows<const typename N::Number> v) {
    using Packed = typename N::Packed;
    const int64_t d = call.d, words = d / N::PER, count = span.to - span.from, left = span.low * WIDE;
    const int64_t wide = span.high - span.low, pairs = wide * WIDE / N::PER, skipped = left / N::PER;
    for (int64_t u = 0; u < count; ++u) {
        const int64_t unit = sight.plan.units[span.from + u], key = unit * WIDE, at = u * WIDE;
        fetch_keys(sight.plan, span.from + u, d, k, v);
        take_rows<N>({k[key], k.stride}, WIDE, d, w.keys + at * words);
        take_rows<N>({v[key], v.stride}, WIDE, d, w.values + at * words);
        if (N::PER == 2) take_pairs({k[key], k.stride}, WIDE, d, w.key_pairs + at / N::PER * d);
        differentiate_unit<N>(call, w, sight, sums, span, unit, at);
        const int64_t row = at * ROWS / N::PER + skipped;
        for (int64_t c = 0; c < d; c += ROWS) {
            const int64_t registers = std::min(REGISTERS, (d - c) / WIDE);
            multiply<Put::ADDED>(Factors<Packed>{w.p + row, ROWS / N::PER, 1, w.dout_pairs + skipped * d + c, d, pairs}, WIDE,
                                 registers, w.dv + key * d + c, d);
            multiply<Put::ADDED>(Factors<Packed>{w.ds + row, ROWS / N::PER, 1, w.query_pairs + skipped * d + c, d, pairs}, WIDE,
                                 registers, w.dk + key * d + c, d);
        }
    }
    const Packed *ds = N::PER == 2 ? w.ds_pairs : w.ds, *keys = N::PER == 2 ? w.key_pairs : w.keys;
    multiply<Put::ADDED>(Factors<Packed>{keys, 1, d, ds + left, ROWS, count * WIDE / N::PER}, d, wide, w.dq + left, ROWS);
}

// dq of a head, and its contributions to dk and dv of its keys, in the workspace.
template <typename N>
void differentiate(const Call& call, const BackwardWork<N>& w, const Plan& plan, Rows<const typename N::Number> q,
                   Rows<const typename N::Number> k, Rows<const typename N::Number> v, Rows<const typename N::Number> out,
                   Rows<const typename N::Number> dout, const float* lse, Rows<typename N::Number> dq) {
    for (int64_t query = 0; query < call.queries; query += ROWS) {
        const int64_t count = std::min(ROWS, call.queries - query), tile = query / ROWS, d = call.d;
        const Rows<const typename N::Number> q_tile{q[query], q.stride}, dout_tile{dout[query], dout.stride};
        for (const auto& rows : {q, dout, out}) fetch(rows, query + ROWS, std::min(ROWS, call.queries - query - ROWS), d);
        take_columns<N>(q_tile, count, d, w.query_columns);
        take_columns<N>(dout_tile, count, d, w.dout_columns);
        take_pairs(q_tile, count, d, w.query_pairs);
        take_pairs(dout_tile, count, d, w.dout_pairs);
        RowSums sums;
        take_sums<typename N::Number>(dout_tile, {out[query], out.stride}, lse + query, count, call, sums);
        std::memset(w.dq, 0, sizeof(float) * size_t(d * ROWS));
        const Sight sight{call, plan, tile};
        for_each_part<UNITS>(plan, tile, [&](const Span& part) { differentiate_units<N>(call, w, sight, sums, part, k, v); });
        float factor[ROWS];
        std::fill_n(factor, ROWS, 1.0f);
        put_columns<typename N::Number>(w.dq, factor, count, d, {dq[query], dq.stride});
    }
}

}  // namespace sparse
}  // namespace

#pragma GCC pop_options
