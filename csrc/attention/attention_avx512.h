// Vectors of attention on AVX-512: sixteen numbers in a register; and bf16, with AVX-512 BF16. attention_avx2.h has the same names
// for AVX2. attention.cpp includes both, each in a namespace of its own and for its own target.

using Vector = __m512;
using Integers = __m512i;
using Mask = __mmask16;
using ::store;

constexpr int SUMS = 16;      // registers for sums of a product: as many as hide the time that one takes

INLINE void store(float* x, Vector value) { _mm512_storeu_ps(x, value); }
INLINE Vector difference_of(Vector a, Vector b, Vector c) { return _mm512_fmsub_ps(a, b, c); }      // a b - c
INLINE Vector zeros() { return _mm512_setzero_ps(); }
INLINE Integers no_integers() { return _mm512_setzero_si512(); }
INLINE Integers bits_of(Vector x) { return _mm512_castps_si512(x); }
INLINE Vector floats_of(Integers x) { return _mm512_castsi512_ps(x); }
INLINE Vector lane_numbers() { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }      // b, where either is NaN
INLINE Vector magnitude(Vector x) { return _mm512_abs_ps(x); }
INLINE Vector nearest(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vector times_power(Vector x, Vector whole) { return _mm512_scalef_ps(x, whole); }      // x 2^whole
INLINE float total(Vector x) { return _mm512_reduce_add_ps(x); }

// Lanes from `first` on.
INLINE Mask lanes_from(int64_t first) {
    return first <= 0 ? Mask(0xffff) : first >= WIDE ? Mask(0) : Mask(0xffff << first);
}
INLINE Mask all_lanes(bool are_in) { return are_in ? Mask(0xffff) : Mask(0); }
INLINE Mask both(Mask a, Mask b) { return Mask(a & b); }
INLINE Mask either(Mask a, Mask b) { return Mask(a | b); }
INLINE Mask without(Mask a, Mask b) { return a & Mask(~b); }
INLINE bool is_full(Mask x) { return x == 0xffff; }
INLINE bool is_empty(Mask x) { return x == 0; }
INLINE Mask equal(Integers a, Integers b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE Mask differs(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }      // NaN differs
INLINE Vector kept(Mask mask, Vector x) { return _mm512_maskz_mov_ps(mask, x); }               // else 0
INLINE Vector product_kept(Mask mask, Vector a, Vector b) { return _mm512_maskz_mul_ps(mask, a, b); }
INLINE Vector load_or(Vector otherwise, Mask mask, const float* x) { return _mm512_mask_loadu_ps(otherwise, mask, x); }

// ----------------------------------------------------------------------------------------------------------------- bf16
INLINE Vector widened(const float* x) { return _mm512_loadu_ps(x); }
INLINE Vector widened(const uint16_t* x) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

INLINE void put_row(float* y, Vector x) { _mm512_storeu_ps(y, x); }
INLINE void put_row(uint16_t* y, Vector x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), (__m256i)_mm512_cvtneps_pbh(x)); }

// Probabilities of two keys, of which the first is even → [keys / PER, ROWS]: of bf16 pairs of keys.
INLINE void put_keys(float* y, Vector first, Vector second) {
    _mm512_storeu_ps(y, first);
    _mm512_storeu_ps(y + ROWS, second);
}
INLINE void put_keys(uint32_t* y, Vector first, Vector second) { store(y, paired_halves(narrow(first, second))); }

// `count` rows → [count / PER, d], of bf16 pairs of rows; zeros after them, up to a multiple of WIDE rows.
INLINE void take_pairs(Rows<const uint16_t> x, int64_t count, int64_t d, uint32_t* y) {
    for (int64_t i = 0; i < rounded_up(count, WIDE); i += 2)
        for (int64_t j = 0; j < d; j += 2 * WIDE) {
            const __m512i first = i < count ? load(x[i] + j) : _mm512_setzero_si512();
            const __m512i second = i + 1 < count ? load(x[i + 1] + j) : _mm512_setzero_si512();
            store(y + i / 2 * d + j, lower_pairs(first, second));
            store(y + i / 2 * d + j + WIDE, upper_pairs(first, second));
        }
}
