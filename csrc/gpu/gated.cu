// Activations of feed-forward layers and experts that torch computes in several passes, forward and backward.
//
//   SwiGLU         x = [gate; up] [rows, 2f]     y = gate σ(gate) up          σ(a) = 1 / (1 + exp(-a))
//                  d gate = dy up σ (1 + gate (1 - σ))     d up = dy gate σ
//   squared ReLU   x [rows, f]                   y = max(x, 0)²               dx = 2 dy max(x, 0)
//
// In fp32, rounded once; x alone is kept for backward, where σ is computed again.
//
// Launch: a thread has WIDTH neighbours of a row of y, a packet of 16 bytes where f and the addresses allow
// it; blocks of at most 256 threads, one after another over rows and columns.
// Traffic of a number of y, 16 bit: SwiGLU forward 6 bytes, backward 10; squared ReLU 4 and 6.
// Limits: contiguous tensors, WIDTH divides f, fewer than 2^31 vectors in y. float, bf16, fp16.
// 16-bit results hide the error of __expf (2 + |1.16 a| units in the last place of fp32), fp32 ones do not.
// Registers on sm_80 to sm_120: at most 40.
#include "vectors.cuh"

INLINE float sigmoid(float a, float) { return 1.0f / (1.0f + expf(-a)); }
template <class T> INLINE float sigmoid(float a, T) { return __fdividef(1.0f, 1.0f + __expf(-a)); }

// The place of a thread's numbers. first: in y; in: of the gate in x, the other half is f numbers behind it.
struct Place { int64_t first, in; };
template <int WIDTH> INLINE bool find(Place& at, uint32_t vectors, int f) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, row = i / (f / WIDTH);
    at.first = int64_t(i) * WIDTH;
    at.in = at.first + int64_t(row) * f;
    return i < vectors;
}

template <class T, int WIDTH>
__global__ __launch_bounds__(256)
void swiglu_forward(const T* x, T* y, uint32_t vectors, int f) {
    Place at;
    if (!find<WIDTH>(at, vectors, f)) return;
    const Vec<T, WIDTH> gate = take<WIDTH>(x + at.in), up = take<WIDTH>(x + at.in + f);
    Vec<T, WIDTH> out;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const float a = wide(gate.at[k]);
        out.at[k] = narrow<T>(a * sigmoid(a, T()) * wide(up.at[k]));
    }
    put(y + at.first, out);
}

template <class T, int WIDTH>
__global__ __launch_bounds__(256)
void swiglu_backward(const T* x, const T* dy, T* dx, uint32_t vectors, int f) {
    Place at;
    if (!find<WIDTH>(at, vectors, f)) return;
    const Vec<T, WIDTH> gate = take<WIDTH>(x + at.in), up = take<WIDTH>(x + at.in + f);
    const Vec<T, WIDTH> g = take<WIDTH>(dy + at.first);
    Vec<T, WIDTH> dgate, dup;
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const float a = wide(gate.at[k]), d = wide(g.at[k]), s = sigmoid(a, T());
        dgate.at[k] = narrow<T>(d * wide(up.at[k]) * (s * (1.0f + a * (1.0f - s))));
        dup.at[k] = narrow<T>(d * (a * s));                    // a s first: where s is 0, d a may be infinite
    }
    put(dx + at.in, dgate);
    put(dx + at.in + f, dup);
}

INLINE float positive(float a) { return a < 0.0f ? 0.0f : a; }           // NaN stays

template <class T, int WIDTH>
__global__ __launch_bounds__(256)
void squared_relu_forward(const T* x, T* y, uint32_t vectors) {
    Place at;
    if (!find<WIDTH>(at, vectors, WIDTH)) return;
    Vec<T, WIDTH> a = take<WIDTH>(x + at.first);
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const float p = positive(wide(a.at[k]));
        a.at[k] = narrow<T>(p * p);
    }
    put(y + at.first, a);
}

template <class T, int WIDTH>
__global__ __launch_bounds__(256)
void squared_relu_backward(const T* x, const T* dy, T* dx, uint32_t vectors) {
    Place at;
    if (!find<WIDTH>(at, vectors, WIDTH)) return;
    Vec<T, WIDTH> a = take<WIDTH>(x + at.first);
    const Vec<T, WIDTH> g = take<WIDTH>(dy + at.first);
    #pragma unroll
    for (int k = 0; k < WIDTH; ++k) a.at[k] = narrow<T>(2.0f * wide(g.at[k]) * positive(wide(a.at[k])));
    put(dx + at.first, a);
}
