// The softmax of a row of bf16 logits and the gradient in place of its probabilities, for AVX-512: cross_entropy.cpp has the same
// for any processor and for fp32.
//
// Arithmetic is in fp32. A register of 32 numbers becomes two of 16, of even and of odd columns, because a shift and a mask do
// that; exponentials lie in memory in this order until they are rounded. Sums are of blocks, whose numbers are few enough for
// rounding errors to stay small in long rows. What a column becomes depends on its place in the row, never on the row's address.
//
// Three passes: the largest logit, as an integer; exponentials and their sum; products with 1 / sum. The last one runs from the
// end of the row, whose exponentials are still in the first cache.
//
// Only for processors with AVX-512 F, BW, DQ, VL and BF16: ask has_products().

#pragma once

#include <cmath>
#include <limits>

#include "../common/bf16_vectors.h"

namespace {

struct Softmax {
    float at_column, lse;
};

struct Gradient {
    float factor, everywhere, at_label;
    int64_t label;      // -1 where the row has none
};

}  // namespace

#ifdef HAS_BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

// Whole registers need no mask; what is missing in the last one of a row is `rest`.
INLINE __m512i load_first(const uint16_t* x, int64_t count, int rest) {
    return count >= PAIRED ? load(x) : _mm512_mask_loadu_epi16(_mm512_set1_epi16(short(rest)), first_of_32(count), x);
}
INLINE void store_first(uint16_t* x, int64_t count, __m512i value) {
    if (count >= PAIRED)
        store(x, value);
    else
        _mm512_mask_storeu_epi16(x, first_of_32(count), value);
}

constexpr int MINUS_INFINITY = 0xff80;

// Integers in the order of the bf16 numbers with these bits, and back. NaN is beyond the infinity of its sign.
INLINE __m512i ordered(__m512i x) {
    return _mm512_ternarylogic_epi32(x, _mm512_srai_epi16(x, 15), _mm512_set1_epi16(0x7fff), 0x78);      // x ^ (sign & 0x7fff)
}

// NaN where one of a positive sign is among the numbers: exponentials are NaN in either case.
INLINE float largest_of(const uint16_t* x, int64_t count) {
    __m512i largest = ordered(load_first(x, count, MINUS_INFINITY));
    for (int64_t i = PAIRED; i < count; i += PAIRED)
        largest = _mm512_max_epi16(largest, ordered(load_first(x + i, count - i, MINUS_INFINITY)));
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(largest, 16), 16), odd = _mm512_srai_epi32(largest, 16);
    const int key = _mm512_reduce_max_epi32(_mm512_max_epi32(even, odd));
    return float_of(uint32_t(key ^ (key >> 15 & 0x7fff)) << 16);
}

// 2^(j / 32), each rounded once.
struct Roots {
    alignas(64) float powers[32];
    constexpr Roots() : powers() {
        double power = 1;
        for (float& rounded : powers) {
            rounded = float(power);
            power *= 1.0218971486541166;
        }
    }
};
constexpr Roots ROOTS;

// exp(x - largest) = 2^n exp(r), n in 32nds, |r| <= ln(2) / 64: 2^n from the table for its fraction; exp(r) by a polynomial of
// degree 2, within 6e-8. The relative error is below 4e-7, of numbers above 1e-9 below 2.5e-7. What is below the smallest normal
// number becomes 0.
struct Exponentials {
    __m512 largest, lower = _mm512_load_ps(ROOTS.powers), upper = _mm512_load_ps(ROOTS.powers + 16);

    INLINE_MEMBER explicit Exponentials(float x) : largest(_mm512_set1_ps(x)) {}

    INLINE_MEMBER __m512 operator()(__m512 x) const {
        const __m512 round = _mm512_set1_ps(393216.0f);      // 1.5 * 2^18: a sum's last bits are n, its last five the fraction
        const __m512 d = _mm512_sub_ps(x, largest), rounded = _mm512_fmadd_ps(d, _mm512_set1_ps(LOG2_E), round);
        const __m512 n = _mm512_sub_ps(rounded, round), r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), d);
        const __m512 fraction = _mm512_permutex2var_ps(lower, _mm512_castps_si512(rounded), upper);
        // 1 + r (1 + (ln(2) / 64)^2 / 8 + r / 2): the cubic term's nearest linear one
        const __m512 slope = _mm512_fmadd_ps(r, _mm512_set1_ps(0.5f), _mm512_set1_ps(1.00001466f));
        const __m512 e = _mm512_fmadd_ps(fraction, _mm512_mul_ps(slope, r), fraction);
        const __mmask16 some = _mm512_cmp_ps_mask(d, _mm512_set1_ps(-87.3365448f), _CMP_NLT_UQ);      // -126 ln(2); NaN stays
        return _mm512_maskz_scalef_ps(some, e, n);
    }
};

// Where the exponential of a column lies.
INLINE int64_t place_of(int64_t column) { return column / PAIRED * PAIRED + column % 2 * WIDE + column % PAIRED / 2; }

// wide: aligned memory for the exponentials, whole registers of them; those beyond the row become 0.
INLINE float exponentials(const uint16_t* x, float largest, int64_t count, float* wide) {
    constexpr int64_t BLOCK = 2048;
    const Exponentials exponential(largest);
    __m512 total = _mm512_setzero_ps();
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t stop = std::min(count, start + BLOCK);
        __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
        for (int64_t i = start; i < stop; i += PAIRED) {
            const Halves logits = widened(load_first(x + i, count - i, MINUS_INFINITY));
            const __m512 even = exponential(logits.even), odd = exponential(logits.odd);
            _mm512_store_ps(wide + i, even);
            _mm512_store_ps(wide + i + WIDE, odd);
            even_sum = _mm512_add_ps(even_sum, even);
            odd_sum = _mm512_add_ps(odd_sum, odd);
        }
        total = _mm512_add_ps(total, _mm512_add_ps(even_sum, odd_sum));
    }
    return _mm512_reduce_add_ps(total);
}

Softmax softmax_in_vectors(uint16_t* x, int64_t count, int64_t column, float* wide) {
    if (count == 0) return {0, -std::numeric_limits<float>::infinity()};
    const float largest = largest_of(x, count), sum = exponentials(x, largest, count, wide), factor = 1 / sum;
    const __m512 factors = _mm512_set1_ps(factor);
    for (int64_t i = (count - 1) / PAIRED * PAIRED; i >= 0; i -= PAIRED)
        store_first(x + i, count - i, narrowed({_mm512_mul_ps(_mm512_load_ps(wide + i), factors),
                                                _mm512_mul_ps(_mm512_load_ps(wide + i + WIDE), factors)}));
    return {wide[place_of(column)] * factor, largest + std::log(sum)};
}

void gradient_in_vectors(uint16_t* p, int64_t count, const Gradient& row) {
    const __m512 factor = _mm512_set1_ps(row.factor), everywhere = _mm512_set1_ps(row.everywhere);
    for (int64_t i = 0; i < count; i += PAIRED) {
        const Halves x = widened(load_first(p + i, count - i, 0));
        store_first(p + i, count - i, narrowed({_mm512_fmsub_ps(x.even, factor, everywhere),
                                                _mm512_fmsub_ps(x.odd, factor, everywhere)}));
    }
    if (row.label >= 0) p[row.label] = to_bf16(row.at_label);
}

}  // namespace

#pragma GCC pop_options
#endif
