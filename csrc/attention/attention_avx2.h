// Vectors of attention on AVX2: sixteen numbers in two registers, the names of attention_avx512.h.

struct Vector {
    __m256 low, high;
};
struct Integers {
    __m256i low, high;
};
struct Mask {
    __m256i low, high;      // -1 in lanes that are in it
};

constexpr int SUMS = 4;      // of two registers each

INLINE Vector operator+(Vector a, Vector b) { return {a.low + b.low, a.high + b.high}; }
INLINE Vector operator-(Vector a, Vector b) { return {a.low - b.low, a.high - b.high}; }
INLINE Vector operator*(Vector a, Vector b) { return {a.low * b.low, a.high * b.high}; }

INLINE __m256i load_half(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
INLINE void store_half(void* x, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(x), value); }

INLINE Integers load(const void* x) { return {load_half(x), load_half(static_cast<const char*>(x) + 32)}; }
INLINE void store(void* x, Integers value) {
    store_half(x, value.low);
    store_half(static_cast<char*>(x) + 32, value.high);
}
INLINE Vector register_of(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
INLINE void store(float* x, Vector value) {
    _mm256_storeu_ps(x, value.low);
    _mm256_storeu_ps(x + 8, value.high);
}
INLINE Vector broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Integers broadcast(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
INLINE Vector zeros() { return broadcast(0.0f); }
INLINE Integers no_integers() { return broadcast(0u); }
INLINE Integers bits_of(Vector x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
INLINE Vector floats_of(Integers x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
INLINE Vector lane_numbers() { return {_mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_ps(15, 14, 13, 12, 11, 10, 9, 8)}; }

INLINE Vector sum_of(Vector sum, Vector a, Vector b) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
INLINE Vector difference_of(Vector a, Vector b, Vector c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE Vector magnitude(Vector x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
INLINE Vector nearest(Vector x) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}

// x 2^whole for -127 <= whole <= 0, and 0 for less: the exponent's bits are whole + 127.
INLINE __m256 times_power(__m256 x, __m256 whole) {
    const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(whole, _mm256_set1_ps(-127)));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}
INLINE Vector times_power(Vector x, Vector whole) { return {times_power(x.low, whole.low), times_power(x.high, whole.high)}; }

INLINE float total(Vector x) {
    const __m256 eight = x.low + x.high;
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(two + _mm_movehdup_ps(two));
}

// Lanes from `first` on.
INLINE Mask lanes_from(int64_t first) {
    const __m256i last_out = _mm256_set1_epi32(int(std::clamp<int64_t>(first, 0, WIDE)) - 1);
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm256_cmpgt_epi32(lanes, last_out), _mm256_cmpgt_epi32(_mm256_add_epi32(lanes, _mm256_set1_epi32(8)), last_out)};
}
INLINE Mask all_lanes(bool are_in) { return {_mm256_set1_epi32(-int(are_in)), _mm256_set1_epi32(-int(are_in))}; }
INLINE Mask both(Mask a, Mask b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
INLINE Mask either(Mask a, Mask b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
INLINE Mask without(Mask a, Mask b) { return {_mm256_andnot_si256(b.low, a.low), _mm256_andnot_si256(b.high, a.high)}; }
INLINE bool is_full(Mask x) { return _mm256_movemask_epi8(_mm256_and_si256(x.low, x.high)) == -1; }
INLINE bool is_empty(Mask x) { return _mm256_movemask_epi8(_mm256_or_si256(x.low, x.high)) == 0; }
INLINE Mask equal(Integers a, Integers b) { return {_mm256_cmpeq_epi32(a.low, b.low), _mm256_cmpeq_epi32(a.high, b.high)}; }
INLINE Mask differs(Vector a, Vector b) {      // NaN differs
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ)), _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ))};
}
INLINE Vector kept(Mask mask, Vector x) {      // else 0
    return {_mm256_and_ps(x.low, _mm256_castsi256_ps(mask.low)), _mm256_and_ps(x.high, _mm256_castsi256_ps(mask.high))};
}
INLINE Vector product_kept(Mask mask, Vector a, Vector b) { return kept(mask, a * b); }
INLINE Vector load_or(Vector otherwise, Mask mask, const float* x) {
    const Vector given = register_of(x);
    return {_mm256_blendv_ps(otherwise.low, given.low, _mm256_castsi256_ps(mask.low)),
            _mm256_blendv_ps(otherwise.high, given.high, _mm256_castsi256_ps(mask.high))};
}

// Eight rows of eight numbers become columns.
INLINE void transpose(__m256i* x) {
    __m256i y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// Sixteen rows of sixteen.
INLINE void transpose(Integers* x) {
    __m256i blocks[2][2][8];      // of rows, of columns
    for (int i = 0; i < 16; ++i) {
        blocks[i / 8][0][i % 8] = x[i].low;
        blocks[i / 8][1][i % 8] = x[i].high;
    }
    for (auto& row : blocks)
        for (auto& block : row) transpose(block);
    for (int i = 0; i < 16; ++i) x[i] = {blocks[0][i / 8][i % 8], blocks[1][i / 8][i % 8]};
}

INLINE Vector widened(const float* x) { return register_of(x); }
INLINE void put_row(float* y, Vector x) { store(y, x); }
INLINE void put_keys(float* y, Vector first, Vector second) {
    store(y, first);
    store(y + ROWS, second);
}
