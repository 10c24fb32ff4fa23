// AdamW, Lion and Adagrad over flat fp32 shards on the CPU, in one pass over memory.
//
// Maths, per element, with g = grad * grad_scale       unscaling and clipping, one factor; grad itself is not written
//
// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; megatron_ds/ops/adam.py has it in torch):
//
//   m = m + (g - m) * (1 - beta1)
//   v = v * beta2 + (g * g) * (1 - beta2)
//   p = p * (1 - lr * weight_decay) - m / (sqrt(v) / sqrt(1 - beta2^t) + eps) * lr / (1 - beta1^t)
//
// Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2) and Adagrad (Duchi et al. 2011, with weight decay in the gradient;
// megatron_ds/extensions/optimizers/elementwise_updates.py has both in torch). m is their one tensor of state, v is not touched:
//
//   p = p * (1 - lr * weight_decay) - lr * sign(m + (g - m) * (1 - beta1));   m = m + (g - m) * (1 - beta2)
//   g = g + p * weight_decay;   m = m + g * g;   p = p - g / (sqrt(m) + eps) * lr
//
// Then, optionally:
//
//   low = p rounded to bf16 or fp16, nearest even      the weight that the model computes with
//
// Traffic of AdamW: reads p g m v, writes p m v, 28 bytes per element, and 2 more for low. Prefetching by hand and stores past the cache
// (low, or all of them) were measured and gain nothing; large pages under the arrays gain a fifth (host/large_pages.py).
//
// Work: rows (tensors) are cut into chunks, which threads take in turn, the caller among them. Two threads that work within a
// megabyte of each other, on large pages, slow each other down (memory banks, presumably): chunks of 64 Ki elements ran at
// 0.95 to 0.97 of torch's speed on two threads of an AVX2 machine, of 256 Ki at 1.03. Less where threads would be idle.
//
// Bits: each product, sum, quotient and root is rounded by itself, no fused multiply-add (the build says -ffp-contract=off),
// so AVX-512, AVX2, the scalar code and its tail, and the torch reference give the same bits. Where a buffer is cut, by
// chunks, rows or ranks, cannot be seen in the result.
//
// Limits: sizes, types, contiguity are checked in Python, which knows tensors; here only what could crash the process.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/pool.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t LEAST_CHUNK = 1 << 16, MOST_CHUNK = 1 << 18;     // elements: 1 and 4 MiB of p, g, m and v; some 50 and 200 µs
constexpr int64_t CHUNKS_PER_THREAD = 8;

int64_t chunk_for(int64_t elements, int threads) {
    return std::clamp(elements / (CHUNKS_PER_THREAD * std::max(threads, 1)) / 64 * 64, LEAST_CHUNK, MOST_CHUNK);
}

enum class Low { none = 0, bf16 = 1, fp16 = 2 };
enum class Rule { adamw = 0, lion = 1, adagrad = 2 };

// What one element needs besides itself, rounded once to fp32.
struct Rates {
    float grad_scale, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, step_size;
};

struct Hyper {
    Rule rule;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;

    Rates at_step(int64_t t) const {
        if (rule == Rule::lion)
            return {float(grad_scale), float(1 - beta1), 0, float(1 - beta2), 0, 0, float(1 - lr * weight_decay), float(lr)};
        if (rule == Rule::adagrad)
            return {float(grad_scale), 0, 0, 0, 0, float(eps), float(weight_decay), float(lr)};
        const double correction1 = 1 - std::pow(beta1, double(t)), correction2 = 1 - std::pow(beta2, double(t));
        return {float(grad_scale), float(1 - beta1), float(beta2), float(1 - beta2), float(1 / std::sqrt(correction2)),
                float(eps), float(1 - lr * weight_decay), float(lr / correction1)};
    }
};

struct Span {
    float* p;
    const float* g;
    float *m, *v;
    uint16_t* low;
    int64_t count;

    Span from(int64_t start) const { return part(start, count); }
    Span part(int64_t start, int64_t stop) const {
        return {p + start, g + start, m + start, v + start, low ? low + start : nullptr, stop - start};
    }
};

using Update = void (*)(const Rates&, const Span&);

struct Variant {
    const char* name;
    Update update[3][3];      // by Rule and Low
};

#define BY_LOW(set, rule) {set::update<rule, Low::none>, set::update<rule, Low::bf16>, set::update<rule, Low::fp16>}
#define ALL_UPDATES(set) {BY_LOW(set, Rule::adamw), BY_LOW(set, Rule::lion), BY_LOW(set, Rule::adagrad)}

