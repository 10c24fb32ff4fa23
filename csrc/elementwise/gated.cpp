// SwiGLU on the CPU, forward and backward, in one pass over memory.
//
// Maths (Shazeer 2020, arXiv:2002.05202, equation 6), for a row [gate; up] of 2 width numbers:
//
//   e = exp(-gate)      s = 1 / (1 + e)      y = gate s up
//   d_gate = dy up s (1 + gate e s)          d_up = dy gate s                1 - s = e s: no cancellation
//
// Work: chunks of whole rows, which threads take in turn. The compiler makes each loop for AVX-512, AVX2 and what the system was
// built for; bf16 numbers are widened and rounded block by block.
//
// Bits: no fused multiply-add (the build says -ffp-contract=off), so an element's result does not depend on where it lies. Results
// in fp32 differ from torch's, whose exponential is another one, by a few roundings; bf16 is rounded once, not after the gate.
//
// Limits: types, sizes, contiguity are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>

#include <atomic>

#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t CHUNK = 1 << 15, BLOCK = 1024;
constexpr float FAR = 87;      // from here on s is 0 or 1 to every digit; e is below 2^126

// NaN stays NaN: every comparison with it is false.
INLINE float at_least(float x, float least) { return x < least ? least : x; }
INLINE float at_most(float x, float most) { return x > most ? most : x; }

INLINE void forward(const float* __restrict__ gate, const float* __restrict__ up, float* __restrict__ y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float above = at_least(gate[i], -FAR);
        y[i] = above / (1 + exp2_of(-LOG2_E * at_most(above, FAR))) * up[i];
    }
}

INLINE void backward(const float* __restrict__ gate, const float* __restrict__ up, const float* __restrict__ dy,
                     float* __restrict__ d_gate, float* __restrict__ d_up, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float above = at_least(gate[i], -FAR), near = at_most(above, FAR);
        const float e = exp2_of(-LOG2_E * near), s = 1 / (1 + e);
        d_gate[i] = dy[i] * up[i] * (s * (1 + near * (e * s)));
        d_up[i] = dy[i] * (above * s);
    }
}

// What a call works on: rows of [gate; up], and their results or gradients. T is float or, for bf16, uint16_t.
template <typename T>
struct Call {
    const T *x, *dy;
    T* out;                 // y [rows, width], or dx as x
    int64_t rows, width;
};

FOR_EACH_PROCESSOR void forward_rows(const Call<float>& call, int64_t first, int64_t last) {
    const int64_t width = call.width;
    for (int64_t row = first; row < last; ++row) {
        const float* x = call.x + 2 * row * width;
        forward(x, x + width, call.out + row * width, width);
    }
}

FOR_EACH_PROCESSOR void backward_rows(const Call<float>& call, int64_t first, int64_t last) {
    const int64_t width = call.width;
    for (int64_t row = first; row < last; ++row) {
        const float* x = call.x + 2 * row * width;
        float* dx = call.out + 2 * row * width;
        backward(x, x + width, call.dy + row * width, dx, dx + width, width);
    }
}

FOR_EACH_PROCESSOR void forward_bf16_rows(const Call<uint16_t>& call, int64_t first, int64_t last) {
    float gate[BLOCK], up[BLOCK], y[BLOCK];
    const int64_t width = call.width;
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < width; i += BLOCK) {
            const int64_t n = std::min(BLOCK, width - i);
            const uint16_t* x = call.x + 2 * row * width + i;
            widen(x, gate, n);
            widen(x + width, up, n);
            forward(gate, up, y, n);
            narrow(y, call.out + row * width + i, n);
        }
}

FOR_EACH_PROCESSOR void backward_bf16_rows(const Call<uint16_t>& call, int64_t first, int64_t last) {
    float gate[BLOCK], up[BLOCK], dy[BLOCK], d_gate[BLOCK], d_up[BLOCK];
    const int64_t width = call.width;
    for (int64_t row = first; row < last; ++row)
        for (int64_t i = 0; i < width; i += BLOCK) {
            const int64_t n = std::min(BLOCK, width - i), start = 2 * row * width + i;
            widen(call.x + start, gate, n);
            widen(call.x + start + width, up, n);
            widen(call.dy + row * width + i, dy, n);
            backward(gate, up, dy, d_gate, d_up, n);
            narrow(d_gate, call.out + start, n);
            narrow(d_up, call.out + start + width, n);
        }
}

// -------------------------------------------------------------------------------------------------------------- binding
template <typename T>
void in_chunks(const Call<T>& call, void (*rows)(const Call<T>&, int64_t, int64_t), int threads) {
    const int64_t size = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, call.width));
    const int64_t chunks = (call.rows + size - 1) / size;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < chunks;) rows(call, i * size, std::min(call.rows, (i + 1) * size));
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

template <typename T>
Call<T> call_of(uintptr_t x, uintptr_t dy, uintptr_t out, int64_t rows, int64_t width) {
    return {reinterpret_cast<const T*>(x), reinterpret_cast<const T*>(dy), reinterpret_cast<T*>(out), rows, width};
}

void run_forward(uintptr_t x, uintptr_t y, int64_t rows, int64_t width, bool is_bf16, int threads) {
    py::gil_scoped_release released;
    is_bf16 ? in_chunks(call_of<uint16_t>(x, 0, y, rows, width), forward_bf16_rows, threads)
            : in_chunks(call_of<float>(x, 0, y, rows, width), forward_rows, threads);
}

void run_backward(uintptr_t x, uintptr_t dy, uintptr_t dx, int64_t rows, int64_t width, bool is_bf16, int threads) {
    py::gil_scoped_release released;
    is_bf16 ? in_chunks(call_of<uint16_t>(x, dy, dx, rows, width), backward_bf16_rows, threads)
            : in_chunks(call_of<float>(x, dy, dx, rows, width), backward_rows, threads);
}

}  // namespace

PYBIND11_MODULE(_gated, module) {
    module.doc() = "SwiGLU of contiguous fp32 or bf16 rows, given by address; megatron_ds.ops.activation is the way in.";
    module.def("forward", &run_forward, py::arg("x"), py::arg("y"), py::arg("rows"), py::arg("width"), py::arg("is_bf16"),
               py::arg("threads"));
    module.def("backward", &run_backward, py::arg("x"), py::arg("dy"), py::arg("dx"), py::arg("rows"), py::arg("width"),
               py::arg("is_bf16"), py::arg("threads"));
}
