// Attention of queries of one head, tile by tile; attention_kernel.h has the formulas.

// Memory of a thread.
template <typename N>
struct ForwardWork {
    using Numbers = N;
    static constexpr int64_t MOST = UNITS * N::PER;      // units of a part

    typename N::Packed *keys, *values;         // by slot: [WIDE, d / PER], [WIDE / PER, d]; values for tiles: of a part [d, keys / PER]
    int32_t *slot_of, *free;                   // of units; slots
    int64_t slots;
    typename N::Packed *queries, *p;           // [d / PER, ROWS]; of a part [keys / PER, ROWS]
    float *scores, *out;                       // [keys, ROWS]; [ROWS, d], for tiles [d, ROWS]
};

// Rows of a tile: their maxima, sums, and the factor of what was summed before.
struct Softmax {
    float most[ROWS], sum[ROWS], factor[ROWS];
};

// A head. Without slots for all units that later tiles see again, and for a single tile, keys are read where they are, and values packed
// for each part.
template <typename N>
struct ForwardHead {
    Rows<const typename N::Number> q, k, v;
    Rows<typename N::Number> out;
    float* lse;
    Slots slots;
    bool keeps_units;
    Fetches fetches;
};

// Scores times a factor of some units become probabilities times the sum so far.
template <typename N>
INLINE void exponentials(const float* scores, float factor_of_scores, typename N::Packed* p, int64_t keys, int64_t low, int64_t high,
                         Softmax& rows) {
    const Vector scale = broadcast(factor_of_scores);
    for (int64_t j = low * WIDE; j < high * WIDE; j += WIDE) {
        const Vector before = register_of(rows.most + j);
        Vector most = broadcast(HIDDEN), also = most;
        for (int64_t k = 0; k < keys; k += 2) {      // NaN is not the maximum, and reaches the sum
            most = larger(register_of(scores + k * ROWS + j), most);
            also = larger(register_of(scores + (k + 1) * ROWS + j), also);
        }
        most = larger(larger(also, most) * scale, before);
        const Vector base = kept(differs(most, broadcast(HIDDEN)), most);      // 0 for rows that have seen nothing yet
        const Vector factor = power_of_two(before - base);
        Vector sum = register_of(rows.sum + j) * factor, other = zeros();
        for (int64_t k = 0; k < keys; k += 2) {
            const float* at = scores + k * ROWS + j;
            const Vector first = power_of_two(register_of(at) * scale - base);      // rounded as the maximum: at most 0
            const Vector second = power_of_two(register_of(at + ROWS) * scale - base);
            sum = sum + first;
            other = other + second;
            put_keys(p + k / N::PER * ROWS + j, first, second);
        }
        store(rows.most + j, most);
        store(rows.factor + j, factor);
        store(rows.sum + j, sum + other);
    }
}

// Scores of a unit times the factor, less what ALiBi subtracts.
INLINE void scale_and_lower(const Sight& sight, int64_t unit, int64_t low, int64_t high, float factor, float* scores) {
    for (int64_t i = 0; i < WIDE; ++i)
        for (int64_t j = low; j < high; ++j) {
            float* at = scores + i * ROWS + j * WIDE;
            store(at, difference_of(register_of(at), broadcast(factor), sight.penalty(unit, i, j)));
        }
}

// -inf where a unit is hidden.
INLINE void hide(const Sight& sight, int64_t unit, int64_t low, int64_t high, float* scores) {
    if (sight.sees_all(unit, low, high)) return;
    for (int64_t i = 0; i < WIDE; ++i)
        for (int64_t j = low; j < high; ++j) {
            float* at = scores + i * ROWS + j * WIDE;
            store(at, load_or(broadcast(HIDDEN), sight.lanes(unit, i, j), at));
        }
}

// Packs a unit: keys and values, or what of them is not read where it is.
template <typename N>
void take_unit(const Call& call, const ForwardWork<N>& w, int64_t unit, int64_t slot, const ForwardHead<N>& head) {
    const int64_t key = unit * WIDE, count = std::min(WIDE, call.keys - key), at = slot * WIDE * call.d / N::PER;
    if (head.keeps_units || count < WIDE) take_rows<N>(head.k.from(key), count, call.d, w.keys + at);
    if constexpr (!N::HAS_TILES) take_pairs(head.v.from(key), count, call.d, w.values + at);
}

// The slot of a packed unit, number u of a part.
template <typename N>
INLINE int32_t packed(const Call& call, const ForwardWork<N>& w, int64_t unit, int64_t u, ForwardHead<N>& head) {
    if (!head.keeps_units) {
        take_unit(call, w, unit, u, head);
        return int32_t(u);
    }
    if (!head.slots.has(unit)) {
        head.slots.give(unit);
        take_unit(call, w, unit, head.slots.of(unit), head);
    }
    return head.slots.of(unit);
}

