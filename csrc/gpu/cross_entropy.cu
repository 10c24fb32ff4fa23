// Cross entropy of logits whose columns are split over ranks, forward and backward. The logits are read once each
// way; backward writes the gradient over them.
//
//   forward, of this rank's columns     lse_r = log Σ exp(x_c)     x_label, 0 where another rank has it
//                                       Σ x_c, for smoothing
//   the caller sums over the ranks      lse = log Σ_r exp(lse_r)
//   backward                            x_c <- (exp(x_c - lse) - on_all - [c = label] on_label) dloss
//                                       0 in padding
//
// A block a row, whatever its length: each thread keeps the largest logit so far and the sum of exponentials
// relative to it (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3). A row may begin
// at any element: the few in front of the first address of 16 bytes and behind the last one are taken one by
// one. In backward a row without a gradient (a masked token) is written and not read.
//
// Compiled for T and THREADS. Traffic a 16-bit logit: forward 2 B, backward 4 B; fp32: 4 B and 8 B; numbers of
// a row besides. Limits: fewer than 2^30 columns, fewer than 2^31 rows; rows may lie apart, the elements of a
// row may not. Registers a thread on sm_90: at most 40, nothing spilled.
#include "device.cuh"

// Σ exp(x) = total exp(largest), and Σ x, of the numbers that a thread has seen.
struct Online {
    float largest = -INFINITY_F, total = 0, sum = 0;

    template <int N> INLINE void add(const float (&x)[N]) {
        float top = largest;
        #pragma unroll
        for (int k = 0; k < N; ++k) top = Max::of(top, x[k]);
        const float from = finite(top);
        float part = 0;
        #pragma unroll
        for (int k = 0; k < N; ++k) { part += exponential(x[k] - from); sum += x[k]; }
        total = total * exponential(largest - from) + part;
        largest = top;
    }
    // Differences from it: -inf - -inf would be NaN.
    static INLINE float finite(float top) { return top == -INFINITY_F ? 0.0f : top; }
};

// The elements [0, columns) of a row: those before `head`, `packets` of 16 bytes, and those from `behind` on.
struct Extent { int columns, head, packets, behind; };

template <class T> INLINE Extent extent(const T* row, int columns) {
    const int before = int((0 - reinterpret_cast<uint64_t>(row)) % 16 / sizeof(T));
    const int head = before < columns ? before : columns, packets = (columns - head) / LANES<T>;
    return {columns, head, packets, head + packets * LANES<T>};
}
// The column outside the packets that is this thread's, or -1. There are fewer of them than threads.
INLINE int edge(const Extent& e) {
    const int i = threadIdx.x, c = i < e.head ? i : e.behind + i - e.head;
    return c < e.columns ? c : -1;
}

template <class T, int THREADS>
__global__ __launch_bounds__(THREADS)
void cross_entropy_facts(const T* __restrict__ logits, const int64_t* __restrict__ labels, float* lse,
                         float* label_logit, float* sums, int64_t stride, int valid) {
    constexpr int STEP = THREADS * LANES<T>;
    const int64_t row = blockIdx.x;
    const T* x = logits + row * stride;
    const Extent e = extent(x, valid);
    Online seen;
    if (const int c = edge(e); c >= 0) { const float v[1] = {wide(x[c])}; seen.add(v); }
    int p = threadIdx.x;
    for (; p + THREADS < e.packets; p += 2 * THREADS) {                 // two loads are under way at once
        const T* at = x + e.head + p * LANES<T>;
        const Packet<T> a = load(at), b = load(at + STEP);
        float v[2 * LANES<T>];
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) { v[k] = wide(a.at[k]); v[LANES<T> + k] = wide(b.at[k]); }
        seen.add(v);
    }
    if (p < e.packets) {
        const Packet<T> a = load(x + e.head + p * LANES<T>);
        float v[LANES<T>];
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) v[k] = wide(a.at[k]);
        seen.add(v);
    }
    const float largest = over_block<Max, THREADS>(seen.largest);
    const float from = Online::finite(largest);
    const float total = over_block<Sum, THREADS>(seen.total * exponential(seen.largest - from));
    const float sum = over_block<Sum, THREADS>(seen.sum);
    if (threadIdx.x == 0) {
        const int64_t label = labels[row];
        lse[row] = largest + logf(total);                               // -inf without valid columns
        label_logit[row] = label >= 0 && label < valid ? wide(x[label]) : 0.0f;
        if (sums) sums[row] = sum;
    }
}

// What the gradient of a row is made of.
struct Gradient {
    float lse, dloss, on_all, on_label;
    int label, valid;

    INLINE float of(float x, int c) const {
        const float difference = exponential(x - lse) - on_all - (c == label ? on_label : 0.0f);
        return c < valid ? difference * dloss : 0.0f;
    }
};

template <class T, int THREADS>
__global__ __launch_bounds__(THREADS)
void cross_entropy_gradient(T* logits, const int64_t* __restrict__ labels, const float* __restrict__ lse,
                            const float* __restrict__ dloss, int64_t stride, int valid, int width,
                            float on_label, float on_all) {
    constexpr int STEP = THREADS * LANES<T>;
    const int64_t row = blockIdx.x, label = labels[row];
    T* x = logits + row * stride;
    const int here = label >= 0 && label < valid ? int(label) : -1;
    const Gradient g{lse[row], dloss[row], on_all, on_label, here, valid};
    const Extent e = extent(x, width);
    const int c = edge(e);
    if (g.dloss == 0 && g.lse - g.lse == 0) {                           // but NaN and infinity stay visible
        Packet<T> zeros;
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) zeros.at[k] = narrow<T>(0.0f);
        for (int p = threadIdx.x; p < e.packets; p += THREADS) store(x + e.head + p * LANES<T>, zeros);
        if (c >= 0) x[c] = zeros.at[0];
        return;
    }
    if (c >= 0) x[c] = narrow<T>(g.of(wide(x[c]), c));
    int p = threadIdx.x;
    for (; p + THREADS < e.packets; p += 2 * THREADS) {
        const int first = e.head + p * LANES<T>;
        Packet<T> a = load(x + first), b = load(x + first + STEP);
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) {
            a.at[k] = narrow<T>(g.of(wide(a.at[k]), first + k));
            b.at[k] = narrow<T>(g.of(wide(b.at[k]), first + STEP + k));
        }
        store(x + first, a);
        store(x + first + STEP, b);
    }
    if (p < e.packets) {
        const int first = e.head + p * LANES<T>;
        Packet<T> a = load(x + first);
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) a.at[k] = narrow<T>(g.of(wide(a.at[k]), first + k));
        store(x + first, a);
    }
}