// ------------------------------------------------------------------------------------------------------------- scalar
namespace scalar {

inline uint16_t to_fp16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return uint16_t(sign | 0x7e00 | (size >> 13 & 0x3ff));   // NaN, kept quiet
    if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);                         // from 65520 on: infinity
    if (size < 0x38800000) {
        // Below 2^-14, subnormal: adding 0.5 leaves multiples of 2^-24 in the last bits, rounded by the addition itself.
        return uint16_t(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    }
    return uint16_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

template <Low kind>
inline uint16_t to_low(float x) { return kind == Low::bf16 ? to_bf16(x) : to_fp16(x); }

template <Rule rule>
inline float updated(const Rates& r, float p, float g, float& m, float& v) {
    if constexpr (rule == Rule::adamw) {
        m = m + (g - m) * r.one_minus_beta1;
        v = v * r.beta2 + g * g * r.one_minus_beta2;
        return p * r.decay - m / (std::sqrt(v) * r.root_scale + r.eps) * r.step_size;
    } else if constexpr (rule == Rule::lion) {
        const float change = g - m, direction = m + change * r.one_minus_beta1;
        m = m + change * r.one_minus_beta2;
        return p * r.decay - (direction > 0 ? r.step_size : direction < 0 ? -r.step_size : 0.0f);
    } else {
        const float decayed = g + p * r.decay;
        m = m + decayed * decayed;
        return p - decayed / (std::sqrt(m) + r.eps) * r.step_size;
    }
}

template <Rule rule, Low kind>
void update(const Rates& r, const Span& s) {
    for (int64_t i = 0; i < s.count; ++i) {
        float m = s.m[i], v = s.v[i];
        const float p = updated<rule>(r, s.p[i], s.g[i] * r.grad_scale, m, v);
        s.m[i] = m;
        if constexpr (rule == Rule::adamw) s.v[i] = v;
        s.p[i] = p;
        if constexpr (kind != Low::none) s.low[i] = to_low<kind>(p);
    }
}

}  // namespace scalar

#ifdef HAS_X86_VECTORS
// ------------------------------------------------------------------------------------------------------------- AVX-512
namespace avx512 {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
constexpr int64_t WIDTH = 16;
using Vector = __m512;

TARGET inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
TARGET inline void store(float* x, Vector a) { _mm512_storeu_ps(x, a); }
TARGET inline Vector splat(float x) { return _mm512_set1_ps(x); }
TARGET inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
TARGET inline Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
TARGET inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
TARGET inline Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
TARGET inline Vector root(Vector a) { return _mm512_sqrt_ps(a); }
TARGET inline Vector with_sign(Vector size, Vector x) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
    const __mmask16 nonzero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return _mm512_castsi512_ps(_mm512_maskz_or_epi32(nonzero, sign, _mm512_castps_si512(size)));
}

// Not vcvtneps2bf16: it takes subnormal numbers for zero.
TARGET inline __m256i to_bf16(Vector x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, nan, quiet), 16));
}

template <Low kind>
TARGET inline __m512i to_low(Vector a, Vector b) {
    if constexpr (kind == Low::bf16)
        return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(a)), to_bf16(b), 1);
    else
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)),
                                  _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), 1);
}

template <Low kind>
TARGET inline void store_low(uint16_t* x, Vector a, Vector b) { _mm512_storeu_si512(x, to_low<kind>(a, b)); }

#include "cpu_adam_kernel.h"
#undef TARGET

}  // namespace avx512

// ---------------------------------------------------------------------------------------------------------------- AVX2
namespace avx2 {

#define TARGET __attribute__((target("avx2,f16c")))
constexpr int64_t WIDTH = 8;
using Vector = __m256;

TARGET inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
TARGET inline void store(float* x, Vector a) { _mm256_storeu_ps(x, a); }
TARGET inline Vector splat(float x) { return _mm256_set1_ps(x); }
TARGET inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
TARGET inline Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
TARGET inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
TARGET inline Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
TARGET inline Vector root(Vector a) { return _mm256_sqrt_ps(a); }
TARGET inline Vector with_sign(Vector size, Vector x) {
    const Vector sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_and_ps(_mm256_or_ps(size, sign), _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}

TARGET inline __m256i to_bf16_in_words(Vector x) {      // 32-bit words, high halves zero
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, nan), 16);
}

template <Low kind>
TARGET inline __m256i to_low(Vector a, Vector b) {
    if constexpr (kind == Low::bf16) {
        const __m256i packed = _mm256_packus_epi32(to_bf16_in_words(a), to_bf16_in_words(b));      // a0 b0 a1 b1
        return _mm256_permute4x64_epi64(packed, 0b11011000);                                       // a0 a1 b0 b1
    } else {
        return _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT),
                                _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    }
}

template <Low kind>
TARGET inline void store_low(uint16_t* x, Vector a, Vector b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), to_low<kind>(a, b));
}

#include "cpu_adam_kernel.h"
#undef TARGET

}  // namespace avx2
#endif  // HAS_X86_VECTORS

