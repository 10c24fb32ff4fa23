// Rotary position embedding of heads that lie together or apart: rotated while they are split into q, k, v,
// and back.
//
//   y[c]        = x[c] cos - x[c + half] sin       c < half, the angle being that of (token, c)
//   y[c + half] = x[c + half] cos + x[c] sin       channels from 2 half on, and all of v: y = x
//
// In fp32, rounded once. The opposite direction (sin with the other sign) is the inverse and the transpose,
// hence backward.
//
// packed [s, b, groups, slots, d]: a group is `queries` heads of q, then, if slots = queries + 2, one of k
// and one of v. TO_PACKED false: packed → q, k, v. true: q, k, v → packed. With slots = queries it rotates
// one tensor, without k and v.
//
// Launch: a block a token, grid (s, b). A thread has the same WIDTH channels, and their partners, of several
// heads: it reads cos and sin once for all of them. A head is (d - half) / WIDTH threads, a block some heads.
// Traffic: each number is read once and written once, 4 bytes if it has 16 bits; tables 8 half bytes a token.
// Limits: d - half <= 512 WIDTH, b <= 65535; strides in elements, that of the last dimension 1; WIDTH divides
// half, d - 2 half, addresses and strides. float, bf16, fp16. Registers on sm_80 to sm_120: at most 56.
#include "vectors.cuh"

template <class T, int WIDTH>
INLINE void turn(const T* from, T* to, int half, const float* cos, const float* sin) {
    const Vec<T, WIDTH> a = take<WIDTH>(from), b = take<WIDTH>(from + half);
    Vec<T, WIDTH> first, second;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        first.at[k] = narrow<T>(wide(a.at[k]) * cos[k] - wide(b.at[k]) * sin[k]);
        second.at[k] = narrow<T>(wide(b.at[k]) * cos[k] + wide(a.at[k]) * sin[k]);
    }
    put(to, first);
    put(to + half, second);
}

template <int WIDTH> INLINE void take_floats(const float* from, float factor, float* to) {
    constexpr int EACH = WIDTH < 4 ? WIDTH : 4;
    #pragma unroll
    for (int i = 0; i < WIDTH; i += EACH) {
        const Vec<float, EACH> x = take<EACH>(from + i);
        #pragma unroll
        for (int j = 0; j < EACH; ++j) to[i + j] = x.at[j] * factor;
    }
}

template <class T, int WIDTH, bool TO_PACKED>
__global__ __launch_bounds__(512)
void rotary(T* packed, T* q, T* k, T* v, const float* cos_table, const float* sin_table,
            int64_t packed_s, int64_t packed_b, int64_t packed_n, int64_t q_s, int64_t q_b, int64_t q_n,
            int64_t k_s, int64_t k_b, int64_t k_n, int64_t v_s, int64_t v_b, int64_t v_n,
            int64_t table_s, int64_t table_b, int groups, int slots, int queries, int d, int half,
            float direction) {
    const int64_t s = blockIdx.x, b = blockIdx.y;
    const int turning = half / WIDTH, units = (d - half) / WIDTH;
    const int unit = threadIdx.x % units, at_once = blockDim.x / units;
    const bool turns = unit < turning;
    const int c = (turns ? unit : unit + turning) * WIDTH;       // behind the turning ones are their partners
    float cos[WIDTH], sin[WIDTH];
    if (turns) {
        take_floats<WIDTH>(cos_table + s * table_s + b * table_b + c, 1.0f, cos);
        take_floats<WIDTH>(sin_table + s * table_s + b * table_b + c, direction, sin);
    }
    for (int head = threadIdx.x / units; head < groups * slots; head += at_once) {
        const int group = head / slots, slot = head - group * slots;
        T* one = slot < queries ? q + s * q_s + b * q_b + (group * queries + slot) * q_n
                 : slot == queries ? k + s * k_s + b * k_b + group * k_n
                                   : v + s * v_s + b * v_b + group * v_n;
        T* other = packed + s * packed_s + b * packed_b + head * packed_n;
        const T* from = (TO_PACKED ? one : other) + c;
        T* to = (TO_PACKED ? other : one) + c;
        if (turns && slot <= queries) {
            turn<T, WIDTH>(from, to, half, cos, sin);
        } else {
            put(to, take<WIDTH>(from));
            if (turns) put(to + half, take<WIDTH>(from + half));
        }
    }
}
