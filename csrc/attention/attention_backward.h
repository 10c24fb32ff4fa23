// Gradients of the attention of one head, run by run of its keys and tile by tile of its queries; attention_kernel.h has the
// formulas.

// Memory of a thread: packed units of keys and their sums by slot, packed copies of a tile of queries, and its sums.
template <typename N>
struct BackwardWork {
    using Numbers = N;
    using Packed = typename N::Packed;
    Packed *keys, *values, *key_pairs;              // of a unit: [WIDE, d / PER] twice, [WIDE / PER, d] or for tiles a part of [d, pairs_row]
    float *dk, *dv;                                 // of a unit: [WIDE, d] twice
    int32_t *slot_of, *free;                        // of units; slots
    int64_t slots;
    Packed *query_columns, *dout_columns;           // [d / PER, ROWS]
    Packed *query_pairs, *dout_pairs;               // [ROWS / PER, d]
    Packed *p, *ds, *ds_pairs;                      // of a part: [keys, ROWS / PER] twice, [keys / PER, ROWS]
    float* dq;                                      // of each tile, or of one if there is one run: [ROWS, d], for tiles [d, ROWS]
    int64_t pairs_row;
};

template <typename N>
struct BackwardTensors {
    Rows<const typename N::Number> q, k, v, dout;
    const float *lse, *dots;      // of each row: the log-sum-exp, and D
    Gradient<typename N::Number> dq, dk, dv;
};

struct Wanted {
    bool dq, keys;      // gradients of queries; of keys and values
};

// Units [from, to) of keys, whose gradients are summed while tiles of queries follow each other.
struct Run {
    int64_t from, to;
    bool is_first, is_last;      // of those that the tiles see
    Wanted wanted;
    Slots slots;
    Fetches fetches;
    bool is_last_head;           // of those that share the keys
};

// Of the rows of a tile: the log-sum-exp to base 2, and scale D.
struct RowSums {
    float lse[ROWS], d[ROWS];
};

// D of a row.
template <typename Number>
INLINE float dot(const Number* dout, const Number* out, int64_t d) {
    Vector sum = zeros();
    for (int64_t j = 0; j < d; j += WIDE) sum = sum_of(sum, widened(dout + j), widened(out + j));
    return total(sum);
}

INLINE void take_sums(const float* lse, const float* dots, int64_t count, float scale, RowSums& sums) {
    for (int64_t i = 0; i < ROWS; ++i) {
        sums.lse[i] = i < count ? lse[i] * LOG2_E : EMPTY;
        sums.d[i] = i < count ? scale * dots[i] : 0;
    }
}

// dk and dv of a unit, from a slot → the tensors.
template <typename N>
void put_unit(const Call& call, const BackwardWork<N>& w, int64_t unit, int64_t slot, const BackwardTensors<N>& t) {
    const int64_t key = unit * WIDE, count = std::min(WIDE, call.keys - key), at = slot * WIDE * call.d;
    t.dk.from(key, [&](auto rows) { put_rows(w.dk + at, nullptr, count, call.d, rows); });
    t.dv.from(key, [&](auto rows) { put_rows(w.dv + at, nullptr, count, call.d, rows); });
}

// Packs a unit and clears its sums.
template <typename N>
void take_unit(const Call& call, const BackwardWork<N>& w, Run& run, int64_t unit, const BackwardTensors<N>& t) {
    run.slots.give(unit);
    const int64_t key = unit * WIDE, count = std::min(WIDE, call.keys - key), d = call.d, row = run.slots.of(unit) * WIDE;
    take_rows<N>(t.k.from(key), count, d, w.keys + row * d / N::PER);
    take_rows<N>(t.v.from(key), count, d, w.values + row * d / N::PER);
    if (run.wanted.keys)
        for (float* sums : {w.dk, w.dv}) std::fill_n(sums + row * d, WIDE * d, 0.0f);
    if (N::PER == 1 || !run.wanted.dq) return;
    if constexpr (N::HAS_TILES)
        turn_pairs([&](int64_t i) { return i < count ? t.k[key + i] : nullptr; }, WIDE, d, w.key_pairs + row / N::PER, w.pairs_row);
    else
        take_pairs(t.k.from(key), count, d, w.key_pairs + row * d / N::PER);
}

// After the last tile: dk and dv of the units that still have slots, and zeros for those that no tile has seen.
template <typename N>
void put_run(const Call& call, const BackwardWork<N>& w, const Run& run, const BackwardTensors<N>& t) {
    for (int64_t unit = run.from; unit < run.to; ++unit)
        if (run.slots.has(unit)) put_unit(call, w, unit, run.slots.of(unit), t);
    for (float* sums : {w.dk, w.dv}) std::fill_n(sums, WIDE * call.d, 0.0f);
    for (int64_t unit = run.from; unit < run.to; ++unit)
        if (run.slots.never_had(unit)) put_unit(call, w, unit, 0, t);
}

template <typename N>
void take_tile(const Call& call, const BackwardWork<N>& w, Run& run, int64_t query, int64_t count, const BackwardTensors<N>& t,
               RowSums& sums) {
    const auto q = t.q.from(query), dout = t.dout.from(query);
    take_columns<N>(q, count, call.d, w.query_columns);
    take_columns<N>(dout, count, call.d, w.dout_columns);
    if (run.wanted.keys) take_pairs(q, count, call.d, w.query_pairs);
    if (run.wanted.keys) take_pairs(dout, count, call.d, w.dout_pairs);
    take_sums(t.lse + query, t.dots + query, count, call.scale, sums);
    for (const auto& rows : {t.q, t.dout}) run.fetches.add(rows, query + ROWS, std::min(query + 2 * ROWS, call.queries), call.d);
}

