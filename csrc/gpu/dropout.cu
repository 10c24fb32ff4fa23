// Dropout, alone or before the addition of the residual, and the masks of attention probabilities.
//
//   y = x m c (+ residual)     m = 1 where the number of (key, row, column) is below the threshold, else 0
//   dx = dy m c                c = 65536 / threshold
//
// Backward is the same kernel without a residual: nothing is kept for it but the keys.
// x is [positions, samples, cols], contiguous. The row of a sample's table is the position in the whole
// sequence: first_row + p, or with `picked` first_row + picked[sample, p]. The product is rounded to T, then
// the sum, as by two of torch's operations. A dropped infinity gives NaN and a dropped negative number -0, as
// in torch.
//
// Launch: dropout: a block for a position and a sample, a thread for 16 columns (one counter of Philox).
// Masks: a block for a row of a table. Results do not depend on the number of blocks.
// Traffic a number: dropout 2 T, with a residual 3 T (6 B in 16 bits). Masks write 1 B.
// Instructions a number on sm_90, all of a thread's divided by its 16 numbers: dropout of bf16 29, with a
// residual 34, so that memory bounds both; masks 21, which bound them, not memory.
// Limits: any cols. Packets of 16 bytes where a row is whole packets and memory is aligned, else single
// elements (PACKETS). At most 65535 samples. Masks of picked columns: of tables of at most 16 UNITS columns.
// Narrow: dropout without packets, keep_masks of cols that are not a multiple of 16, picked_keep_masks.
// Registers on sm_90 (and 80 to 120): dropout 64, keep_masks 64, picked_keep_masks 40.
#include "philox.cuh"

constexpr int MOST_THREADS = 512;

// Lanes 2k and 2k + 1 hold counters of neighbouring columns. Each takes every other packet of both, so that
// stores of a warp fill sectors of 32 bytes: packet i is at column 32 k + (2 i + odd) EACH.
// w: of this lane's counter. Returns the words of its packets, in order. Called by all lanes of a warp.
template <int EACH> INLINE Words interleaved(const Words& w, bool odd) {
    constexpr int WORDS = EACH / 4;                                      // of a packet: 2; of fp32 1
    Words mine;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint64_t of_even = w.at[WORDS == 2 ? i : 2 * i];
        const uint64_t of_odd = w.at[WORDS == 2 ? 2 + i : 2 * i + 1];
        const uint64_t got = __shfl_xor_sync(ALL_LANES, odd ? of_even : of_odd, 1);
        mine.at[i] = odd ? got : of_even;
        mine.at[2 + i] = odd ? of_odd : got;
    }
    return mine;
}

template <class T, bool PACKETS> INLINE Packet<T> load_some(const T* p, int count) {
    Packet<T> v;
    if constexpr (PACKETS) v = load(p);
    else
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) if (k < count) v.at[k] = p[k];
    return v;
}
template <class T, bool PACKETS> INLINE void store_some(T* p, const Packet<T>& v, int count) {
    if constexpr (PACKETS) store(p, v);
    else
        #pragma unroll
        for (int k = 0; k < LANES<T>; ++k) if (k < count) p[k] = v.at[k];
}

