// Gradients of the attention of one head, run by run of its keys and tile by tile of its queries; attention_kernel.h has the
// formulas.

// Memory of a thread: packed copies of a run of keys, of a tile of queries, and sums.
template <typename N>
struct BackwardWork {
    using Numbers = N;
    using Packed = typename N::Packed;
    Packed *keys, *values, *key_pairs;              // of a run: [keys, d / PER] twice, [keys / PER, d] or for tiles [d, pairs_row]
    Packed *query_columns, *dout_columns;           // [d / PER, ROWS]
    Packed *query_pairs, *dout_pairs;               // [ROWS / PER, d]
    Packed *p, *ds, *ds_pairs;                      // of a part: [keys, ROWS / PER] twice, [keys / PER, ROWS]
    float *dq, *dk, *dv;                            // [d, ROWS] of one tile or each, [keys, d] of a run twice
    int64_t pairs_row;
    int64_t next_dq;                                // from one tile's dq to the next one's; 0: there is one
};

template <typename N>
struct BackwardTensors {
    Rows<const typename N::Number> q, k, v, dout;
    const float *lse, *dots;      // of each row: the log-sum-exp, and D
    Gradient<typename N::Number> dq;
};

// Units of keys that are worked on at a time.
struct Run {
    int64_t from, to;
    bool is_first, is_last;      // of those that the tiles see
};

struct Wanted {
    bool dq, keys;      // gradients of queries; of keys and values
};

// Of the rows of a tile: the log-sum-exp to base 2, and scale D.
struct RowSums {
    float lse[ROWS], d[ROWS];
};

// D of rows [from, to) of a head.
template <typename Number>
void take_dots(Rows<const Number> dout, Rows<const Number> out, int64_t from, int64_t to, int64_t d, float* dots) {
    for (int64_t i = from; i < to; ++i) {
        Vector sum = zeros();
        for (int64_t j = 0; j < d; j += WIDE) sum = sum_of(sum, widened(dout[i] + j), widened(out[i] + j));
        dots[i] = total(sum);
    }
}

INLINE void take_sums(const float* lse, const float* dots, int64_t count, float scale, RowSums& sums) {
    for (int64_t i = 0; i < ROWS; ++i) {
        sums.lse[i] = i < count ? lse[i] * LOG2_E : EMPTY;
        sums.d[i] = i < count ? scale * dots[i] : 0;
    }
}

template <typename N>
void take_run(const Call& call, const BackwardWork<N>& w, const Run& run, const BackwardTensors<N>& t, Wanted wanted) {
    const int64_t key = run.from * WIDE, count = std::min(run.to * WIDE, call.keys) - key;
    take_rows<N>(t.k.from(key), count, call.d, w.keys);
    take_rows<N>(t.v.from(key), count, call.d, w.values);
    if (N::PER == 1 || !wanted.dq) return;
    if constexpr (N::HAS_TILES)
        turn_pairs([&](int64_t i) { return i < count ? t.k[key + i] : nullptr; }, count, call.d, w.key_pairs, w.pairs_row);
    else
        take_pairs(t.k.from(key), count, call.d, w.key_pairs);
}

template <typename N>
void take_tile(const Call& call, const BackwardWork<N>& w, int64_t query, int64_t count, const BackwardTensors<N>& t,
               Wanted wanted, RowSums& sums) {
    const auto q = t.q.from(query), dout = t.dout.from(query);
    take_columns<N>(q, count, call.d, w.query_columns);
    take_columns<N>(dout, count, call.d, w.dout_columns);
    if (wanted.keys) take_pairs(q, count, call.d, w.query_pairs);
    if (wanted.keys) take_pairs(dout, count, call.d, w.dout_pairs);
    take_sums(t.lse + query, t.dots + query, count, call.scale, sums);
    for (const auto& rows : {t.q, t.dout}) fetch(rows, query + ROWS, std::min(query + 2 * ROWS, call.queries), call.d);
}

