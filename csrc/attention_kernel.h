// Attention of one head in fp32 or bf16: forward, and the gradients from the kept output and log-sum-exp.
//
//   forward     S = c K Qᵀ     m = max S     P = 2^(S - m)     l = Σ P     Oᵀ = Vᵀ P / l     lse = ln 2 (m + log2 l)
//   backward    P = 2^(S - lse / ln 2)       dP = V dOᵀ        dS = scale P (dP - D)         D = rowsum(dO O)
//               dV = P dO      dK = dS Q     dQᵀ = Kᵀ dS       c = scale / ln 2
//
// Formulas: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; blocks of queries outside as in Dao 2023 (arXiv:2307.08691).
//
// Layout: scores are [keys, queries], so that a register holds one key's scores with sixteen queries. The maximum, the sum and
// what belongs to a row are then elementwise; P and dS are written in the order in which the next product reads them.
//
// Work: a tile of ROWS queries is four registers, each of which is a *unit* of WIDE queries; keys are units of WIDE, too. A span is
// a list of units of keys that neighbouring registers of the tile see, and no other register: so a unit that the pattern hides is
// not computed, nor one whose ids no query has. Units of which a part is hidden have a mask.
//
// Sizes: d is a multiple of 32. Rows beyond the last query or key are zero in packed copies, and their scores are hidden.

#pragma once

#include <cmath>

#include "attention_products.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

constexpr float LN_2 = 0.693147181f, HIDDEN = -std::numeric_limits<float>::infinity();
constexpr float EMPTY = std::numeric_limits<float>::infinity();      // log-sum-exp of a row that sees nothing

// What all heads of a call share. A query sees the keys from `before` positions before it to `after` positions after it, of those
// that the spans show. offset: positions from the first query to the first key.
struct Call {
    int64_t queries, keys, d, offset, before, after;
    float scale;
};

// Units [from, to) of the list that registers [low, high) of a tile see.
struct Span {
    int32_t from, to, low, high;
};

// Of a head: its spans by tile; the ids of its sample, or null: a query sees keys of its own id; the slope of ALiBi, or 0.
struct Plan {
    const int32_t* first;      // span of each tile, and of the end
    const Span* spans;
    const int32_t* units;      // of all spans
    const int32_t *query_ids, *key_ids;
    float slope;
};

// Some units that registers [low, high) of a tile see.
struct Part {
    const int32_t* units;
    int64_t count, low, high;
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

// Lanes from `first` on.
INLINE __mmask16 lanes_from(int64_t first) {
    return first <= 0 ? __mmask16(0xffff) : first >= WIDE ? __mmask16(0) : __mmask16(0xffff << first);
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
    INLINE_MEMBER __mmask16 lanes(int64_t unit, int64_t i, int64_t column) const {
        const int64_t key = unit * WIDE + i, distance = key + call.offset - query(column);      // from the first lane
        if (key >= call.keys) return 0;
        const __mmask16 seen = lanes_from(distance - call.after) & __mmask16(~lanes_from(distance + call.before + 1));
        if (plan.key_ids == nullptr) return seen;
        return _mm512_mask_cmpeq_epi32_mask(seen, load(plan.query_ids + query(column)), _mm512_set1_epi32(plan.key_ids[key]));
    }

    // What ALiBi subtracts from a score to base 2 with this key.
    INLINE_MEMBER __m512 penalty(int64_t unit, int64_t i, int64_t column) const {
        const __m512 lane = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512 distance = _mm512_sub_ps(_mm512_set1_ps(float(unit * WIDE + i + call.offset - query(column))), lane);
        return _mm512_mul_ps(_mm512_abs_ps(distance), _mm512_set1_ps(plan.slope * LOG2_E));
    }

private:
    enum class Ids { ALL, SOME, NONE };

    // Which of the queries have the id of the keys; SOME, too, where the keys have several.
    INLINE_MEMBER Ids lanes_of_id(int64_t unit, int64_t low, int64_t high) const {
        const __m512i id = _mm512_set1_epi32(plan.key_ids[unit * WIDE]);
        if (_mm512_cmpeq_epi32_mask(load(plan.key_ids + unit * WIDE), id) != 0xffff) return Ids::SOME;
        __mmask16 all = 0xffff, any = 0;
        for (int64_t column = low; column < high; ++column) {
            const __mmask16 same = _mm512_cmpeq_epi32_mask(load(plan.query_ids + query(column)), id);
            all &= same;
            any |= same;
        }
        return all == 0xffff ? Ids::ALL : any != 0 ? Ids::SOME : Ids::NONE;
    }
};

// Calls part(Part of at most `Most` units) for all units in [from, to) that the queries of a tile see, and before that ahead(unit)
// of units that follow some later.
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
            if (unit + UNITS < end) ahead(unit[UNITS]);
            some[count++] = *unit;
            if (count < Most) continue;
            part(Part{some, count, span.low, span.high});
            count = 0;
        }
        if (count > 0) part(Part{some, count, span.low, span.high});
    }
}

}  // namespace

#pragma GCC pop_options
