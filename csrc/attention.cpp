// Attention in bf16 on CPUs with AVX-512 BF16: causal or plain softmax(scale q kᵀ) v, and its gradients. attention_kernel.h has
// the mathematics of a head.
//
// Work: threads take parts of heads in turn. With enough heads a part is a whole one. With fewer, forward is divided by queries,
// and backward into parts that compute dq of some queries and parts that compute dk and dv of some keys: 7 products in place of
// 5, but each thread has work.
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

#include "bf16_vectors.h"
#ifdef HAS_BF16_PRODUCTS
#include "attention_backward.h"
#include "attention_forward.h"
#endif

namespace py = pybind11;

namespace {

using Sizes = std::array<int64_t, 6>;      // queries, keys, samples, query heads, key heads, d
using Place = std::array<int64_t, 4>;      // address, and the strides of rows, samples and heads in elements

#ifdef HAS_BF16_PRODUCTS
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

    static char* aligned(char* x) { return reinterpret_cast<char*>(rounded_up(reinterpret_cast<intptr_t>(x), ALIGNMENT)); }

private:
    static constexpr int64_t ALIGNMENT = 64;
    char* memory_;
    int64_t used_ = 0;
};

int64_t arrange(ForwardWork& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t keys = rounded_up(sizes[1], ROWS), d = sizes[5];
    arena.take(w.keys, keys * d);
    arena.take(w.values, keys / 2 * d);
    arena.take(w.queries, d / 2 * ROWS);
    arena.take(w.p, KEYS / 2 * ROWS);
    arena.take(w.scores, KEYS * ROWS);
    arena.take(w.out, d * ROWS);
    return arena.used();
}

// Long runs of keys are worked on in parts of RUN, and dq of all queries stays meanwhile. With several query heads for a key that
// would be more memory, not less.
constexpr int64_t RUN = 1024;

int64_t run_of_keys(const Sizes& sizes) {
    return sizes[3] == sizes[4] ? std::min(RUN, rounded_up(sizes[1], ROWS)) : rounded_up(sizes[1], ROWS);
}

int64_t arrange(BackwardWork& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t keys = run_of_keys(sizes), d = sizes[5];
    const bool has_runs = keys < sizes[1];
    arena.take(w.keys, keys * d);
    arena.take(w.values, keys * d);
    arena.take(w.key_pairs, keys / 2 * d);
    for (uint32_t** columns : {&w.query_columns, &w.dout_columns}) arena.take(*columns, d / 2 * ROWS);
    for (uint32_t** pairs : {&w.query_pairs, &w.dout_pairs}) arena.take(*pairs, d / 2 * ROWS);
    for (uint16_t** tile : {&w.p, &w.ds}) arena.take(*tile, ROWS * ROWS);
    arena.take(w.ds_pairs, ROWS / 2 * ROWS);
    w.next_dq = has_runs ? d * ROWS : 0;
    arena.take(w.dq, d * (has_runs ? rounded_up(sizes[0], ROWS) : ROWS));
    for (float** sums : {&w.dk, &w.dv}) arena.take(*sums, keys * d);
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
        arrange(work, sizes, Arena::aligned(reinterpret_cast<char*>(memory) + thread.fetch_add(1) * bytes));
        for (int64_t i; (i = next.fetch_add(1)) < parts;) part(work, i);
    };
    run_on_threads(int(std::min<int64_t>(threads, parts)), job);
}

// Parts of a multiple of ROWS, as equal as possible.
struct Cut {
    int64_t rows, parts;

    Cut(int64_t rows, int64_t most) : rows(rows), parts(std::max<int64_t>(1, std::min(most, (rows + ROWS - 1) / ROWS))) {}
    int64_t at(int64_t part) const { return std::min(rows, rounded_up(rows, ROWS) / ROWS * part / parts * ROWS); }
};

void forward(const Sizes& sizes, const std::array<Place, 4>& tensors, uintptr_t lse, float scale, bool is_causal, uintptr_t memory,
             int threads) {
    const auto [queries, keys, samples, heads, key_heads, d] = sizes;
    const auto& [q, k, v, out] = tensors;
    const Shape s{queries, keys, d, is_causal, scale};
    const int64_t all = samples * heads, group = heads / key_heads;
    const Cut cut(queries, all % threads == 0 ? 1 : (4 * threads + all - 1) / all);
    // Bindings cannot be captured by name in C++17.
    const auto part = [&, q = q, k = k, v = v, out = out, heads = heads](const ForwardWork& w, int64_t i) {
        const int64_t head = i / cut.parts % heads, sample = i / cut.parts / heads, at = i % cut.parts;
        attend(s, w, rows_of<const uint16_t>(q, sample, head), rows_of<const uint16_t>(k, sample, head / group),
               rows_of<const uint16_t>(v, sample, head / group), rows_of<uint16_t>(out, sample, head),
               reinterpret_cast<float*>(lse) + (sample * heads + head) * s.queries, cut.at(at), cut.at(at + 1));
    };
    py::gil_scoped_release released;
    share<ForwardWork>(all * cut.parts, threads, memory, sizes, part);
}


