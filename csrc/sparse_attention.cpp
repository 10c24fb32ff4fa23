// Attention to the blocks of keys that a layout shows, in fp32 and bf16 on CPUs with AVX-512. sparse_kernel.h has the mathematics
// of a head, Python the spans of a layout.
//
// Work: threads take parts in turn: of forward some tiles of a head, of backward a key head with its queries. With fewer key heads
// than threads, backward leaves threads without work.
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

#include "pool.h"

#if defined(HAS_X86_VECTORS) && !defined(__clang__) && __GNUC__ >= 11
#define HAS_PRODUCTS 1

#include "sparse_kernel.h"
#endif

namespace py = pybind11;

namespace {

#ifdef HAS_PRODUCTS
using Sizes = std::array<int64_t, 7>;      // queries, keys, samples, query heads, key heads, d, offset of `sparse::Call`
using Place = std::array<int64_t, 4>;      // address, and the strides of rows, samples and heads in elements

bool has_vectors() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
bool has_products() { return has_vectors() && __builtin_cpu_supports("avx512bf16"); }

// Addresses of what Python has planned: of each head its number among the layouts; of each layout the first span of each tile and
// of the end; the spans; their units; ids of queries and of keys [samples, ..], or 0; sinks [heads], or 0.
struct Given {
    explicit Given(const std::array<uintptr_t, 7>& x)
        : layout_of_head(reinterpret_cast<const int32_t*>(x[0])), first(reinterpret_cast<const int32_t*>(x[1])),
          spans(reinterpret_cast<const sparse::Span*>(x[2])), units(reinterpret_cast<const int32_t*>(x[3])),
          query_ids(reinterpret_cast<const int32_t*>(x[4])), key_ids(reinterpret_cast<const int32_t*>(x[5])),
          sinks(reinterpret_cast<const float*>(x[6])) {}

    sparse::Plan plan(const Sizes& sizes, int64_t sample, int64_t head) const {
        const int64_t tiles = rounded_up(sizes[0], ROWS) / ROWS;
        const int32_t* of_tiles = first + layout_of_head[head] * (tiles + 1);
        const int32_t last = of_tiles[tiles];
        return {of_tiles, spans, units, units + (last > of_tiles[0] ? spans[last - 1].to : 0), query_ids == nullptr ? nullptr : query_ids + sample * sizes[0],
                key_ids == nullptr ? nullptr : key_ids + sample * sizes[1]};
    }

    const int32_t *layout_of_head, *first;
    const sparse::Span* spans;
    const int32_t *units, *query_ids, *key_ids;
    const float* sinks;
};

template <typename T>
Rows<T> rows_of(const Place& x, int64_t sample, int64_t head) {
    return {reinterpret_cast<T*>(x[0]) + sample * x[2] + head * x[3], x[1]};
}

// Takes aligned arrays from a thread's memory; without memory it counts them.
class Arena {
public:
    explicit Arena(char* memory) : memory_(memory) {}

    template <typename T>
    void take(T*& array, int64_t count) {
        array = reinterpret_cast<T*>(memory_ + used_);
        used_ += rounded_up(count * int64_t(sizeof(T)), ALIGNMENT);
    }
    int64_t used() const { return used_ + ALIGNMENT; }

    static char* aligned(uintptr_t x) { return reinterpret_cast<char*>(rounded_up(intptr_t(x), ALIGNMENT)); }

private:
    static constexpr int64_t ALIGNMENT = 64;
    char* memory_;
    int64_t used_ = 0;
};

constexpr int64_t MOST_KEYS = sparse::UNITS * WIDE;

template <typename N>
int64_t arrange(sparse::ForwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5], keys = MOST_KEYS * N::PER;
    arena.take(w.keys, keys * d / N::PER);
    arena.take(w.values, keys * d / N::PER);
    arena.take(w.queries, ROWS * d / N::PER);
    arena.take(w.scores, keys * ROWS);
    arena.take(w.p, keys * ROWS / N::PER);
    arena.take(w.out, d * ROWS);
    return arena.used();
}

template <typename N>
int64_t arrange(sparse::BackwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5];
    for (auto** of_keys : {&w.keys, &w.values, &w.key_pairs}) arena.take(*of_keys, MOST_KEYS * d / N::PER);
    for (auto** of_rows : {&w.query_columns, &w.dout_columns, &w.query_pairs, &w.dout_pairs}) arena.take(*of_rows, ROWS * d / N::PER);
    for (auto** tile : {&w.p, &w.ds, &w.ds_pairs}) arena.take(*tile, MOST_KEYS * ROWS / N::PER);
    arena.take(w.dq, d * ROWS);
    for (float** sums : {&w.dk, &w.dv}) arena.take(*sums, sizes[1] * d);
    return arena.used();
}

// Calls part(memory of the thread, number) for each part.
template <typename Work, typename Part>
void share(int64_t parts, int threads, uintptr_t memory, const Sizes& sizes, const Part& part) {
    Work counted{};
    const int64_t bytes = arrange(counted, sizes, nullptr);
    std::atomic<int64_t> next{0}, thread{0};
    const std::function<void()> job = [&] {
        Work work{};
        arrange(work, sizes, Arena::aligned(memory + uintptr_t(thread.fetch_add(1) * bytes)));
        for (int64_t i; (i = next.fetch_add(1)) < parts;) part(work, i);
    };
    run_on_threads(int(std::min<int64_t>(threads, parts)), job);
}

