// Adds bf16 numbers to fp32 sums in one pass over memory: 10 bytes an element. torch's operation widens them into a new tensor
// first, which is 22 bytes and pages of memory that are new to the process.
//
// Work: chunks of CHUNK elements, which threads take in turn. Bits: one addition for each element, as torch's.
//
// Limits: types, sizes, contiguity are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>

#include <atomic>

#include "../common/pool.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t CHUNK = 1 << 15;

FOR_EACH_PROCESSOR void add_bf16(const uint16_t* __restrict__ x, float* __restrict__ sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] += float_of(uint32_t(x[i]) << 16);
}

void add(uintptr_t x, uintptr_t sums, int64_t count, int threads) {
    py::gil_scoped_release released;
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;) {
            const int64_t start = chunk * CHUNK;
            add_bf16(reinterpret_cast<const uint16_t*>(x) + start, reinterpret_cast<float*>(sums) + start,
                     std::min(CHUNK, count - start));
        }
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

}  // namespace

PYBIND11_MODULE(_accumulate, module) {
    module.doc() = "Sums of contiguous bf16 arrays in fp32, given by address; megatron_ds.ops.product is the way in.";
    module.def("add", &add, py::arg("x"), py::arg("sums"), py::arg("count"), py::arg("threads"));
}
