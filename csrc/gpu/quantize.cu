// Numbers in 8 or 4 bits: symmetric integers with an fp32 scale for each block of neighbours.
//
//   quantize     scale = max |x| of the block · (1/most)       most = 127 or 7
//                code = x / scale, rounded to nearest even, in [-most, most]
//   dequantize   y = code · scale, rounded once
//
// 4 bits: two codes in a byte, that of the number with the even index in the low half. A block of zeros, or
// whose scale is 0 in fp32, has the codes 0; one with infinity or NaN the scale NaN and the codes 0.
//
// Launch: quantize: a warp a block of numbers, which it reads twice, the second time from caches; four warps.
// dequantize: a thread has EACH neighbours, 16 bytes of floating-point numbers where lengths and addresses allow
// it, and at least one byte of codes; blocks of 256 threads.
// Traffic of a number with 16 bits: 3 bytes, with 4-bit codes 2.5, and 4 bytes a scale.
// Limits: contiguous; WIDTH divides the length and the block, which is even; fewer than 2^31 threads and
// blocks. float, bf16, fp16. Registers on sm_80 to sm_120: at most 48.
#include "vectors.cuh"

template <int A, int B> constexpr int LARGER = A > B ? A : B;
template <int WIDTH, int BITS> constexpr int EACH = LARGER<WIDTH, 8 / BITS>;
template <int BITS> constexpr int MOST = (1 << (BITS - 1)) - 1;

struct LargestOrNaN {
    static INLINE float of(float a, float b) { return a > b || a != a ? a : b; }
};

// EACH numbers from x + i; 0 behind the n-th.
template <int WIDTH, int N, class T> INLINE void take_wide(const T* x, int64_t i, int64_t n, float* to) {
    #pragma unroll
    for (int from = 0; from < N; from += WIDTH) {
        Vec<T, WIDTH> v;
        const bool inside = i + from < n;
        if (inside) v = take<WIDTH>(x + i + from);
        #pragma unroll
        for (int c = 0; c < WIDTH; ++c) to[from + c] = inside ? wide(v.at[c]) : 0.0f;
    }
}

template <class T, int WIDTH, int BITS>
__global__ __launch_bounds__(128)
void quantize(const T* x, uint8_t* codes, float* scales, int64_t n, int block, uint32_t blocks) {
    constexpr int N = EACH<WIDTH, BITS>;
    const uint32_t at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= blocks) return;                                                       // a whole warp
    const int64_t begin = int64_t(at) * block, end = begin + block < n ? begin + block : n;
    const int64_t mine = begin + int64_t(threadIdx.x % 32) * N;
    float numbers[N], largest = 0.0f;
    for (int64_t i = mine; i < end; i += 32 * N) {
        take_wide<WIDTH, N>(x, i, n, numbers);
        #pragma unroll
        for (int c = 0; c < N; ++c) largest = LargestOrNaN::of(largest, fabsf(numbers[c]));
    }
    largest = over_warp<LargestOrNaN>(largest);
    float scale = largest * (1.0f / MOST<BITS>);
    if (!(scale < INFINITY_F)) scale = __uint_as_float(0x7fc00000u);
    if (threadIdx.x % 32 == 0) scales[at] = scale;
    for (int64_t i = mine; i < end; i += 32 * N) {
        take_wide<WIDTH, N>(x, i, n, numbers);
        Vec<uint8_t, N * BITS / 8> out = {};
        #pragma unroll
        for (int c = 0; c < N; ++c) {
            float q = scale > 0.0f ? rintf(numbers[c] / scale) : 0.0f;
            q = q > MOST<BITS> ? MOST<BITS> : q < -MOST<BITS> ? -MOST<BITS> : q;
            out.at[c * BITS / 8] |= (int(q) & ((1 << BITS) - 1)) << (c * BITS % 8);
        }
        put(codes + i * BITS / 8, out);
    }
}

template <class T, int WIDTH, int BITS>
__global__ __launch_bounds__(256)
void dequantize(const uint8_t* codes, const float* scales, T* y, int64_t n, int block) {
    constexpr int N = EACH<WIDTH, BITS>;
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (i >= n) return;
    const Vec<uint8_t, N * BITS / 8> in = take<N * BITS / 8>(codes + i * BITS / 8);
    const float scale = scales[i / block];
    #pragma unroll
    for (int from = 0; from < N; from += WIDTH) {
        Vec<T, WIDTH> out;
        #pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            const int bit = (from + c) * BITS, code = in.at[bit / 8] >> bit % 8 & ((1 << BITS) - 1);
            out.at[c] = narrow<T>(float(code > MOST<BITS> ? code - (1 << BITS) : code) * scale);
        }
        if (i + from < n) put(y + i + from, out);
    }
}