template <typename N>
INLINE Rows<const typename N::Packed> keys_of(const Call& call, const ForwardWork<N>& w, int64_t unit, int64_t slot,
                                              const ForwardHead<N>& head) {
    using Packed = typename N::Packed;
    const int64_t key = unit * WIDE, words = call.d / N::PER;
    if (head.keeps_units || key + WIDE > call.keys) return {w.keys + slot * WIDE * words, words};
    return {reinterpret_cast<const Packed*>(head.k[key]), head.k.stride / N::PER};
}

// Values of a part → for tiles.
template <typename N>
INLINE void take_values(const Call& call, const ForwardWork<N>& w, const Part& part, const ForwardHead<N>& head) {
    const auto row = [&](int64_t i) {
        const int64_t key = i < part.count * WIDE ? part.units[i / WIDE] * WIDE + i % WIDE : call.keys;
        return key < call.keys ? head.v[key] : nullptr;
    };
    turn_pairs(row, part.count * WIDE, call.d, w.values, MOST_KEYS);
}

template <typename N>
void attend_part(const Call& call, const ForwardWork<N>& w, const Sight& sight, const Part& part, ForwardHead<N>& head, Softmax& rows) {
    const int64_t words = call.d / N::PER, wide = part.high - part.low, left = part.low * WIDE;
    const float scale = call.scale * LOG2_E;
    const bool is_scaled_before = sight.plan.slope != 0 || scale <= 0;      // a maximum times a negative number is none
    int32_t slots[ForwardWork<N>::MOST];
    for (int64_t u = 0; u < part.count; ++u) {
        const int64_t unit = part.units[u];
        const int32_t slot = packed(call, w, unit, u, head);
        const Rows<const typename N::Packed> k = keys_of(call, w, unit, slot, head);
        slots[u] = N::HAS_TILES ? int32_t(u) : slot;
        float* scores = w.scores + u * WIDE * ROWS;
        multiply<Put::SET>(Factors<N>{k.data, k.stride, 1, w.queries + left, ROWS, words, head.fetches}, WIDE, wide, scores + left, ROWS);
        if (is_scaled_before) scale_and_lower(sight, unit, part.low, part.high, scale, scores);
        hide(sight, unit, part.low, part.high, scores);
    }
    exponentials<N>(w.scores, is_scaled_before ? 1 : scale, w.p, part.count * WIDE, part.low, part.high, rows);
    if constexpr (N::HAS_TILES) take_values(call, w, part, head);
    add_to_queries<Put::RESCALED, N>(part, slots, w.p, w.values, MOST_KEYS, call.d, w.out, rows.factor, head.fetches);
}

// Tiles [from, to) of a head. sink: of the head, or null.
template <typename N>
void attend(const Call& call, const ForwardWork<N>& w, const Plan& plan, const float* sink, ForwardHead<N>& head, int64_t from,
            int64_t to) {
    const int64_t units = (call.keys + WIDE - 1) / WIDE, d = call.d;
    const auto ahead = [&](int64_t unit) {
        if (!head.keeps_units || !head.slots.is_first_request(unit)) return;      // keys that are read where they are would fill the queue
        const int64_t key = unit * WIDE, end = std::min(key + WIDE, call.keys);
        head.fetches.add(head.k, key, end, d);
        head.fetches.add(head.v, key, end, d);
    };
    for (int64_t tile = from; tile < to; ++tile) {
        const int64_t query = tile * ROWS, count = std::min(ROWS, call.queries - query);
        head.fetches.add(head.out, query, query + count, d);
        head.fetches.add(head.q, query + ROWS, std::min(query + 2 * ROWS, call.queries), d);
        take_columns<N>(head.q.from(query), count, d, w.queries);
        std::memset(w.out, 0, sizeof(float) * size_t(d * ROWS));
        Softmax rows;
        std::fill_n(rows.most, ROWS, sink == nullptr ? HIDDEN : *sink * LOG2_E);
        std::fill_n(rows.sum, ROWS, sink == nullptr ? 0.0f : 1.0f);
        const Sight sight{call, plan, tile};
        for_each_part<ForwardWork<N>::MOST>(sight, 0, units, ahead,
                                            [&](const Part& part) { attend_part(call, w, sight, part, head, rows); });
        if (head.keeps_units) take_back_slots(sight, head.slots, [](int64_t) {});
        for (int64_t i = 0; i < count; ++i) {
            rows.factor[i] = rows.sum[i] == 0 ? 0 : 1 / rows.sum[i];
            head.lse[query + i] = rows.sum[i] == 0 ? EMPTY : rows.most[i] * LN_2 + std::log(rows.sum[i]);
        }
        put_queries<N>(w.out, rows.factor, count, d, head.out.from(query));
    }
}