// P and dS of a unit; `at`: its first key in the part, `in_run` in the run.
template <typename N>
INLINE void differentiate_unit(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums,
                               const Part& part, int64_t unit, int64_t at, int64_t in_run) {
    using Packed = typename N::Packed;
    const int64_t words = call.d / N::PER, wide = part.high - part.low, left = part.low * WIDE;
    const Vector to_base_2 = broadcast(call.scale * LOG2_E), scale = broadcast(call.scale);
    alignas(64) float scores[WIDE * ROWS], dp[WIDE * ROWS];
    multiply<Put::SET>(Factors<N>{w.keys + in_run * words, words, 1, w.query_columns + left, ROWS, words}, WIDE, wide, scores, ROWS);
    multiply<Put::SET>(Factors<N>{w.values + in_run * words, words, 1, w.dout_columns + left, ROWS, words}, WIDE, wide, dp, ROWS);
    const bool is_whole = sight.sees_all(unit, part.low, part.high), has_slope = sight.plan.slope != 0;
    for (int64_t j = 0; j < wide; ++j) {
        const int64_t column = left + j * WIDE;
        const Vector lse = register_of(sums.lse + column), of_row = register_of(sums.d + column);
        Vector last_ds = zeros();
        for (int64_t i = 0; i < WIDE; ++i) {
            const Mask seen = is_whole ? all_lanes(true) : sight.lanes(unit, i, part.low + j);
            const int64_t there = i * ROWS + j * WIDE;
            const Vector less = has_slope ? lse + sight.penalty(unit, i, part.low + j) : lse;
            const Vector p = kept(seen, power_of_two(difference_of(register_of(scores + there), to_base_2, less)));
            const Vector ds = product_kept(seen, p, difference_of(register_of(dp + there), scale, of_row));
            const int64_t row = (at + i) * ROWS + column;
            put_row(reinterpret_cast<typename N::Number*>(w.p) + row, p);
            put_row(reinterpret_cast<typename N::Number*>(w.ds) + row, ds);
            if (N::PER == 2 && i % 2 == 1) put_keys(w.ds_pairs + (at + i) / N::PER * ROWS + column, last_ds, ds);
            last_ds = ds;
        }
    }
}

// What the queries of a tile and some units contribute to the gradients.
template <typename N>
void differentiate_part(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums, const Run& run,
                        const Part& part, Wanted wanted, float* dq) {
    using Packed = typename N::Packed;
    const int64_t d = call.d, left = part.low * WIDE, wide = part.high - part.low;
    const int64_t pairs = wide * WIDE / N::PER, skipped = left / N::PER;
    for (int64_t u = 0; u < part.count; ++u) {
        const int64_t unit = part.units[u], at = u * WIDE, in_run = (unit - run.from) * WIDE;
        differentiate_unit<N>(call, w, sight, sums, part, unit, at, in_run);
        const int64_t row = at * ROWS / N::PER + skipped;
        for (int64_t c = 0; c < d && wanted.keys; c += ROWS) {
            const int64_t registers = std::min(REGISTERS, (d - c) / WIDE);
            multiply<Put::ADDED>(Factors<N>{w.p + row, ROWS / N::PER, 1, w.dout_pairs + skipped * d + c, d, pairs}, WIDE,
                                 registers, w.dv + in_run * d + c, d);
            multiply<Put::ADDED>(Factors<N>{w.ds + row, ROWS / N::PER, 1, w.query_pairs + skipped * d + c, d, pairs}, WIDE,
                                 registers, w.dk + in_run * d + c, d);
        }
    }
    if (!wanted.dq) return;
    const Packed *ds = N::PER == 2 ? w.ds_pairs : w.ds, *keys = N::PER == 2 ? w.key_pairs : w.keys;
    const int64_t depth = WIDE / N::PER;      // of a unit
    const int64_t a_row = N::HAS_TILES ? w.pairs_row : 1, a_step = N::HAS_TILES ? 1 : d, size = depth * a_step;
    multiply<Put::ADDED>(Factors<N>{keys - run.from * size, a_row, a_step, ds + left, ROWS, depth, part.units, part.count, size}, d,
                         wide, dq + left, ROWS);
}

// What tiles [from, to) of a query head contribute to their dq, and to dk and dv of a run of keys, in the workspace. dq begins with
// the first run and is written out after the last.
template <typename N>
void differentiate(const Call& call, const BackwardWork<N>& w, const Plan& plan, const BackwardTensors<N>& t, const Run& run,
                   Wanted wanted, int64_t from, int64_t to) {
    for (int64_t tile = from; tile < to; ++tile) {
        const int64_t query = tile * ROWS, count = std::min(ROWS, call.queries - query), d = call.d;
        float* dq = w.dq + tile * w.next_dq;
        if (wanted.dq && run.is_first) std::memset(dq, 0, sizeof(float) * size_t(d * ROWS));
        if (wanted.dq && run.is_last) t.dq.from(query, [&](auto rows) { fetch_to_write(rows, 0, count, d); });
        const Sight sight{call, plan, tile};
        RowSums sums;
        bool is_taken = false;
        for_each_part<UNITS>(sight, run.from, run.to, [](int64_t) {}, [&](const Part& part) {
            if (!is_taken) take_tile(call, w, query, count, t, wanted, sums);
            is_taken = true;
            differentiate_part(call, w, sight, sums, run, part, wanted, dq);
        });
        if (!wanted.dq || !run.is_last) continue;
        float factor[ROWS];
        std::fill_n(factor, ROWS, 1.0f);
        t.dq.from(query, [&](auto rows) { put_columns(dq, factor, count, d, rows); });
    }
}
