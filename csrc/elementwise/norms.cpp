// LayerNorm and RMSNorm of bf16 numbers on the CPU, with an optional addition before, forward and backward, each in one pass over memory.
//
// Maths, for a row v = x (+ residual) of `width` numbers (Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019,
// arXiv:1910.07467):
//
//   n = (v - mean) r,   r = 1 / sqrt(mean((v - mean)^2) + eps)        y = n w + b        mean = 0 and b = 0 for RMSNorm
//   dw = sum over rows of dy n,   db = of dy,   dv = r (dy w - mean(dy w) - n mean(dy w n)),   the second term for LayerNorm only
//
// Work: chunks of CHUNK rows, which threads take in turn. A row is widened to fp32 in a buffer that stays in the first cache. dw
// and db are summed by chunk, then over the chunks.
//
// The compiler makes each loop for AVX-512, AVX2 and what the system was built for; bf16 on processors with AVX-512 BF16 has loops of
// its own in norms_vectors.h, twice as fast.
//
// Bits: sums over a row are of numbers side by side, which are added at the end; there is no fused multiply-add (the build says
// -ffp-contract=off) but those written out in norms_vectors.h. So results do not depend on the number of threads, and those of a row
// on no other row.
//
// Limits: types, sizes, contiguity are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "norms_vectors.h"
#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

// Numbers side by side; compilers make of it what vectors the processor has.
constexpr int64_t WIDTH = 16, AT_ONCE = 4;
typedef float Lanes __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Half __attribute__((vector_size(WIDTH / 2 * sizeof(float))));
typedef float Quarter __attribute__((vector_size(WIDTH / 4 * sizeof(float))));

template <typename T>
INLINE T read(const float* x) {
    T value;
    std::memcpy(&value, x, sizeof value);
    return value;
}

// The sum of term(T, i) for i in [0, count): T is Lanes, of i and its neighbours, or float.
template <typename Term>
INLINE float sum_of(int64_t count, const Term& term) {
    Lanes sums[AT_ONCE] = {};
    int64_t i = 0;
    for (; i + AT_ONCE * WIDTH <= count; i += AT_ONCE * WIDTH)
        for (int64_t j = 0; j < AT_ONCE; ++j) sums[j] += term(Lanes{}, i + j * WIDTH);
    for (; i + WIDTH <= count; i += WIDTH) sums[0] += term(Lanes{}, i);
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int64_t j = 0; i < count; ++i, ++j) sums[0][j] += term(0.0f, i);
    const auto* lanes = reinterpret_cast<const float*>(&sums[0]);
    const Half half = read<Half>(lanes) + read<Half>(lanes + WIDTH / 2);
    const auto* of_half = reinterpret_cast<const float*>(&half);
    const Quarter quarter = read<Quarter>(of_half) + read<Quarter>(of_half + WIDTH / 4);
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

INLINE void forward_row(const Call& call, int64_t row, float* __restrict__ v, float* __restrict__ other) {
    const int64_t width = call.width, start = row * width;
    widen(call.x + start, v, width);
    if (call.residual) {
        widen(call.residual + start, other, width);
        for (int64_t i = 0; i < width; ++i) v[i] += other[i];
        narrow(v, call.total + start, width);
        widen(call.total + start, v, width);
    }
    const float mean = call.means ? sum_of(width, [&](auto like, int64_t i) { return read<decltype(like)>(v + i); }) / float(width) : 0;
    const float square = sum_of(width, [&](auto like, int64_t i) {
        const auto centred = read<decltype(like)>(v + i) - mean;
        return centred * centred;
    }) / float(width);
    const float r = 1 / std::sqrt(square + call.eps);
    keep_statistics(call, row, mean, r);
    const float *__restrict__ w = call.weight, *__restrict__ b = call.bias;
    if (b)
        for (int64_t i = 0; i < width; ++i) v[i] = (v[i] - mean) * r * w[i] + b[i];
    else
        for (int64_t i = 0; i < width; ++i) v[i] = (v[i] - mean) * r * w[i];
    narrow(v, call.y + start, width);
}

