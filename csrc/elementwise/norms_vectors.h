// Norms of bf16 rows for AVX-512, forward and backward; norms.cpp has the maths, and the same for any processor.
//
// Arithmetic is in fp32 with fused multiply-adds. In buffers, numbers of a register lie as `widened` returns them, those at even
// places before those at odd ones: weights are brought into this order once a chunk, gradients of weights back into their own.
//
// Forward: three passes over a row in the first cache, of sums, of squares, of results. Backward: two.
//
// Only where has_products() is true, and for rows of whole registers: widths that are multiples of PAIRED.

#pragma once

#include <cmath>

#include "../common/bf16_vectors.h"

namespace {

constexpr int64_t CHUNK = 64;        // rows whose gradients of weights are summed together
constexpr int64_t BUFFERS = 5;       // that a thread has, of `width` numbers each

// What a call works on; null where there is none. Rows are `width` numbers long.
struct Call {
    const uint16_t *x, *residual, *dy, *past;       // past: a gradient of v that is added to dv
    uint16_t *y, *total, *dx;                       // total: v, rounded, is what is normalized
    const float *weight, *bias;
    float *means, *inverses;                        // [rows]: mean and r; no means for RMSNorm
    float *sums;                                    // [chunks, 2, width]: dw, db
    int64_t rows, width;
    float eps;
};

inline float* sums_of(const Call& call, int64_t row) { return call.sums + row / CHUNK * 2 * call.width; }
inline float mean_of(const Call& call, int64_t row) { return call.means ? call.means[row] : 0; }
inline void keep_statistics(const Call& call, int64_t row, float mean, float r) {
    if (call.means) call.means[row] = mean;
    call.inverses[row] = r;
}

}  // namespace

#ifdef HAS_BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {

inline bool has_whole_registers(const Call& call) { return call.width % PAIRED == 0; }

INLINE Halves plus(Halves a, Halves b) { return {_mm512_add_ps(a.even, b.even), _mm512_add_ps(a.odd, b.odd)}; }
INLINE Halves minus(Halves a, __m512 b) { return {_mm512_sub_ps(a.even, b), _mm512_sub_ps(a.odd, b)}; }
INLINE Halves times(Halves a, Halves b) { return {_mm512_mul_ps(a.even, b.even), _mm512_mul_ps(a.odd, b.odd)}; }
INLINE Halves times(Halves a, __m512 b) { return {_mm512_mul_ps(a.even, b), _mm512_mul_ps(a.odd, b)}; }
INLINE Halves sum_of(Halves sum, Halves a, Halves b) { return {sum_of(sum.even, a.even, b.even), sum_of(sum.odd, a.odd, b.odd)}; }
INLINE Halves minus_product(Halves x, Halves a, __m512 b) {
    return {_mm512_fnmadd_ps(a.even, b, x.even), _mm512_fnmadd_ps(a.odd, b, x.odd)};
}

INLINE Halves zeros() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
INLINE float mean_of(Halves sums, int64_t count) { return _mm512_reduce_add_ps(_mm512_add_ps(sums.even, sums.odd)) / float(count); }

INLINE Halves kept(const float* x) { return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + WIDE)}; }
INLINE void keep(float* x, Halves value) {
    _mm512_storeu_ps(x, value.even);
    _mm512_storeu_ps(x + WIDE, value.odd);
}

INLINE Halves numbers_at(const uint16_t* x) { return widened(load(x)); }

// Where number i of a row lies in a buffer.
INLINE int64_t place_of(int64_t i) { return i / PAIRED * PAIRED + i % 2 * WIDE + i % PAIRED / 2; }

// The row to be normalized, into a buffer; its mean.
INLINE float load_row(const Call& call, int64_t start, float* v) {
    Halves sums = zeros();
    for (int64_t i = 0; i < call.width; i += PAIRED) {
        Halves x = numbers_at(call.x + start + i);
        if (call.residual) {
            const __m512i total = narrowed(plus(x, numbers_at(call.residual + start + i)));
            store(call.total + start + i, total);
            x = widened(total);
        }
        keep(v + i, x);
        sums = plus(sums, x);
    }
    return call.means ? mean_of(sums, call.width) : 0;
}

void forward_in_vectors(const Call& call, int64_t first, int64_t last, float* buffers) {
    const int64_t width = call.width;
    float *v = buffers, *w = v + width, *b = w + width;
    for (int64_t i = 0; i < width; ++i) {
        w[place_of(i)] = call.weight[i];
        b[place_of(i)] = call.bias ? call.bias[i] : 0;
    }
    for (int64_t row = first; row < last; ++row) {
        const int64_t start = row * width;
        const float mean = load_row(call, start, v);
        const __m512 means = broadcast(mean);
        Halves squares = zeros();
        for (int64_t i = 0; i < width; i += PAIRED) {
            const Halves centred = minus(kept(v + i), means);
            squares = sum_of(squares, centred, centred);
        }
        const float r = 1 / std::sqrt(mean_of(squares, width) + call.eps);
        for (int64_t i = 0; i < width; i += PAIRED)
            store(call.y + start + i, narrowed(sum_of(kept(b + i), times(minus(kept(v + i), means), broadcast(r)), kept(w + i))));
        keep_statistics(call, row, mean, r);
    }
}

INLINE void backward_row_in_vectors(const Call& call, int64_t row, float* n, float* g, const float* w, float* dw, float* db) {
    const int64_t width = call.width, start = row * width;
    const __m512 mean = broadcast(mean_of(call, row)), r = broadcast(call.inverses[row]);
    Halves of_g = zeros(), of_gn = zeros();
    for (int64_t i = 0; i < width; i += PAIRED) {
        const Halves dy = numbers_at(call.dy + start + i), normal = times(minus(numbers_at(call.x + start + i), mean), r);
        keep(dw + i, sum_of(kept(dw + i), dy, normal));
        keep(db + i, plus(kept(db + i), dy));
        const Halves weighted = times(dy, kept(w + i));
        keep(n + i, normal);
        keep(g + i, weighted);
        of_g = plus(of_g, weighted);
        of_gn = sum_of(of_gn, weighted, normal);
    }
    const __m512 mean_g = broadcast(call.means ? mean_of(of_g, width) : 0), mean_gn = broadcast(mean_of(of_gn, width));
    for (int64_t i = 0; i < width; i += PAIRED) {
        const Halves dv = times(minus_product(minus(kept(g + i), mean_g), kept(n + i), mean_gn), r);
        store(call.dx + start + i, narrowed(call.past ? plus(dv, numbers_at(call.past + start + i)) : dv));
    }
}

void backward_in_vectors(const Call& call, int64_t first, int64_t last, float* buffers) {
    const int64_t width = call.width;
    float *sums = sums_of(call, first), *n = buffers, *g = n + width, *w = g + width, *dw = w + width, *db = dw + width;
    for (int64_t i = 0; i < width; ++i) w[place_of(i)] = call.weight[i];
    std::fill(dw, dw + 2 * width, 0.0f);
    for (int64_t row = first; row < last; ++row) backward_row_in_vectors(call, row, n, g, w, dw, db);
    for (int64_t i = 0; i < width; ++i) {
        sums[i] = dw[place_of(i)];
        sums[width + i] = db[place_of(i)];
    }
}

}  // namespace

#pragma GCC pop_options
#endif
