// Attention in fp32 on CPUs with AVX-512 or AVX2, in bf16 with AMX or AVX-512 BF16: softmax(scale q kᵀ) v of the keys that a pattern
// shows, and its gradients. attention_kernel.h has the mathematics of a head; Python plans which units of keys a tile of queries sees.
//
// Instruction sets: the headers below are written for sixteen numbers at a time, and included once for AVX-512 and once for AVX2, in a
// namespace of its own, after the header that says what such a vector is. AMX replaces the products of bf16. The module has a submodule
// for each set.
//
// Bits: an element is the same sum in the same order however the work is divided, on any number of threads.
//
// Memory: that of a thread is part of one piece, which Python allocates: torch counts it so, and plans do.
//
// Limits: types, sizes and strides are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../common/pool.h"

#include "../common/bf16_vectors.h"
#ifdef HAS_BF16_PRODUCTS
#include "attention_memory.h"
#endif

namespace py = pybind11;

#ifdef HAS_BF16_PRODUCTS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
namespace {
namespace avx512 {
#include "attention_avx512.h"
#include "attention_products.h"
#include "attention_amx.h"
#include "attention_kernel.h"
#include "attention_forward.h"
#include "attention_backward.h"
#include "attention_heads.h"
}  // namespace avx512
}  // namespace
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace {
namespace avx2 {
#include "attention_avx2.h"
#include "attention_products.h"
#include "attention_kernel.h"
#include "attention_forward.h"
#include "attention_backward.h"
#include "attention_heads.h"
}  // namespace avx2
}  // namespace
#pragma GCC pop_options
#endif

namespace {

// Instruction sets of this processor for which there are submodules, the fastest first.
std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#ifdef HAS_BF16_PRODUCTS
    if (has_products() && has_tiles()) names.push_back("amx");
    if (has_products()) names.push_back("avx512_bf16");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        names.push_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.push_back("avx2");
#endif
    return names;
}

#ifdef HAS_BF16_PRODUCTS
// This and what else runs without being asked for is compiled for any processor.
template <size_t TENSORS, size_t ARRAYS>
void define(py::module_& module, const std::string& name, OfHeads<TENSORS, ARRAYS> function, const char* text) {
    module.def(
        name.c_str(),
        [=](const Sizes& sizes, const std::array<Place, TENSORS>& tensors, const std::array<uintptr_t, ARRAYS>& of_rows, float scale,
            const std::array<int64_t, 3>& positions, const std::array<uintptr_t, 10>& addresses, uintptr_t memory,
            int threads) { function(sizes, tensors, of_rows, scale, {positions, addresses}, memory, threads); },
        text, py::arg("sizes"), py::arg("tensors"), py::arg("of_rows"), py::arg("scale"), py::arg("positions"),
        py::arg("addresses"), py::arg("memory"), py::arg("threads"));
}

void define_all(py::module_& module, const std::string& dtype, const Functions& functions) {
    define(module, "forward_" + dtype, functions.forward, "Writes out; of rows: lse.");
    define(module, "backward_" + dtype, functions.backward, "Writes dq, dk and dv; of rows: lse and D are read.");
    define(module, "add_gradients_" + dtype, functions.add_gradients, "Adds to dq, dk and dv, which are fp32; of rows as backward.");
    module.def(("dots_" + dtype).c_str(), functions.dots, "Writes D of dout and out.", py::arg("sizes"), py::arg("tensors"),
               py::arg("dots"), py::arg("threads"));
    module.def(("forward_bytes_" + dtype).c_str(), functions.forward_bytes, "Memory of a thread.", py::arg("sizes"));
    module.def(("backward_bytes_" + dtype).c_str(), functions.backward_bytes, "Memory of a thread.", py::arg("sizes"));
}
#endif

}  // namespace

PYBIND11_MODULE(_attention, module) {
    module.doc() = "Attention of tensors given by address; megatron_ds.ops.core_attention is the way in.";
    module.def("instruction_sets", &instruction_sets, "Submodules that run on this processor, the fastest first. Asks the system for AMX.");
#ifdef HAS_BF16_PRODUCTS
    const auto define_set = [&](const char* name, const std::string& dtype, const Functions& functions) {
        py::module_ set = module.def_submodule(name);
        set.attr("has_tiles") = std::string(name) == "amx";
        define_all(set, dtype, functions);
    };
    define_set("amx", "bf16", avx512::FUNCTIONS<TiledBf16>);
    define_set("avx512_bf16", "bf16", avx512::FUNCTIONS<Bf16>);
    define_set("avx512", "fp32", avx512::FUNCTIONS<Fp32>);
    define_set("avx2", "fp32", avx2::FUNCTIONS<Fp32>);
#endif
}