// y = dropout(x), with ADD residual + dropout(x). keys: [samples]. A block computes sample blockIdx.y.
// picked: [samples, positions] with these strides, or null.
template <class T, bool PACKETS, bool ADD>
__global__ __launch_bounds__(MOST_THREADS) void dropout(
        const uint64_t* keys, const T* x, const T* residual, T* y, const int64_t* picked,
        int64_t picked_of_sample, int64_t picked_of_position, int64_t first_row, int positions, int samples,
        int cols, uint32_t threshold, float scale) {
    constexpr int EACH = LANES<T>, COUNT = NUMBERS / EACH;
    const int sample = blockIdx.y;
    const uint64_t key = keys[sample];
    const bool odd = threadIdx.x & 1;
    for (int p = blockIdx.x; p < positions; p += gridDim.x) {
        const int64_t start = (int64_t(p) * samples + sample) * cols;
        const int64_t at = picked ? picked[sample * picked_of_sample + p * picked_of_position] : p;
        for (int first = 0; first < counters_of_row(cols); first += blockDim.x) {   // by whole warps
            const int unit = first + threadIdx.x, column = (unit - odd) * NUMBERS + odd * EACH;
            Packet<T> v[COUNT], r[COUNT];
            const auto read = [&](int i) {
                const int c = column + 2 * i * EACH;
                if (c >= cols) return;
                v[i] = load_some<T, PACKETS>(x + start + c, cols - c);
                if (ADD) r[i] = load_some<T, PACKETS>(residual + start + c, cols - c);
            };
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) if (PACKETS) read(i);        // arrives while Philox computes
            const Words drawn = philox(counter_of(first_row + at, cols, unit), key);
            const Words w = interleaved<EACH>(drawn, odd);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int c = column + 2 * i * EACH;
                if (c >= cols) continue;
                if (!PACKETS) read(i);                                   // fewer at once: many registers
                #pragma unroll
                for (int k = 0; k < EACH; ++k) {
                    const bool keep = number(w.at[(i * EACH + k) / 4], k % 4) < threshold;
                    v[i].at[k] = narrow<T>(__fmul_rn(wide(v[i].at[k]), keep ? scale : 0.0f));
                    if (ADD) v[i].at[k] = narrow<T>(__fadd_rn(wide(r[i].at[k]), wide(v[i].at[k])));
                }
                store_some<T, PACKETS>(y + start + c, v[i], cols - c);
            }
        }
    }
}

// out: bytes [tables, rows, cols], 1 = keep. keys: [tables]. STEP divides 16, cols and the address of out.
template <int STEP>
__global__ __launch_bounds__(MOST_THREADS) void keep_masks(
        uint8_t* out, const uint64_t* keys, int64_t first_row, int rows, int cols, uint32_t threshold) {
    const uint64_t key = keys[blockIdx.y];
    for (int i = blockIdx.x; i < rows; i += gridDim.x) {
        uint8_t* row = out + (int64_t(blockIdx.y) * rows + i) * cols;
        for (int unit = threadIdx.x; unit < counters_of_row(cols); unit += blockDim.x) {
            const Words w = philox(counter_of(first_row + i, cols, unit), key);
            #pragma unroll
            for (int at = 0; at < NUMBERS; at += STEP) {
                if (unit * NUMBERS + at >= cols) continue;
                Vec<uint8_t, STEP> bytes;
                #pragma unroll
                for (int k = 0; k < STEP; ++k)
                    bytes.at[k] = number(w.at[(at + k) / 4], (at + k) % 4) < threshold;
                *reinterpret_cast<Vec<uint8_t, STEP>*>(row + unit * NUMBERS + at) = bytes;
            }
        }
    }
}

// The same of picked rows and columns: out [samples, heads, k, k], keys [samples, heads], picked [samples, k]
// with these strides. A block draws a row of the table, a bit a number, and takes the columns from it.
template <int UNITS>
__global__ __launch_bounds__(MOST_THREADS) void picked_keep_masks(
        uint8_t* out, const uint64_t* keys, const int64_t* picked, int64_t picked_of_sample,
        int64_t picked_of_position, int64_t first_row, int heads, int k, int cols, uint32_t threshold) {
    __shared__ uint16_t kept[UNITS];
    const uint64_t key = keys[blockIdx.y];
    picked += blockIdx.y / heads * picked_of_sample;
    for (int i = blockIdx.x; i < k; i += gridDim.x) {
        const int64_t row = first_row + picked[i * picked_of_position];
        __syncthreads();                                                 // the last row has been read
        for (int unit = threadIdx.x; unit < counters_of_row(cols); unit += blockDim.x) {
            const Words w = philox(counter_of(row, cols, unit), key);
            uint32_t bits = 0;
            #pragma unroll
            for (int n = 0; n < NUMBERS; ++n) bits |= uint32_t(number(w.at[n / 4], n % 4) < threshold) << n;
            kept[unit] = uint16_t(bits);
        }
        __syncthreads();
        for (int j = threadIdx.x; j < k; j += blockDim.x) {
            const int column = int(picked[j * picked_of_position]);
            out[(int64_t(blockIdx.y) * k + i) * k + j] = kept[column / NUMBERS] >> column % NUMBERS & 1;
        }
    }
}