INLINE void backward_row(const Call& call, int64_t row, float* __restrict__ n, float* __restrict__ g, float* __restrict__ dw,
                         float* __restrict__ db) {
    const int64_t width = call.width, start = row * width;
    const float mean = mean_of(call, row), r = call.inverses[row];
    const float* __restrict__ w = call.weight;
    widen(call.x + start, n, width);
    widen(call.dy + start, g, width);
    for (int64_t i = 0; i < width; ++i) {
        n[i] = (n[i] - mean) * r;
        dw[i] += g[i] * n[i];
        db[i] += g[i];
        g[i] *= w[i];
    }
    const float of_g = call.means ? sum_of(width, [&](auto like, int64_t i) { return read<decltype(like)>(g + i); }) / float(width) : 0;
    const float of_gn = sum_of(width, [&](auto like, int64_t i) {
        return read<decltype(like)>(g + i) * read<decltype(like)>(n + i);
    }) / float(width);
    for (int64_t i = 0; i < width; ++i) g[i] = r * (g[i] - of_g - n[i] * of_gn);
    if (call.past) {
        widen(call.past + start, n, width);
        for (int64_t i = 0; i < width; ++i) g[i] += n[i];
    }
    narrow(g, call.dx + start, width);
}

FOR_EACH_PROCESSOR void forward_in_loops(const Call& call, int64_t first, int64_t last, float* buffers) {
    for (int64_t row = first; row < last; ++row) forward_row(call, row, buffers, buffers + call.width);
}

FOR_EACH_PROCESSOR void backward_in_loops(const Call& call, int64_t first, int64_t last, float* buffers) {
    float* sums = sums_of(call, first);
    std::fill(sums, sums + 2 * call.width, 0.0f);
    for (int64_t row = first; row < last; ++row)
        backward_row(call, row, buffers, buffers + call.width, sums, sums + call.width);
}

void forward(const Call& call, int64_t first, int64_t last, float* buffers) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products() && has_whole_registers(call)) return forward_in_vectors(call, first, last, buffers);
#endif
    forward_in_loops(call, first, last, buffers);
}

void backward(const Call& call, int64_t first, int64_t last, float* buffers) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products() && has_whole_registers(call)) return backward_in_vectors(call, first, last, buffers);
#endif
    backward_in_loops(call, first, last, buffers);
}

// -------------------------------------------------------------------------------------------------------------- binding
using Rows = void (*)(const Call&, int64_t, int64_t, float*);

void in_chunks(const Call& call, Rows rows, int threads) {
    const int64_t chunks = (call.rows + CHUNK - 1) / CHUNK;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        std::vector<float> buffers(size_t(BUFFERS * call.width));
        for (int64_t i; (i = next.fetch_add(1)) < chunks;)
            rows(call, i * CHUNK, std::min(call.rows, (i + 1) * CHUNK), buffers.data());
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void run_forward(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t y, uintptr_t total, uintptr_t means,
                 uintptr_t inverses, int64_t rows, int64_t width, float eps, int threads) {
    py::gil_scoped_release released;
    Call call{};
    call.x = at<uint16_t>(x), call.residual = at<uint16_t>(residual), call.y = at<uint16_t>(y), call.total = at<uint16_t>(total);
    call.weight = at<float>(weight), call.bias = at<float>(bias), call.means = at<float>(means), call.inverses = at<float>(inverses);
    call.rows = rows, call.width = width, call.eps = eps;
    in_chunks(call, forward, threads);
}

void run_backward(uintptr_t dy, uintptr_t past, uintptr_t x, uintptr_t weight, uintptr_t means, uintptr_t inverses, uintptr_t dx,
                  uintptr_t sums, int64_t rows, int64_t width, int threads) {
    py::gil_scoped_release released;
    Call call{};
    call.dy = at<uint16_t>(dy), call.past = at<uint16_t>(past), call.x = at<uint16_t>(x), call.dx = at<uint16_t>(dx);
    call.weight = at<float>(weight), call.means = at<float>(means), call.inverses = at<float>(inverses), call.sums = at<float>(sums);
    call.rows = rows, call.width = width;
    in_chunks(call, backward, threads);
    const int64_t chunks = (rows + CHUNK - 1) / CHUNK;                  // the first one becomes the sum
    for (int64_t i = 1; i < chunks; ++i)
        for (int64_t j = 0; j < 2 * width; ++j) call.sums[j] += call.sums[2 * width * i + j];
}

}  // namespace

PYBIND11_MODULE(_norms, module) {
    module.doc() = "LayerNorm and RMSNorm of contiguous bf16 rows, given by address; megatron_ds.ops.norms is the way in.";
    module.attr("CHUNK") = CHUNK;
    module.def("forward", &run_forward, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("bias"), py::arg("y"),
               py::arg("total"), py::arg("means"), py::arg("inverses"), py::arg("rows"), py::arg("width"), py::arg("eps"),
               py::arg("threads"));
    module.def("backward", &run_backward, py::arg("dy"), py::arg("past"), py::arg("x"), py::arg("weight"), py::arg("means"),
               py::arg("inverses"), py::arg("dx"), py::arg("sums"), py::arg("rows"), py::arg("width"), py::arg("threads"));
}
