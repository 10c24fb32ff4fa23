// Softmax of attention scores, scaled, masked and causal, with keyed dropout; forward and backward.
//
//   z = scale x where visible, else -infinity      p = exp(z - max z) / Σ exp(z - max z)      y = p m c
//   d = dy m c                                     dx = scale p (d - Σ d p)
//
// x is [samples, heads, queries, cols], contiguous. Causal: the queries are the last ones, so query q sees
// the first cols - queries + q + 1 columns. mask: bytes of the same shape, with any strides of its first dims
// (0: one for all), 1 = not visible. Columns that are not visible are exactly 0, and so are queries that see
// none. m: 1 where the number of (key, row, column) is below the threshold, else 0; c = 65536 / threshold
// (philox.cuh). Exponentials and sums are in fp32, of 16-bit numbers with the hardware's exponential; p is
// rounded to T before the factor c.
//
// Launches: blocks (rows of a table, tables); a table is a sample and a head. A row to each warp of a block
// of 4 (THREADS = 32), or to each block; EACH numbers of it in the registers of each thread, so it is read
// once. softmax_backward_looped reads wider rows twice, the second time from L2. Columns that a causal query
// does not see are not read.
//
// Traffic, bytes a number in 16 bits: forward 4, with dropout 6 (p is kept for backward), mask 1; backward 6.
// Half of the reads of causal squares.
// Limits: 65535 tables; 32768 columns, with dropout 16384. Any number of columns at any address (VEC = 1);
// faster where rows and addresses are multiples of 16 bytes (VEC = LANES).
// Narrow: softmax_forward, softmax_backward and softmax_backward_looped with VEC = 1.
// Registers on sm_90: softmax_forward 128, softmax_backward 168, softmax_backward_looped 64.
// Nothing is spilled.
#include "philox.cuh"

template <int THREADS> constexpr int ROWS = THREADS == 32 ? 4 : 1;      // of a block

struct Dropout { const uint64_t* keys; int64_t first_row; uint32_t threshold; float factor; };

template <int VEC, class T> INLINE Vec<T, VEC> load_vec(const T* p) {
    return *reinterpret_cast<const Vec<T, VEC>*>(p);
}
template <int VEC, class T> INLINE void store_vec(T* p, const Vec<T, VEC>& v) {
    *reinterpret_cast<Vec<T, VEC>*>(p) = v;
}
INLINE float exponential(float x, float) { return expf(x); }
template <class T> INLINE float exponential(float x, T) { return __expf(x); }

// f(first number of this thread, its column) for each access of VEC numbers. With dropout a thread has 16
// neighbouring columns, those of a counter; otherwise a warp accesses neighbouring memory.
template <int VEC, int NUMBERS_EACH, int THREADS, bool DROPOUT, class F> INLINE void for_columns(F f) {
    constexpr int CHUNK = DROPOUT ? NUMBERS : VEC;
    #pragma unroll
    for (int i = 0; i < NUMBERS_EACH; i += VEC)
        f(i, (i / CHUNK * THREADS + int(threadIdx.x % THREADS)) * CHUNK + i % CHUNK);
}

// Sets the numbers that are dropped to 0, and multiplies the others by the factor. `v`: as for_columns
// numbers them.
template <class T, int VEC, int EACH, int THREADS>
INLINE void drop(Vec<T, VEC>* v, const Dropout& dropout, int row, int cols, int visible) {
    const uint64_t key = dropout.keys[blockIdx.y];
    #pragma unroll
    for (int i = 0; i < EACH; i += NUMBERS) {
        const int unit = i / NUMBERS * THREADS + threadIdx.x % THREADS;
        if (unit * NUMBERS >= visible) continue;                        // all are 0
        const Words w = philox(counter_of(dropout.first_row + row, cols, unit), key);
        #pragma unroll
        for (int k = 0; k < NUMBERS; ++k) {
            T& x = v[(i + k) / VEC].at[k % VEC];
            x = narrow<T>(number(w.at[k / 4], k % 4) < dropout.threshold ? wide(x) * dropout.factor : 0.0f);
        }
    }
}

