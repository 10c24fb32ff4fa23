// Attention of queries of one head, tile by tile; attention_kernel.h has the formulas.

// Memory of a thread.
template <typename N>
struct ForwardWork {
    using Numbers = N;
    typename N::Packed* keys;                             // of a unit [WIDE, d / PER]
    typename N::Packed *values, *queries, *p;             // of a part [keys / PER, d], [d / PER, ROWS], [keys / PER, ROWS];
                                                          // values for tiles [d, keys / PER]
    float *scores, *out;                                  // [keys, ROWS], [d, ROWS]
};

// Rows of a tile: their maxima, sums, and the factor of what was summed before.
struct Softmax {
    float most[ROWS], sum[ROWS], factor[ROWS];
};

template <typename N>
struct ForwardTensors {
    Rows<const typename N::Number> q, k, v;
    Rows<typename N::Number> out;
    float* lse;
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

// Values of a part → for products.
template <typename N>
INLINE void take_values(const Call& call, const ForwardWork<N>& w, const Part& part, Rows<const typename N::Number> v) {
    if constexpr (N::HAS_TILES) {
        const auto row = [&](int64_t i) {
            const int64_t key = i < part.count * WIDE ? part.units[i / WIDE] * WIDE + i % WIDE : call.keys;
            return key < call.keys ? v[key] : nullptr;
        };
        turn_pairs(row, part.count * WIDE, call.d, w.values, MOST_KEYS);
    } else {
        for (int64_t u = 0; u < part.count; ++u) {
            const int64_t key = part.units[u] * WIDE;
            take_pairs(v.from(key), std::min(WIDE, call.keys - key), call.d, w.values + u * WIDE / N::PER * call.d);
        }
    }
}

template <typename N>
void attend_part(const Call& call, const ForwardWork<N>& w, const Sight& sight, const Part& part, const ForwardTensors<N>& t,
                 Softmax& rows) {
    using Packed = typename N::Packed;
    const int64_t d = call.d, words = d / N::PER, wide = part.high - part.low, left = part.low * WIDE, keys = part.count * WIDE;
    const float scale = call.scale * LOG2_E;
    const bool is_scaled_before = sight.plan.slope != 0 || scale <= 0;      // a maximum times a negative number is none
    for (int64_t u = 0; u < part.count; ++u) {
        const int64_t unit = part.units[u], key = unit * WIDE, at = u * WIDE, count = std::min(WIDE, call.keys - key);
        if (count < WIDE) take_rows<N>(t.k.from(key), count, d, w.keys);      // else they are read where they are, once
        const Rows<const Packed> rows_of_k{reinterpret_cast<const Packed*>(t.k[key]), t.k.stride / N::PER};
        const Rows<const Packed> k = count < WIDE ? Rows<const Packed>{w.keys, words} : rows_of_k;
        float* scores = w.scores + at * ROWS;
        multiply<Put::SET>(Factors<N>{k.data, k.stride, 1, w.queries + left, ROWS, words}, WIDE, wide, scores + left, ROWS);
        if (is_scaled_before) scale_and_lower(sight, unit, part.low, part.high, scale, scores);
        hide(sight, unit, part.low, part.high, scores);
    }
    exponentials<N>(w.scores, is_scaled_before ? 1 : scale, w.p, keys, part.low, part.high, rows);
    take_values<N>(call, w, part, t.v);
    const int64_t a_row = N::HAS_TILES ? MOST_KEYS : 1, a_step = N::HAS_TILES ? 1 : d;
    multiply<Put::RESCALED>(Factors<N>{w.values, a_row, a_step, w.p + left, ROWS, keys / N::PER}, d, wide, w.out + left, ROWS,
                            rows.factor + left);
}

// Tiles [from, to) of a head. sink: of the head, or null.
template <typename N>
void attend(const Call& call, const ForwardWork<N>& w, const Plan& plan, const float* sink, const ForwardTensors<N>& t,
            int64_t from, int64_t to) {
    const int64_t units = (call.keys + WIDE - 1) / WIDE, d = call.d;
    const auto ahead = [&](int64_t unit) {
        const int64_t key = unit * WIDE, end = std::min(key + WIDE, call.keys);
        fetch(t.k, key, end, d);
        fetch(t.v, key, end, d);
    };
    for (int64_t tile = from; tile < to; ++tile) {
        const int64_t query = tile * ROWS, count = std::min(ROWS, call.queries - query);
        fetch(t.q, query + ROWS, std::min(query + 2 * ROWS, call.queries), d);
        fetch_to_write(t.out, query, query + count, d);
        take_columns<N>(t.q.from(query), count, d, w.queries);
        std::memset(w.out, 0, sizeof(float) * size_t(d * ROWS));
        Softmax rows;
        std::fill_n(rows.most, ROWS, sink == nullptr ? HIDDEN : *sink * LOG2_E);
        std::fill_n(rows.sum, ROWS, sink == nullptr ? 0.0f : 1.0f);
        const Sight sight{call, plan, tile};
        for_each_part<UNITS * N::PER>(sight, 0, units, ahead, [&](const Part& part) { attend_part(call, w, sight, part, t, rows); });
        for (int64_t i = 0; i < count; ++i) {
            rows.factor[i] = rows.sum[i] == 0 ? 0 : 1 / rows.sum[i];
            t.lse[query + i] = rows.sum[i] == 0 ? EMPTY : rows.most[i] * LN_2 + std::log(rows.sum[i]);
        }
        put_columns(w.out, rows.factor, count, d, t.out.from(query));
    }
}
