// Rows of tokens for their experts, and sums of the results: movement between x [T, h] of tokens and rows
// [R, h] of slots, slot t k + j being the j-th choice of token t.
//
//   gather             y[i] = x[index[i] / divisor]                       0 where index[i] is -1
//   sum_of_slots       y[t] = Σ_j w[t, j] rows[place[t, j]]               without the rows where place is -1;
//                                                                         the adjoint of gather with w = 1
//   combine_backward   drows[i] = w[s] dy[s / k]     dw[s] = dy[s / k] · rows[i]     of slot s = slot[i];
//                      drows[i] = 0 where s is -1; dw of slots without a row is not written
//
// Sums are in fp32 and rounded once: over slots in their order, one after another, each product rounded, so
// that the bits are those of torch's operations; of dw over a block, in an order that h, the dtype and
// THREADS determine. A slot has at most one row, so that no two blocks write one number, without atomics.
//
// Launch: gather and sum_of_slots: a thread has WIDTH neighbours of a row of y, a packet of 16 bytes where h
// and the addresses allow it; blocks of 256 threads, one after another over rows and columns.
// combine_backward: a block a row.
// Traffic of a number of a row, 16 bit: gather 4 bytes, or less where caches hold x; sum_of_slots 2 + 2 / k;
// combine_backward 6; and 8 to 16 bytes of indices and weights a row.
// Limits: contiguous rows, WIDTH divides h, fewer than 2^31 vectors, rows and slots; weights and their
// gradients fp32; indices int64. float, bf16, fp16.
// Registers on sm_80 to sm_120: gather 24, sum_of_slots 48, combine_backward 56.
// contraction: off
#include "vectors.cuh"

template <int WIDTH, class T> INLINE Vec<T, WIDTH> zeros() {
    Vec<T, WIDTH> v;
    #pragma unroll
    for (int c = 0; c < WIDTH; ++c) v.at[c] = narrow<T>(0.0f);
    return v;
}

// per_row: vectors of a row.
template <class T, int WIDTH>
__global__ __launch_bounds__(256)
void gather(const T* x, const int64_t* index, T* y, uint32_t vectors, uint32_t per_row, uint32_t divisor) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, row = i / per_row;
    if (i >= vectors) return;
    const int64_t from = index[row];
    Vec<T, WIDTH> v = zeros<WIDTH, T>();
    const int64_t first = int64_t(uint32_t(from) / divisor) * per_row;
    if (from >= 0) v = take<WIDTH>(x + (first + (i - row * per_row)) * WIDTH);
    put(y + int64_t(i) * WIDTH, v);
}

// place: [T, used], its rows place_stride apart; used <= k: slots behind have no rows. weights [T, k].
template <class T, int WIDTH, bool WEIGHTED>
__global__ __launch_bounds__(256)
void sum_of_slots(const T* rows, const int64_t* place, const float* weights, T* y, uint32_t vectors,
                  uint32_t per_row, int used, int place_stride, int k) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, token = i / per_row;
    if (i >= vectors) return;
    const T* column = rows + (i - token * per_row) * WIDTH;
    float sum[WIDTH] = {};
    #pragma unroll 2
    for (int j = 0; j < used; ++j) {
        const int64_t row = place[int64_t(token) * place_stride + j];
        if (row < 0) continue;
        const float weight = WEIGHTED ? weights[int64_t(token) * k + j] : 1.0f;
        const Vec<T, WIDTH> v = take<WIDTH>(column + row * per_row * WIDTH);
        #pragma unroll
        for (int c = 0; c < WIDTH; ++c) sum[c] += WEIGHTED ? wide(v.at[c]) * weight : wide(v.at[c]);
    }
    Vec<T, WIDTH> out;
    #pragma unroll
    for (int c = 0; c < WIDTH; ++c) out.at[c] = narrow<T>(sum[c]);
    put(y + int64_t(i) * WIDTH, out);
}

template <class T, int WIDTH, int THREADS>
__global__ __launch_bounds__(THREADS)
void combine_backward(const T* dy, const T* rows, const float* weights, const int64_t* slots, T* drows,
                      float* dweights, int per_row, uint32_t k) {
    const int64_t first = int64_t(blockIdx.x) * per_row, slot = slots[blockIdx.x];
    if (slot < 0) {                                                                 // of the whole block
        const Vec<T, WIDTH> none = zeros<WIDTH, T>();
        for (int i = threadIdx.x; i < per_row; i += THREADS) put(drows + (first + i) * WIDTH, none);
        return;
    }
    const int64_t of_token = int64_t(uint32_t(slot) / k) * per_row;
    const float weight = weights[slot];
    float dot = 0.0f;
    for (int i = threadIdx.x; i < per_row; i += THREADS) {
        const Vec<T, WIDTH> g = take<WIDTH>(dy + (of_token + i) * WIDTH);
        const Vec<T, WIDTH> v = take<WIDTH>(rows + (first + i) * WIDTH);
        Vec<T, WIDTH> out;
        #pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            dot += wide(g.at[c]) * wide(v.at[c]);
            out.at[c] = narrow<T>(wide(g.at[c]) * weight);
        }
        put(drows + (first + i) * WIDTH, out);
    }
    dot = over_block<Sum, THREADS>(dot);
    if (threadIdx.x == 0) dweights[slot] = dot;
}