template <typename N>
void forward(const Sizes& sizes, const std::array<Place, 4>& tensors, uintptr_t lse, float scale, bool is_causal,
             const std::array<uintptr_t, 7>& addresses, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    const Given given(addresses);
    const sparse::Call call{sizes[0], sizes[1], sizes[5], sizes[6], is_causal, scale};
    const int64_t heads = sizes[3], group = heads / sizes[4], all = sizes[2] * heads, tiles = rounded_up(sizes[0], ROWS) / ROWS;
    const int64_t cuts = all % threads == 0 ? 1 : std::min(tiles, (4 * threads + all - 1) / all);
    const auto part = [&](const sparse::ForwardWork<N>& w, int64_t i) {
        const int64_t head = i / cuts % heads, sample = i / cuts / heads, at = i % cuts;
        sparse::attend<N>(call, w, given.plan(sizes, sample, head), given.sinks == nullptr ? nullptr : given.sinks + head,
                          rows_of<const Number>(tensors[0], sample, head), rows_of<const Number>(tensors[1], sample, head / group),
                          rows_of<const Number>(tensors[2], sample, head / group), rows_of<Number>(tensors[3], sample, head),
                          reinterpret_cast<float*>(lse) + (sample * heads + head) * call.queries, tiles * at / cuts,
                          tiles * (at + 1) / cuts);
    };
    py::gil_scoped_release released;
    share<sparse::ForwardWork<N>>(all * cuts, threads, memory, sizes, part);
}

template <typename N>
void backward(const Sizes& sizes, const std::array<Place, 8>& tensors, uintptr_t lse, float scale, bool is_causal,
              const std::array<uintptr_t, 7>& addresses, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    const Given given(addresses);
    const sparse::Call call{sizes[0], sizes[1], sizes[5], sizes[6], is_causal, scale};
    const int64_t key_heads = sizes[4], heads = sizes[3], group = heads / key_heads;
    const auto part = [&](const sparse::BackwardWork<N>& w, int64_t i) {
        const int64_t key_head = i % key_heads, sample = i / key_heads;
        const auto keys_of = [&](int64_t tensor) { return rows_of<const Number>(tensors[size_t(tensor)], sample, key_head); };
        for (float* sums : {w.dk, w.dv}) std::fill_n(sums, call.keys * call.d, 0.0f);
        for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
            const auto rows = [&](int64_t tensor) { return rows_of<const Number>(tensors[size_t(tensor)], sample, head); };
            sparse::differentiate<N>(call, w, given.plan(sizes, sample, head), rows(0), keys_of(1), keys_of(2), rows(3), rows(4),
                                     reinterpret_cast<const float*>(lse) + (sample * heads + head) * call.queries,
                                     rows_of<Number>(tensors[5], sample, head));
        }
        sparse::put_rows(w.dk, call.keys, call.d, rows_of<Number>(tensors[6], sample, key_head));
        sparse::put_rows(w.dv, call.keys, call.d, rows_of<Number>(tensors[7], sample, key_head));
    };
    py::gil_scoped_release released;
    share<sparse::BackwardWork<N>>(sizes[2] * key_heads, threads, memory, sizes, part);
}

template <template <typename> class Work>
int64_t bytes_of(const Sizes& sizes, bool is_wide) {
    Work<sparse::Fp32> wide{};
    Work<sparse::Bf16> narrow{};
    return is_wide ? arrange(wide, sizes, nullptr) : arrange(narrow, sizes, nullptr);
}
#else
bool has_vectors() { return false; }
bool has_products() { return false; }
#endif

}  // namespace

PYBIND11_MODULE(_sparse_attention, module) {
    module.doc() = "Attention to blocks of keys, of tensors given by address; megatron_ds.ops.core_attention is the way in.";
    module.def("has_vectors", &has_vectors, "Whether the processor has the vectors for fp32, and this was compiled for it.");
    module.def("has_products", &has_products, "The same for bf16.");
#ifdef HAS_PRODUCTS
    const auto arguments = [&](const char* name, auto function, const char* text) {
        module.def(name, function, text, py::arg("sizes"), py::arg("tensors"), py::arg("lse"), py::arg("scale"),
                   py::arg("is_causal"), py::arg("addresses"), py::arg("memory"), py::arg("threads"));
    };
    arguments("forward_fp32", &forward<sparse::Fp32>, "Writes out and lse.");
    arguments("forward_bf16", &forward<sparse::Bf16>, "Writes out and lse.");
    arguments("backward_fp32", &backward<sparse::Fp32>, "Writes dq, dk and dv.");
    arguments("backward_bf16", &backward<sparse::Bf16>, "Writes dq, dk and dv.");
    module.def("forward_bytes", &bytes_of<sparse::ForwardWork>, py::arg("sizes"), py::arg("is_wide"), "Memory of a thread.");
    module.def("backward_bytes", &bytes_of<sparse::BackwardWork>, py::arg("sizes"), py::arg("is_wide"));
#endif
}
