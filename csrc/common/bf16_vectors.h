// Vectors of fp32 and bf16 numbers for AVX-512. Products of bf16 multiply pairs: 32 bits with two numbers that are neighbours in the
// summed dimension.
//
// Only for processors with AVX-512 F, BW, DQ and VL, and what is of bf16 with AVX-512 BF16: ask has_products() or the like before
// calling anything below it.

#pragma once

#include "vector_math.h"

// -DPORTABLE compiles what other processors and compilers get.
#if defined(__GNUC__) && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11 && !defined(PORTABLE)
#define HAS_BF16_PRODUCTS 1
#include <cpuid.h>
#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

constexpr int64_t WIDE = 16;        // fp32 numbers, or pairs, of a register
constexpr int64_t PAIRED = 32;      // bf16 numbers of a register

#ifdef HAS_BF16_PRODUCTS
inline bool has_products() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

// Whether there are tiles of bf16 (AMX) that this process may use: asks the operating system for them, which grants it once and for all.
inline bool has_tiles() {
#ifdef __linux__
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;      // ARCH_REQ_XCOMP_PERM of arch_prctl(2)
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool has_them = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE);
    return has_them && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}
#else
inline bool has_products() { return false; }
inline bool has_tiles() { return false; }
#endif

}  // namespace

#ifdef HAS_BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

inline int64_t rounded_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Numbers of a matrix, and how products take them: PER neighbours in the summed dimension are one `Packed`.
struct Fp32 {
    using Number = float;
    using Packed = float;
    static constexpr int64_t PER = 1;
    static constexpr bool HAS_TILES = false;
};

struct Bf16 {
    using Number = uint16_t;
    using Packed = uint32_t;
    static constexpr int64_t PER = 2;
    static constexpr bool HAS_TILES = false;
};

// bf16 that tiles multiply.
struct TiledBf16 : Bf16 {
    static constexpr bool HAS_TILES = true;
};

INLINE __m512i load(const void* x) { return _mm512_loadu_si512(x); }
INLINE void store(void* x, __m512i value) { _mm512_storeu_si512(x, value); }

// Sixteen rows of sixteen numbers become columns.
INLINE void transpose(__m512i* x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 16; j += 8) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

// Numbers of two rows in turn: 32 pairs in two registers.
INLINE __m512i lower_pairs(__m512i first, __m512i second) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                           35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(first, order, second);
}
INLINE __m512i upper_pairs(__m512i first, __m512i second) {
    const __m512i order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21,
                                           52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(first, order, second);
}

// Numbers of both halves of a register in turn.
INLINE __m512i paired_halves(__m512i x) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                           19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

// Products of packed numbers, added to sums in fp32.
INLINE __m512 register_of(const float* x) { return _mm512_loadu_ps(x); }
INLINE __m512i register_of(const uint32_t* x) { return load(x); }
INLINE __m512 broadcast(float x) { return _mm512_set1_ps(x); }
INLINE __m512i broadcast(uint32_t x) { return _mm512_set1_epi32(int(x)); }
INLINE __m512 sum_of(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE __m512 sum_of(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

INLINE __m512i narrow(__m512 lower, __m512 upper) { return (__m512i)_mm512_cvtne2ps_pbh(upper, lower); }

// The 32 numbers of a register in fp32: those at even and those at odd places, because a shift and a mask do that.
struct Halves {
    __m512 even, odd;
};

INLINE Halves widened(__m512i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_and_si512(x, broadcast(0xffff0000u)))};
}

// Rounded to nearest, ties to even; NaN stays NaN; what is below the smallest normal number becomes 0.
INLINE __m512i narrowed(Halves x) { return paired_halves(narrow(x.even, x.odd)); }

INLINE __mmask32 first_of_32(int64_t count) { return count >= PAIRED ? ~__mmask32(0) : count <= 0 ? 0 : (__mmask32(1) << count) - 1; }

}  // namespace

#pragma GCC pop_options
#endif