// Those that this processor can run, fastest first.
const std::vector<Variant>& variants() {
    static const std::vector<Variant> available = [] {
        std::vector<Variant> list;
#ifdef HAS_X86_VECTORS
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq"))
            list.push_back({"avx512", ALL_UPDATES(avx512)});
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
            list.push_back({"avx2", ALL_UPDATES(avx2)});
#endif
        list.push_back({"scalar", ALL_UPDATES(scalar)});
        return list;
    }();
    return available;
}

// -------------------------------------------------------------------------------------------------------------- binding
struct Row {
    Span span;
    Rates rates;
    Update update;
};

constexpr int COLUMNS = 8;      // p, g, m, v, low: addresses; kind of low; count; step, from 1

Row make_row(const int64_t* x, const Hyper& hyper, const Variant& variant) {
    const auto address = [&](int column) { return reinterpret_cast<void*>(static_cast<uintptr_t>(x[column])); };
    const bool has_low = x[5] != 0;
    if (!x[0] || !x[1] || !x[2] || !x[3] || x[5] < 0 || x[5] > 2 || (x[4] != 0) != has_low || x[6] < 0 || x[7] < 1)
        throw std::invalid_argument("a row is (p, g, m, v, low: addresses, kind of low: 0 none, 1 bf16, 2 fp16, count, step)");
    return {{static_cast<float*>(address(0)), static_cast<const float*>(address(1)), static_cast<float*>(address(2)),
             static_cast<float*>(address(3)), static_cast<uint16_t*>(address(4)), x[6]},
            hyper.at_step(x[7]), variant.update[int(hyper.rule)][x[5]]};
}

const Variant& variant_named(const std::string& name) {
    for (const Variant& v : variants())
        if (name.empty() || name == v.name) return v;
    throw std::invalid_argument("this processor has no variant '" + name + "'");
}

void update_all(const py::array_t<int64_t, py::array::c_style>& table, const Hyper& hyper, int threads, const std::string& name) {
    if (table.ndim() != 2 || table.shape(1) != COLUMNS) throw std::invalid_argument("rows have 8 columns");
    const Variant& variant = variant_named(name);
    std::vector<Row> rows;
    int64_t elements = 0;
    for (py::ssize_t i = 0; i < table.shape(0); ++i) {
        rows.push_back(make_row(table.data(i, 0), hyper, variant));
        elements += rows.back().span.count;
    }
    const int64_t size = chunk_for(elements, threads);
    std::vector<int64_t> first_chunk{0};      // of each row, and the number of all
    for (const Row& row : rows) first_chunk.push_back(first_chunk.back() + (row.span.count + size - 1) / size);
    const int64_t chunks = first_chunk.back();

    py::gil_scoped_release released;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;) {
            const auto row = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk) - first_chunk.begin() - 1;
            const Span& span = rows[row].span;
            const int64_t start = (chunk - first_chunk[row]) * size;
            rows[row].update(rows[row].rates, span.part(start, std::min(start + size, span.count)));
        }
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

}  // namespace

PYBIND11_MODULE(_cpu_adam, module) {
    module.doc() = "AdamW, Lion and Adagrad on flat fp32 shards; megatron_ds.ops checks the arguments and is the way in.";
    module.def("variants", [] {
        std::vector<std::string> names;
        for (const Variant& v : variants()) names.emplace_back(v.name);
        return names;
    }, "Names of the variants this processor can run, fastest first.");
    using Table = py::array_t<int64_t, py::array::c_style>;
    module.def("adamw", [](const Table& table, double lr, double beta1, double beta2, double eps, double weight_decay,
                           double grad_scale, int threads, const std::string& variant) {
        update_all(table, {Rule::adamw, lr, beta1, beta2, eps, weight_decay, grad_scale}, threads, variant);
    }, py::arg("table"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
       py::arg("weight_decay"), py::arg("grad_scale"), py::arg("threads"), py::arg("variant"),
       "One update of each row (p, g, m, v, low: addresses, kind of low, count, step) of an int64 table.");
    module.def("lion", [](const Table& table, double lr, double beta1, double beta2, double weight_decay, double grad_scale,
                          int threads, const std::string& variant) {
        update_all(table, {Rule::lion, lr, beta1, beta2, 0, weight_decay, grad_scale}, threads, variant);
    }, py::arg("table"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"),
       py::arg("grad_scale"), py::arg("threads"), py::arg("variant"), "As adamw; v is not touched.");
    module.def("adagrad", [](const Table& table, double lr, double eps, double weight_decay, double grad_scale, int threads,
                             const std::string& variant) {
        update_all(table, {Rule::adagrad, lr, 0, 0, eps, weight_decay, grad_scale}, threads, variant);
    }, py::arg("table"), py::kw_only(), py::arg("lr"), py::arg("eps"), py::arg("weight_decay"), py::arg("grad_scale"),
       py::arg("threads"), py::arg("variant"), "As adamw, with the sum of squares in place of m; v is not touched.");
}
