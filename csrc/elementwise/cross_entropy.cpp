// Softmax of logits in place, and the gradient of the cross entropy in place of the probabilities, on the CPU.
//
//   p = exp(x - max) / sum        lse = max + log sum        g = p factor - everywhere, in the label's column at_label
//
// Memory: a row is read from memory once and written once in each direction; the passes between work on a copy of the row in
// fp32, which fits a core's cache. torch's operations read and write blocks of rows six times.
//
// Work: threads take rows in turn. A row's results depend neither on the number of threads nor on its place. Its sum is of LANES
// partial sums, the same for every instruction set; but bf16 rows have code of their own where the processor has AVX-512 BF16,
// three times as fast and with other roundings (bf16_softmax.h).
//
// Limits: types, sizes, contiguity are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "bf16_softmax.h"
#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

// Sixteen numbers at once, of any address: GNU's vector types, which gcc and clang make of whatever registers there are. Neither
// turns a loop with sixteen maxima into one of vectors.
constexpr int64_t LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

INLINE const Lanes& lanes_at(const float* x) { return *reinterpret_cast<const Lanes*>(x); }

// NaN is not larger than anything, and so may not be the result; it then reaches the sum.
INLINE float largest_of(const float* x, int64_t count) {
    Lanes lanes = Lanes{} - std::numeric_limits<float>::infinity();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lanes = lanes_at(x + i) > lanes ? lanes_at(x + i) : lanes;
    float largest = lanes[0];
    for (int64_t j = 1; j < LANES; ++j) largest = std::max(largest, lanes[j]);
    for (; i < count; ++i) largest = std::max(largest, x[i]);
    return largest;
}

INLINE float sum_of(const float* x, int64_t count) {
    Lanes lanes{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lanes += lanes_at(x + i);
    float sum = 0;
    for (int64_t j = 0; j < LANES; ++j) sum += lanes[j];
    for (; i < count; ++i) sum += x[i];
    return sum;
}

// x becomes exp(x - largest); what is below the smallest normal number becomes 0.
INLINE void exponentials(float* __restrict__ x, float largest, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const float t = (x[i] - largest) * LOG2_E, e = exp2_of(t);
        x[i] = t < -126.0f ? 0.0f : e;
    }
}

INLINE void times(float* __restrict__ x, float factor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

INLINE void scaled_difference(float* __restrict__ x, float factor, float everywhere, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] * factor - everywhere;
}

// Without valid columns: no probability, and the logarithm of no sum.
INLINE Softmax softmax_of_row(float* x, int64_t count, int64_t column) {
    if (count == 0) return {0, -std::numeric_limits<float>::infinity()};
    const float largest = largest_of(x, count);
    exponentials(x, largest, count);
    const float sum = sum_of(x, count);
    times(x, 1 / sum, count);
    return {x[column], largest + std::log(sum)};
}

FOR_EACH_PROCESSOR Softmax softmax_fp32(float* x, int64_t count, int64_t column) { return softmax_of_row(x, count, column); }

FOR_EACH_PROCESSOR Softmax widened_softmax(uint16_t* x, int64_t count, int64_t column, float* wide) {
    widen(x, wide, count);
    const Softmax result = softmax_of_row(wide, count, column);
    narrow(wide, x, count);
    return result;
}

INLINE void gradient_of_row(float* p, int64_t count, const Gradient& row) {
    scaled_difference(p, row.factor, row.everywhere, count);
    if (row.label >= 0) p[row.label] = row.at_label;
}

FOR_EACH_PROCESSOR void gradient_fp32(float* p, int64_t count, const Gradient& row) { gradient_of_row(p, count, row); }

FOR_EACH_PROCESSOR void widened_gradient(uint16_t* p, int64_t count, const Gradient& row, float* wide) {
    widen(p, wide, count);
    gradient_of_row(wide, count, row);
    narrow(wide, p, count);
}

Softmax softmax_bf16(uint16_t* x, int64_t count, int64_t column, float* wide) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products()) return softmax_in_vectors(x, count, column, wide);
#endif
    return widened_softmax(x, count, column, wide);
}

void gradient_bf16(uint16_t* p, int64_t count, const Gradient& row, float* wide) {
#ifdef HAS_BF16_PRODUCTS
    if (has_products()) return gradient_in_vectors(p, count, row);
#endif
    widened_gradient(p, count, row, wide);
}

// -------------------------------------------------------------------------------------------------------------- binding
template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

struct alignas(64) Line {
    float numbers[LANES];
};

// Calls part(row, fp32 memory for a row) for each row.
template <typename Part>
void share(int64_t rows, int64_t width, bool is_bf16, int threads, const Part& part) {
    py::gil_scoped_release released;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        std::vector<Line> wide(is_bf16 ? size_t((width + PAIRED - 1) / PAIRED * (PAIRED / LANES)) : 0);
        for (int64_t row; (row = next.fetch_add(1)) < rows;) part(row, reinterpret_cast<float*>(wide.data()));
    };
    run_on_threads(int(std::min<int64_t>(threads, rows)), job);
}

void softmax(uintptr_t logits, int64_t rows, int64_t width, int64_t valid, uintptr_t column, uintptr_t at_column, uintptr_t lse,
             bool is_bf16, int threads) {
    share(rows, width, is_bf16, threads, [&](int64_t row, float* wide) {
        const int64_t start = row * width, label = at<int64_t>(column)[row];
        const Softmax result = is_bf16 ? softmax_bf16(at<uint16_t>(logits) + start, valid, label, wide)
                                       : softmax_fp32(at<float>(logits) + start, valid, label);
        at<float>(at_column)[row] = result.at_column;
        at<float>(lse)[row] = result.lse;
        const int64_t size = is_bf16 ? sizeof(uint16_t) : sizeof(float);
        std::memset(at<char>(logits) + (start + valid) * size, 0, size_t((width - valid) * size));
    });
}

void gradient(uintptr_t p, int64_t rows, int64_t width, int64_t valid, uintptr_t column, uintptr_t elsewhere, uintptr_t factor,
              uintptr_t everywhere, uintptr_t at_label, bool is_bf16, int threads) {
    share(rows, width, is_bf16, threads, [&](int64_t i, float* wide) {
        const Gradient row{at<float>(factor)[i], at<float>(everywhere)[i], at<float>(at_label)[i],
                           at<bool>(elsewhere)[i] ? -1 : at<int64_t>(column)[i]};
        is_bf16 ? gradient_bf16(at<uint16_t>(p) + i * width, valid, row, wide)
                : gradient_fp32(at<float>(p) + i * width, valid, row);
    });
}

}  // namespace

PYBIND11_MODULE(_cross_entropy, module) {
    module.doc() = "Softmax and its gradient on contiguous fp32 or bf16 rows, given by address; megatron_ds.ops.logits is the way in.";
    module.def("softmax", &softmax, py::arg("logits"), py::arg("rows"), py::arg("width"), py::arg("valid"), py::arg("column"),
               py::arg("at_column"), py::arg("lse"), py::arg("is_bf16"), py::arg("threads"));
    module.def("gradient", &gradient, py::arg("p"), py::arg("rows"), py::arg("width"), py::arg("valid"), py::arg("column"),
               py::arg("elsewhere"), py::arg("factor"), py::arg("everywhere"), py::arg("at_label"), py::arg("is_bf16"),
               py::arg("threads"));
}
