// AdamW over rows of flat tensors, with unscaling, clipping, rounding to 16 bits and skipping, in one pass.
//
// Per element (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; megatron_ds/ops/adam.py in torch):
//
//   g = grad * grad_scale      m = m + (g - m) * (1 - beta1)      v = v * beta2 + (g * g) * (1 - beta2)
//   p = p * (1 - lr * weight_decay) - m / (sqrt(v) / sqrt(1 - beta2^t) + eps) * lr / (1 - beta1^t)
//   low = p rounded to 16 bits                  optional: the weight that the model computes with
//
// Bits: each product, sum, quotient and root is rounded by itself (__f.._rn is never contracted to a fused
// multiply-add), so that results equal those of csrc/optimizers/cpu_adam.cpp and of the torch reference, and do not
// depend on cuts of a buffer. Subnormal numbers are kept: not to be compiled with -ftz=true.
//
// Numbers that the GPU computed are read here, so that the host need not wait for them: `divisor`, loss scale
// and clipping (1 / divisor is another factor of grad_scale), and `skip` (not 0: nothing is updated). Null: 1
// and 0.
//
// Launch: one for all rows of a parameter group. A block has `chunk` elements of one row, a multiple of four;
// it finds the row by bisection in the table, [rows, 7] of int64: addresses of p, grad, m, v, low, from `base`,
// which is null or a tensor that has them all; elements; number of the row's first chunk. Access by four
// elements where all addresses of a row are multiples of four, else one by one; likewise what is left behind the
// last four.
// Traffic: reads p g m v, writes p m v, 28 bytes an element, and 2 for low; with a 16-bit gradient 2 fewer.
// G: of gradients, float, bf16, fp16. L: of low, bf16, fp16, or float if there is none. Registers on sm_80 to
// sm_120: at most 64.
#include "vectors.cuh"

constexpr int ADAM_THREADS = 256, ADAM_COLUMNS = 7;

struct Rates {
    float one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, step_size, grad_scale;
};

INLINE void update(const Rates& r, float& p, float grad, float& m, float& v) {
    const float g = __fmul_rn(grad, r.grad_scale);
    m = __fadd_rn(m, __fmul_rn(__fsub_rn(g, m), r.one_minus_beta1));
    v = __fadd_rn(__fmul_rn(v, r.beta2), __fmul_rn(__fmul_rn(g, g), r.one_minus_beta2));
    const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), r.root_scale), r.eps);
    p = __fsub_rn(__fmul_rn(p, r.decay), __fmul_rn(__fdiv_rn(m, denominator), r.step_size));
}

template <class G, class L, int WIDTH>
INLINE void update_at(const Rates& r, float* p, const G* g, float* m, float* v, L* low, int64_t i) {
    Vec<float, WIDTH> ps = take<WIDTH>(p + i), ms = take<WIDTH>(m + i), vs = take<WIDTH>(v + i);
    const Vec<G, WIDTH> gs = take<WIDTH>(g + i);
    Vec<L, WIDTH> lows;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        update(r, ps.at[k], wide(gs.at[k]), ms.at[k], vs.at[k]);
        lows.at[k] = narrow<L>(ps.at[k]);
    }
    put(p + i, ps);
    put(m + i, ms);
    put(v + i, vs);
    if (sizeof(L) == 2) put(low + i, lows);
}

// The last row whose first chunk is not behind this block's.
INLINE const int64_t* find_row(const int64_t* table, int rows) {
    int low = 0;
    for (int high = rows; high - low > 1;) {
        const int middle = (low + high) / 2;
        (table[middle * ADAM_COLUMNS + 6] <= blockIdx.x ? low : high) = middle;
    }
    return table + low * ADAM_COLUMNS;
}

template <class T> INLINE bool of_fours(const T* p) {
    return reinterpret_cast<uint64_t>(p) % (4 * sizeof(T)) == 0;
}

template <class G, class L>
__global__ __launch_bounds__(ADAM_THREADS)
void adamw(const int64_t* table, char* base, int rows, int chunk, float one_minus_beta1, float beta2,
           float one_minus_beta2, float root_scale, float eps, float decay, float step_size, float grad_scale,
           const float* divisor, const float* skip) {
    if (skip && *skip != 0.0f) return;
    const Rates r = {one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, step_size,
                     divisor ? __fmul_rn(grad_scale, __fdiv_rn(1.0f, *divisor)) : grad_scale};
    const int64_t* row = find_row(table, rows);
    // By addition to an argument: of a cast integer the compiler does not know that it is in global memory.
    float *p = reinterpret_cast<float*>(base + row[0]), *m = reinterpret_cast<float*>(base + row[2]);
    float* v = reinterpret_cast<float*>(base + row[3]);
    const G* g = reinterpret_cast<const G*>(base + row[1]);
    L* low = reinterpret_cast<L*>(base + row[4]);
    const int64_t start = (int64_t(blockIdx.x) - row[6]) * chunk;
    const int64_t stop = row[5] - start < chunk ? row[5] : start + chunk;
    const bool aligned = of_fours(p) && of_fours(g) && of_fours(m) && of_fours(v) && of_fours(low);
    const int64_t fours = aligned ? start + (stop - start) / 4 * 4 : start;
    for (int64_t i = start + threadIdx.x * 4; i < fours; i += ADAM_THREADS * 4)
        update_at<G, L, 4>(r, p, g, m, v, low, i);
    for (int64_t i = fours + threadIdx.x; i < stop; i += ADAM_THREADS)
        update_at<G, L, 1>(r, p, g, m, v, low, i);
}