// mask: null for none; strides in bytes. kept: p, or null without dropout, when y is p.
template <class T, int VEC, int EACH, int THREADS, bool DROPOUT>
__global__ __launch_bounds__(THREADS * ROWS<THREADS>)
void softmax_forward(const T* x, const uint8_t* mask, T* y, T* kept, const uint64_t* keys, int64_t first_row,
                     int64_t mask_sample, int64_t mask_head, int64_t mask_query, int heads, int queries,
                     int cols, int causal, uint32_t threshold, float factor, float scale) {
    const int row = blockIdx.x * ROWS<THREADS> + threadIdx.x / THREADS;
    if (row >= queries) return;                                         // the whole warp
    const int64_t start = (int64_t(blockIdx.y) * queries + row) * cols;
    const int visible = causal ? min(cols, cols - queries + row + 1) : cols;
    if (mask) mask += blockIdx.y / heads * mask_sample + blockIdx.y % heads * mask_head + row * mask_query;
    float z[EACH], largest = -INFINITY_F, total = 0;
    for_columns<VEC, EACH, THREADS, DROPOUT>([&](int i, int c) {
        Vec<T, VEC> a;
        Vec<uint8_t, VEC> hidden = {};
        if (c < visible) {
            a = load_vec<VEC>(x + start + c);
            if (mask) hidden = load_vec<VEC>(mask + c);
        }
        #pragma unroll
        for (int k = 0; k < VEC; ++k) {
            z[i + k] = c + k < visible && !hidden.at[k] ? wide(a.at[k]) * scale : -INFINITY_F;
            largest = Max::of(largest, z[i + k]);
        }
    });
    largest = over_block<Max, THREADS>(largest);
    if (largest == -INFINITY_F) largest = 0;                    // no visible column: exp(-infinity) = 0
    #pragma unroll
    for (int i = 0; i < EACH; ++i) total += z[i] = exponential(z[i] - largest, T());
    total = over_block<Sum, THREADS>(total);
    const float share = total == 0 ? 0.0f : 1 / total;
    Vec<T, VEC> p[EACH / VEC];
    for_columns<VEC, EACH, THREADS, DROPOUT>([&](int i, int c) {
        #pragma unroll
        for (int k = 0; k < VEC; ++k) p[i / VEC].at[k] = narrow<T>(z[i + k] * share);
        if (DROPOUT && c < cols) store_vec(kept + start + c, p[i / VEC]);
    });
    if constexpr (DROPOUT)
        drop<T, VEC, EACH, THREADS>(p, {keys, first_row, threshold, factor}, row, cols, visible);
    for_columns<VEC, EACH, THREADS, DROPOUT>([&](int i, int c) {
        if (c < cols) store_vec(y + start + c, p[i / VEC]);
    });
}

template <class T, int VEC, int EACH, int THREADS, bool DROPOUT>
__global__ __launch_bounds__(THREADS * ROWS<THREADS>)
void softmax_backward(const T* dy, const T* p, T* dx, const uint64_t* keys, int64_t first_row, int queries,
                      int cols, int causal, uint32_t threshold, float factor, float scale) {
    const int row = blockIdx.x * ROWS<THREADS> + threadIdx.x / THREADS;
    if (row >= queries) return;                                         // the whole warp
    const int64_t start = (int64_t(blockIdx.y) * queries + row) * cols;
    const int visible = causal ? min(cols, cols - queries + row + 1) : cols;
    Vec<T, VEC> d[EACH / VEC] = {}, share[EACH / VEC] = {};
    float dot = 0;
    for_columns<VEC, EACH, THREADS, DROPOUT>([&](int i, int c) {
        if (c >= visible) return;
        d[i / VEC] = load_vec<VEC>(dy + start + c);
        share[i / VEC] = load_vec<VEC>(p + start + c);
    });
    if constexpr (DROPOUT)
        drop<T, VEC, EACH, THREADS>(d, {keys, first_row, threshold, factor}, row, cols, visible);
    #pragma unroll
    for (int i = 0; i < EACH; ++i) dot += wide(d[i / VEC].at[i % VEC]) * wide(share[i / VEC].at[i % VEC]);
    dot = over_block<Sum, THREADS>(dot);
    for_columns<VEC, EACH, THREADS, DROPOUT>([&](int i, int c) {
        if (c >= cols) return;
        Vec<T, VEC> out;
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            out.at[k] = narrow<T>(scale * wide(share[i / VEC].at[k]) * (wide(d[i / VEC].at[k]) - dot));
        store_vec(dx + start + c, out);
    });
}

// Rows of any width, without dropout: blocks (queries, tables) of 1024 threads.
template <class T, int VEC>
__global__ __launch_bounds__(1024)
void softmax_backward_looped(const T* dy, const T* p, T* dx, int queries, int cols, int causal, float scale) {
    const int64_t start = (int64_t(blockIdx.y) * queries + blockIdx.x) * cols;
    const int visible = causal ? min(cols, cols - queries + int(blockIdx.x) + 1) : cols;
    float dot = 0;
    for (int c = threadIdx.x * VEC; c < visible; c += 1024 * VEC) {
        const Vec<T, VEC> d = load_vec<VEC>(dy + start + c), share = load_vec<VEC>(p + start + c);
        #pragma unroll
        for (int k = 0; k < VEC; ++k) dot += wide(d.at[k]) * wide(share.at[k]);
    }
    dot = over_block<Sum, 1024>(dot);
    for (int c = threadIdx.x * VEC; c < cols; c += 1024 * VEC) {
        Vec<T, VEC> d = {}, share = {}, out;
        if (c < visible) {
            d = load_vec<VEC>(dy + start + c);
            share = load_vec<VEC>(p + start + c);
        }
        #pragma unroll
        for (int k = 0; k < VEC; ++k)
            out.at[k] = narrow<T>(scale * wide(share.at[k]) * (wide(d.at[k]) - dot));
        store_vec(dx + start + c, out);
    }
}