void backward(const Sizes& sizes, const std::array<Place, 8>& tensors, uintptr_t lse, float scale, bool is_causal, uintptr_t memory,
              int threads) {
    const auto [queries, keys, samples, heads, key_heads, d] = sizes;
    const auto& [q, k, v, out, dout, dq, dk, dv] = tensors;
    const Shape s{queries, keys, d, is_causal, scale};
    const int64_t all = samples * key_heads, group = heads / key_heads, run = run_of_keys(sizes);
    const Cut by_key(keys, all >= threads ? 1 : (4 * threads + all - 1) / all);
    const Cut by_query(queries, by_key.parts);
    const bool is_split = by_key.parts > 1;
    const int64_t of_head = is_split ? by_key.parts + by_query.parts : 1;
    const auto part = [&, q = q, k = k, v = v, out = out, dout = dout, dq = dq, dk = dk, dv = dv, heads = heads, d = d,
                       key_heads = key_heads](const BackwardWork& w, int64_t i) {
        const int64_t key_head = i / of_head % key_heads, sample = i / of_head / key_heads, at = i % of_head;
        const bool has_keys = at < by_key.parts, has_queries = !is_split || !has_keys;
        const int64_t first_query = is_split && has_queries ? by_query.at(at - by_key.parts) : 0;
        const int64_t last_query = is_split && has_queries ? by_query.at(at - by_key.parts + 1) : s.queries;
        const int64_t first_key = has_keys && is_split ? by_key.at(at) : 0;
        const int64_t last_key = has_keys && is_split ? by_key.at(at + 1) : s.seen(last_query);
        const auto from = [&](int64_t key, const Place& x) {
            const auto rows = rows_of<const uint16_t>(x, sample, key_head);
            return Rows<const uint16_t>{rows[key], rows.stride};
        };
        for (int64_t key = first_key; key < last_key; key += run) {
            const int64_t end = std::min(key + run, last_key), count = end - key, padded = rounded_up(count, ROWS);
            copy_rows(from(key, k), count, padded, d, w.keys);
            copy_rows(from(key, v), count, padded, d, w.values);
            if (has_queries) pair_rows(from(key, k), count, padded, d, w.key_pairs);
            if (has_keys) std::fill_n(w.dk, padded * d, 0.0f), std::fill_n(w.dv, padded * d, 0.0f);
            for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
                differentiate_head(s, w, rows_of<const uint16_t>(q, sample, head), rows_of<const uint16_t>(out, sample, head),
                                   rows_of<const uint16_t>(dout, sample, head),
                                   reinterpret_cast<const float*>(lse) + (sample * heads + head) * s.queries, first_query,
                                   last_query, key, end, {rows_of<uint16_t>(dq, sample, head), has_queries, has_keys});
            if (!has_keys) continue;
            const auto dk_rows = rows_of<uint16_t>(dk, sample, key_head), dv_rows = rows_of<uint16_t>(dv, sample, key_head);
            narrow_rows(w.dk, scale, count, d, {dk_rows[key], dk_rows.stride});
            narrow_rows(w.dv, 1, count, d, {dv_rows[key], dv_rows.stride});
        }
    };
    py::gil_scoped_release released;
    share<BackwardWork>(all * of_head, threads, memory, sizes, part);
}

template <typename Work>
int64_t bytes_of(const Sizes& sizes) {
    Work work{};
    return arrange(work, sizes, nullptr);
}
#endif

}  // namespace

PYBIND11_MODULE(_attention, module) {
    module.doc() = "Attention of bf16 tensors given by address; megatron_ds.ops.core_attention is the way in.";
    module.def("has_products", &has_products, "Whether the processor multiplies bf16 in vectors, and this was compiled for it.");
    module.def("has_tiles", &has_tiles, "Whether the processor multiplies tiles of bf16, eight times as fast.");
#ifdef HAS_BF16_PRODUCTS
    module.def("forward_bytes", &bytes_of<ForwardWork>, py::arg("sizes"), "Bytes of memory that a thread works in.");
    module.def("backward_bytes", &bytes_of<BackwardWork>, py::arg("sizes"));
    module.def("forward", &forward, py::arg("sizes"), py::arg("tensors"), py::arg("lse"), py::arg("scale"), py::arg("is_causal"),
               py::arg("memory"), py::arg("threads"));
    module.def("backward", &backward, py::arg("sizes"), py::arg("tensors"), py::arg("lse"), py::arg("scale"), py::arg("is_causal"),
               py::arg("memory"), py::arg("threads"));
#endif
}
