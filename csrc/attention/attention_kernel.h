// Attention of one head in fp32 or bf16: forward, and the gradients from the kept output and log-sum-exp.
//
//   forward     S = c K Qᵀ     m = max S     P = 2^(S - m)     l = Σ P     O = Pᵀ V / l      lse = ln 2 (m + log2 l)
//   backward    P = 2^(S - lse / ln 2)       dP = V dOᵀ        dS = scale P (dP - D)         D = rowsum(dO O)
//               dV = P dO      dK = dS Q     dQ = dSᵀ K        c = scale / ln 2
//
// Formulas: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; blocks of queries outside as in Dao 2023 (arXiv:2307.08691).
//
// Layout: scores are [keys, queries], so that a register holds one key's scores with sixteen queries. The maximum, the sum and
// what belongs to a row are then elementwise; P and dS are written in the order in which the next product reads them. On tiles (AMX)
// O and dQ are transposed until they are written.
//
// Work: by tiles, registers and units (attention_plan.h). Units of whose ids no query has any are not computed, either; units of
// which a part is hidden have a mask.
//
// Sizes: d is a multiple of 32. Rows beyond the last query or key are zero in packed copies, and their scores are hidden.

// 2^t within 2e-7 for t <= 0; below -150 it is 0. NaN stays NaN: the larger one is the second argument then.
INLINE Vector power_of_two(Vector t) {
    t = larger(broadcast(-150.0f), t);
    const Vector whole = nearest(t), f = t - whole;
    Vector p = broadcast(1.33335581e-3f);
    p = sum_of(broadcast(9.61812911e-3f), p, f);
    p = sum_of(broadcast(5.55041087e-2f), p, f);
    p = sum_of(broadcast(2.40226507e-1f), p, f);
    p = sum_of(broadcast(6.93147181e-1f), p, f);
    p = sum_of(broadcast(1.0f), p, f);
    return times_power(p, whole);
}

// Which keys the queries of a tile see.
struct Sight {
    const Call& call;
    const Plan& plan;
    int64_t tile;

    int64_t query(int64_t column) const { return (tile * REGISTERS + column) * WIDE; }

    // Whether registers [low, high) see all of a unit.
    bool sees_all(int64_t unit, int64_t low, int64_t high) const {
        const int64_t key = unit * WIDE, first = key + call.offset, last = first + WIDE - 1;
        const bool is_inside = last - call.after <= query(low) && first + call.before >= query(high) - 1;
        return is_inside && key + WIDE <= call.keys && (plan.key_ids == nullptr || lanes_of_id(unit, low, high) == Ids::ALL);
    }

    // Whether they see nothing of a unit that a span has, because its keys have another id.
    bool sees_nothing(int64_t unit, int64_t low, int64_t high) const {
        return plan.key_ids != nullptr && lanes_of_id(unit, low, high) == Ids::NONE;
    }

    // Lanes of a register that see a key of the unit.
    INLINE_MEMBER Mask lanes(int64_t unit, int64_t i, int64_t column) const {
        const int64_t key = unit * WIDE + i, distance = key + call.offset - query(column);      // from the first lane
        if (key >= call.keys) return all_lanes(false);
        const Mask seen = without(lanes_from(distance - call.after), lanes_from(distance + call.before + 1));
        if (plan.key_ids == nullptr) return seen;
        return both(seen, equal(load(plan.query_ids + query(column)), broadcast(uint32_t(plan.key_ids[key]))));
    }

    // What ALiBi subtracts from a score to base 2 with this key.
    INLINE_MEMBER Vector penalty(int64_t unit, int64_t i, int64_t column) const {
        const Vector distance = broadcast(float(unit * WIDE + i + call.offset - query(column))) - lane_numbers();
        return magnitude(distance) * broadcast(plan.slope * LOG2_E);
    }

private:
    enum class Ids { ALL, SOME, NONE };

    // Which of the queries have the id of the keys; SOME, too, where the keys have several.
    INLINE_MEMBER Ids lanes_of_id(int64_t unit, int64_t low, int64_t high) const {
        const Integers id = broadcast(uint32_t(plan.key_ids[unit * WIDE]));
        if (!is_full(equal(load(plan.key_ids + unit * WIDE), id))) return Ids::SOME;
        Mask all = all_lanes(true), any = all_lanes(false);
        for (int64_t column = low; column < high; ++column) {
            const Mask same = equal(load(plan.query_ids + query(column)), id);
            all = both(all, same);
            any = either(any, same);
        }
        return is_full(all) ? Ids::ALL : is_empty(any) ? Ids::NONE : Ids::SOME;
    }
};

// Calls part(Part of at most `Most` units) for all units in [from, to) that the queries of a tile see. ahead(unit) is called for the
// unit AHEAD places later in the list, which may be of the next span or tile, or not be seen at all.
template <int64_t Most, typename Ahead, typename Do>
INLINE void for_each_part(const Sight& sight, int64_t from, int64_t to, const Ahead& ahead, const Do& part) {
    const Plan& plan = sight.plan;
    for (int32_t i = plan.first[sight.tile]; i < plan.first[sight.tile + 1]; ++i) {
        const Span& span = plan.spans[i];
        const int32_t* unit = std::lower_bound(plan.units + span.from, plan.units + span.to, int32_t(from));
        const int32_t* end = std::lower_bound(unit, plan.units + span.to, int32_t(to));
        int32_t some[Most];
        int64_t count = 0;
        for (; unit < end; ++unit) {
            if (sight.sees_nothing(*unit, span.low, span.high)) continue;
            ahead(unit[AHEAD]);
            some[count++] = *unit;
            if (count < Most) continue;
            part(Part{some, count, span.low, span.high});
            count = 0;
        }
        if (count > 0) part(Part{some, count, span.low, span.high});
    }
}

// Takes back the slots of units that no tile after this one sees, after done(unit).
template <typename Do>
INLINE void take_back_slots(const Sight& sight, Slots& slots, const Do& done) {
    const Plan& plan = sight.plan;
    for (int32_t i = plan.first[sight.tile]; i < plan.first[sight.tile + 1]; ++i)
        for (int32_t j = plan.spans[i].from; j < plan.spans[i].to; ++j) {
            const int32_t unit = plan.units[j];
            if (plan.last_tile[unit] != sight.tile || !slots.has(unit)) continue;
            done(unit);
            slots.take_back(unit);
        }
}
