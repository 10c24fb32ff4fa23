// GELU with tanh on the CPU, forward and backward, in one pass over memory.
//
// Maths (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2), c = sqrt(2/pi), k = 0.044715, 0.5 (1 + tanh u) = 1 / (1 + e^-2u):
//
//   e = exp(-2 c x (1 + k x^2))       s = 1 / (1 + e)
//   y = x / (1 + e)                   dx = dy (s + x e s^2 2c (1 + 3 k x^2))            1 - s = e s: no cancellation
//
// One exponential and one quotient: torch's kernel, with a tanh, takes three times as long.
//
// Work: chunks of CHUNK elements, which threads take in turn. The compiler makes each loop for AVX-512, AVX2 and what the system was
// built for; 16-bit numbers are widened and rounded block by block, so that each loop has elements of one size. bf16 on processors
// with AVX-512 BF16 has a loop of its own in gelu_vectors.h, almost three times as fast.
//
// Bits: no fused multiply-add (the build says -ffp-contract=off) but those written out in gelu_vectors.h, so an element's result does
// not depend on where it lies.
//
// Limits: types, sizes, contiguity are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "gelu_vectors.h"
#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t CHUNK = 1 << 15, BLOCK = 1024;
constexpr float FAR = 16;      // from here on y is x or 0, and its slope 1 or 0, to every digit; powers of x must not overflow

INLINE float exponential(float x) { return exp2_of(-2 * C * LOG2_E * x * (1 + K * x * x)); }

// NaN stays NaN: every comparison with it is false.
INLINE float at_least(float x, float least) { return x < least ? least : x; }
INLINE float at_most(float x, float most) { return x > most ? most : x; }

INLINE void forward(const float* __restrict__ x, float* __restrict__ y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float above = at_least(x[i], -FAR);
        y[i] = above / (1 + exponential(at_most(above, FAR)));
    }
}

INLINE void backward(const float* __restrict__ x, const float* __restrict__ dy, float* __restrict__ dx, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float near = at_most(at_least(x[i], -FAR), FAR), e = exponential(near), s = 1 / (1 + e);
        dx[i] = dy[i] * (s + e * s * s * (2 * C * near * (1 + 3 * K * near * near)));
    }
}

FOR_EACH_PROCESSOR void forward_fp32(const float* x, float* y, int64_t count) { forward(x, y, count); }

FOR_EACH_PROCESSOR void backward_fp32(const float* x, const float* dy, float* dx, int64_t count) { backward(x, dy, dx, count); }

FOR_EACH_PROCESSOR void forward_in_blocks(const uint16_t* x, uint16_t* y, int64_t count) {
    float wide_x[BLOCK], wide_y[BLOCK];
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t n = std::min(BLOCK, count - i);
        widen(x + i, wide_x, n);
        forward(wide_x, wide_y, n);
        narrow(wide_y, y + i, n);
    }
}

FOR_EACH_PROCESSOR void backward_in_blocks(const uint16_t* x, const uint16_t* dy, uint16_t* dx, int64_t count) {
    float wide_x[BLOCK], wide_dy[BLOCK], wide_dx[BLOCK];
    for (int64_t i = 0; i < count; i += BLOCK) {
        const int64_t n = std::min(BLOCK, count - i);
        widen(x + i, wide_x, n);
        widen(dy + i, wide_dy, n);
        backward(wide_x, wide_dy, wide_dx, n);
        narrow(wide_dx, dx + i, n);
    }
}

void forward_bf16(const uint16_t* x, uint16_t* y, int64_t count) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products()) return forward_in_vectors(x, y, count);
#endif
    forward_in_blocks(x, y, count);
}

void backward_bf16(const uint16_t* x, const uint16_t* dy, uint16_t* dx, int64_t count) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products()) return backward_in_vectors(x, dy, dx, count);
#endif
    backward_in_blocks(x, dy, dx, count);
}

// -------------------------------------------------------------------------------------------------------------- binding
template <typename Part>
void share(int64_t count, int threads, const Part& part) {
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;)
            part(chunk * CHUNK, std::min(CHUNK, count - chunk * CHUNK));
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void run_forward(uintptr_t x, uintptr_t y, int64_t count, bool is_bf16, int threads) {
    py::gil_scoped_release released;
    share(count, threads, [&](int64_t start, int64_t n) {
        is_bf16 ? forward_bf16(at<uint16_t>(x) + start, at<uint16_t>(y) + start, n)
                : forward_fp32(at<float>(x) + start, at<float>(y) + start, n);
    });
}

void run_backward(uintptr_t x, uintptr_t dy, uintptr_t dx, int64_t count, bool is_bf16, int threads) {
    py::gil_scoped_release released;
    share(count, threads, [&](int64_t start, int64_t n) {
        is_bf16 ? backward_bf16(at<uint16_t>(x) + start, at<uint16_t>(dy) + start, at<uint16_t>(dx) + start, n)
                : backward_fp32(at<float>(x) + start, at<float>(dy) + start, at<float>(dx) + start, n);
    });
}

}  // namespace

PYBIND11_MODULE(_gelu, module) {
    module.doc() = "GELU with tanh on contiguous fp32 or bf16 arrays, given by address; megatron_ds.ops.activation is the way in.";
    module.def("forward", &run_forward, py::arg("x"), py::arg("y"), py::arg("count"), py::arg("is_bf16"), py::arg("threads"));
    module.def("backward", &run_backward, py::arg("x"), py::arg("dy"), py::arg("dx"), py::arg("count"), py::arg("is_bf16"),
               py::arg("threads"));
}