// P and dS of a unit, which is number u of the part and has the slot.
template <typename N>
INLINE void differentiate_unit(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums,
                               const Part& part, int64_t u, int64_t slot, Fetches& fetches) {
    using Packed = typename N::Packed;
    const int64_t words = call.d / N::PER, wide = part.high - part.low, left = part.low * WIDE, unit = part.units[u];
    const Vector to_base_2 = broadcast(call.scale * LOG2_E), scale = broadcast(call.scale);
    const auto product = [&](const Packed* keys, const Packed* columns, float* c) {
        const Factors<N> factors{keys + slot * WIDE * words, words, 1, columns + left, ROWS, words, fetches};
        multiply<Put::SET>(factors, WIDE, wide, c, ROWS);
    };
    alignas(64) float scores[WIDE * ROWS], dp[WIDE * ROWS];
    product(w.keys, w.query_columns, scores);
    product(w.values, w.dout_columns, dp);
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
            const int64_t key = u * WIDE + i, row = key * ROWS + column;
            put_row(reinterpret_cast<typename N::Number*>(w.p) + row, p);
            put_row(reinterpret_cast<typename N::Number*>(w.ds) + row, ds);
            if (N::PER == 2 && i % 2 == 1) put_keys(w.ds_pairs + key / N::PER * ROWS + column, last_ds, ds);
            last_ds = ds;
        }
    }
}

// What the queries of a tile and some units contribute to the gradients.
template <typename N>
void differentiate_part(const Call& call, const BackwardWork<N>& w, const Sight& sight, const RowSums& sums, Run& run,
                        const Part& part, const BackwardTensors<N>& t, float* dq) {
    const int64_t d = call.d, left = part.low * WIDE / N::PER, pairs = (part.high - part.low) * WIDE / N::PER;
    int32_t slots[UNITS];
    for (int64_t u = 0; u < part.count; ++u) {
        if (!run.slots.has(part.units[u])) take_unit(call, w, run, part.units[u], t);
        slots[u] = run.slots.of(part.units[u]);
        differentiate_unit<N>(call, w, sight, sums, part, u, slots[u], run.fetches);
        const int64_t row = u * WIDE * ROWS / N::PER + left, first = slots[u] * WIDE * d;
        for (int64_t c = 0; c < d && run.wanted.keys; c += ROWS) {
            const auto add = [&](const typename N::Packed* x, const typename N::Packed* rows, float* sums) {
                const Factors<N> factors{x + row, ROWS / N::PER, 1, rows + left * d + c, d, pairs, run.fetches};
                multiply<Put::ADDED>(factors, WIDE, std::min(REGISTERS, (d - c) / WIDE), sums + first + c, d);
            };
            add(w.p, w.dout_pairs, w.dv);
            add(w.ds, w.query_pairs, w.dk);
        }
    }
    if (!run.wanted.dq) return;
    const auto *ds = N::PER == 2 ? w.ds_pairs : w.ds, *keys = N::PER == 2 ? w.key_pairs : w.keys;
    add_to_queries<Put::ADDED, N>(part, slots, ds, keys, w.pairs_row, d, dq, nullptr, run.fetches);
}

// What tiles [from, to) of a query head contribute to their dq, and to dk and dv of a run of keys, in the workspace. dq begins with
// the first run and is written out after the last.
template <typename N>
void differentiate(const Call& call, const BackwardWork<N>& w, const Plan& plan, const BackwardTensors<N>& t, Run& run, int64_t from,
                   int64_t to) {
    const auto ahead = [&](int64_t unit) {
        if (!run.slots.is_first_request(unit)) return;
        const int64_t key = unit * WIDE, end = std::min(key + WIDE, call.keys);
        run.fetches.add(t.k, key, end, call.d);
        run.fetches.add(t.v, key, end, call.d);
    };
    for (int64_t tile = from; tile < to; ++tile) {
        const int64_t query = tile * ROWS, count = std::min(ROWS, call.queries - query), d = call.d;
        const bool is_written = run.wanted.dq && run.is_last;
        float* dq = w.dq + (run.is_first && run.is_last ? 0 : tile * d * ROWS);
        if (run.wanted.dq && run.is_first) std::memset(dq, 0, sizeof(float) * size_t(d * ROWS));
        if (is_written) t.dq.from(query, [&](auto rows) { run.fetches.add(rows, 0, count, d); });
        const Sight sight{call, plan, tile};
        RowSums sums;
        bool is_taken = false;
        for_each_part<UNITS>(sight, run.from, run.to, ahead, [&](const Part& part) {
            if (!is_taken) take_tile(call, w, run, query, count, t, sums);
            is_taken = true;
            differentiate_part(call, w, sight, sums, run, part, t, dq);
        });
        if (run.is_last_head)
            take_back_slots(sight, run.slots, [&](int64_t unit) {
                if (run.wanted.keys) put_unit(call, w, unit, run.slots.of(unit), t);
            });
        if (is_written) t.dq.from(query, [&](auto rows) { put_queries<N>(dq, nullptr, count, d, rows); });
    }
}
