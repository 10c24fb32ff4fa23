// Attention in fp32 and bf16 on CPUs with AVX-512: softmax(scale q kᵀ) v of the keys that a pattern shows, and its gradients.
// attention_kernel.h has the mathematics of a head; Python plans which units of keys a tile of queries sees.
//
// Work: threads take parts in turn. Of forward, a part is a head, or some tiles of one where that divides the work better. Of
// backward it is a key head with its query heads; with fewer of them than threads, parts compute dq of some queries, and others dk
// and dv of some keys: 7 products in place of 5, but each thread has work.
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

#ifdef HAS_BF16_PRODUCTS
using Sizes = std::array<int64_t, 7>;      // queries, keys, samples, query heads, key heads, d, keys of a run in backward
using Place = std::array<int64_t, 4>;      // address, and the strides of rows, samples and heads in elements

bool has_vectors() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

// What queries see: offset, before and after of `Call`; and addresses of what Python has planned: of each head its number among
// the layouts; of each layout the first span of each tile and of the end; the spans; their units; ids of queries and of keys
// [samples, a multiple of WIDE], or 0; sinks and slopes [heads], or 0.
struct Shown {
    std::array<int64_t, 3> positions;
    std::array<uintptr_t, 8> addresses;

    template <typename T>
    const T* at(size_t i) const { return reinterpret_cast<const T*>(addresses[i]); }

    Call call(const Sizes& sizes, float scale) const {
        return {sizes[0], sizes[1], sizes[5], positions[0], positions[1], positions[2], scale};
    }
    Plan plan(const Sizes& sizes, int64_t sample, int64_t head) const {
        const int64_t tiles = rounded_up(sizes[0], ROWS) / ROWS;
        const auto ids = [&](size_t i, int64_t count) { return addresses[i] ? at<int32_t>(i) + sample * rounded_up(count, WIDE) : nullptr; };
        return {at<int32_t>(1) + at<int32_t>(0)[head] * (tiles + 1), at<Span>(2), at<int32_t>(3), ids(4, sizes[0]), ids(5, sizes[1]),
                addresses[7] ? at<float>(7)[head] : 0};
    }
    const float* sink(int64_t head) const { return addresses[6] ? at<float>(6) + head : nullptr; }
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

constexpr int64_t MOST_KEYS = UNITS * WIDE;      // of a part

template <typename N>
int64_t arrange(ForwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5], keys = MOST_KEYS * N::PER;
    arena.take(w.keys, WIDE * d / N::PER);
    arena.take(w.values, keys * d / N::PER);
    arena.take(w.queries, ROWS * d / N::PER);
    arena.take(w.scores, keys * ROWS);
    arena.take(w.p, keys * ROWS / N::PER);
    arena.take(w.out, d * ROWS);
    return arena.used();
}

template <typename N>
int64_t arrange(BackwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5], run = rounded_up(std::min(sizes[1], sizes[6]), WIDE);
    const bool has_runs = run < sizes[1];
    for (auto** of_run : {&w.keys, &w.values}) arena.take(*of_run, run * d / N::PER);
    arena.take(w.key_pairs, N::PER == 2 ? run / N::PER * d : 0);
    for (auto** of_rows : {&w.query_columns, &w.dout_columns, &w.query_pairs, &w.dout_pairs}) arena.take(*of_rows, ROWS * d / N::PER);
    for (auto** tile : {&w.p, &w.ds, &w.ds_pairs}) arena.take(*tile, MOST_KEYS * ROWS / N::PER);
    w.next_dq = has_runs ? d * ROWS : 0;
    arena.take(w.dq, d * (has_runs ? rounded_up(sizes[0], ROWS) : ROWS));
    for (float** sums : {&w.dk, &w.dv}) arena.take(*sums, run * d);
    return arena.used();
}

// Calls part(memory of the thread, number) for each part.
template <typename Work, typename Do>
void share(int64_t parts, int threads, uintptr_t memory, const Sizes& sizes, const Do& part) {
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

// Equal parts of some pieces.
struct Cut {
    int64_t pieces, parts;

    Cut(int64_t pieces, int64_t most) : pieces(pieces), parts(std::max<int64_t>(1, std::min(most, pieces))) {}
    int64_t at(int64_t part) const { return pieces * part / parts; }
};

template <typename N>
void forward(const Sizes& sizes, const std::array<Place, 4>& tensors, const std::array<uintptr_t, 1>& of_rows, float scale,
             const Shown& shown, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    const auto& [q, k, v, out] = tensors;
    const Call call = shown.call(sizes, scale);
    const int64_t heads = sizes[3], group = heads / sizes[4], all = sizes[2] * heads;
    if (all == 0) return;
    const Cut cut(rounded_up(sizes[0], ROWS) / ROWS, all % threads == 0 ? 1 : (4 * threads + all - 1) / all);
    // Bindings cannot be captured by name in C++17.
    const auto part = [&, q = q, k = k, v = v, out = out](const ForwardWork<N>& w, int64_t i) {
        const int64_t head = i / cut.parts % heads, sample = i / cut.parts / heads, at = i % cut.parts;
        const ForwardTensors<N> t{rows_of<const Number>(q, sample, head), rows_of<const Number>(k, sample, head / group),
                                  rows_of<const Number>(v, sample, head / group), rows_of<Number>(out, sample, head),
                                  reinterpret_cast<float*>(of_rows[0]) + (sample * heads + head) * call.queries};
        attend(call, w, shown.plan(sizes, sample, head), shown.sink(head), t, cut.at(at), cut.at(at + 1));
    };
    py::gil_scoped_release released;
    share<ForwardWork<N>>(all * cut.parts, threads, memory, sizes, part);
}

template <typename N>
void backward(const Sizes& sizes, const std::array<Place, 7>& tensors, const std::array<uintptr_t, 2>& of_rows, float scale,
              const Shown& shown, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    const auto& [q, k, v, dout, dq, dk, dv] = tensors;
    const Call call = shown.call(sizes, scale);
    const int64_t heads = sizes[3], key_heads = sizes[4], group = heads / key_heads, all = sizes[2] * key_heads;
    if (all == 0) return;
    const int64_t tiles = rounded_up(sizes[0], ROWS) / ROWS, units = rounded_up(sizes[1], WIDE) / WIDE;
    const int64_t run_units = rounded_up(std::min(sizes[1], sizes[6]), WIDE) / WIDE;
    const Cut by_key((units + REGISTERS - 1) / REGISTERS, all >= threads ? 1 : (4 * threads + all - 1) / all);
    const Cut by_query(tiles, by_key.parts);
    const bool is_split = by_key.parts > 1;
    const int64_t of_head = is_split ? by_key.parts + by_query.parts : 1;
    const auto part = [&, q = q, k = k, v = v, dout = dout, dq = dq, dk = dk, dv = dv](const BackwardWork<N>& w, int64_t i) {
        const int64_t key_head = i / of_head % key_heads, sample = i / of_head / key_heads, at = i % of_head;
        const Wanted wanted{!is_split || at >= by_key.parts, at < by_key.parts};
        const bool has_some_keys = is_split && wanted.keys, has_some_queries = is_split && wanted.dq;
        const int64_t first_tile = has_some_queries ? by_query.at(at - by_key.parts) : 0;
        const int64_t last_tile = has_some_queries ? by_query.at(at - by_key.parts + 1) : tiles;
        const int64_t first = has_some_keys ? REGISTERS * by_key.at(at) : 0;
        const int64_t last = has_some_keys ? std::min(units, REGISTERS * by_key.at(at + 1)) : units;
        for (int64_t unit = first; unit < last; unit += run_units) {
            const Run run{unit, std::min(unit + run_units, last), unit == first, unit + run_units >= last};
            const int64_t key = unit * WIDE, count = std::min(run.to * WIDE, call.keys) - key;
            for (float* sums : {w.dk, w.dv}) std::fill_n(sums, wanted.keys ? (run.to - unit) * WIDE * call.d : 0, 0.0f);
            for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
                const int64_t first_row = (sample * heads + head) * call.queries;
                const auto sums = [&](uintptr_t x) { return reinterpret_cast<const float*>(x) + first_row; };
                const BackwardTensors<N> t{rows_of<const Number>(q, sample, head), rows_of<const Number>(k, sample, key_head),
                                           rows_of<const Number>(v, sample, key_head), rows_of<const Number>(dout, sample, head),
                                           sums(of_rows[0]), sums(of_rows[1]), rows_of<Number>(dq, sample, head)};
                if (head == key_head * group) take_run(call, w, run, t, wanted);
                differentiate(call, w, shown.plan(sizes, sample, head), t, run, wanted, first_tile, last_tile);
            }
            if (!wanted.keys) continue;
            put_rows(w.dk, count, call.d, rows_of<Number>(dk, sample, key_head).from(key));
            put_rows(w.dv, count, call.d, rows_of<Number>(dv, sample, key_head).from(key));
        }
    };
    py::gil_scoped_release released;
    share<BackwardWork<N>>(all * of_head, threads, memory, sizes, part);
}

template <typename N>
void dots(const std::array<int64_t, 4>& sizes, const std::array<Place, 2>& tensors, uintptr_t dots, int threads) {
    using Number = typename N::Number;
    const auto [rows, samples, heads, d] = sizes;
    const int64_t tiles = rounded_up(rows, ROWS) / ROWS;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&, rows = rows, samples = samples, heads = heads, d = d] {
        for (int64_t i; (i = next.fetch_add(1)) < tiles * samples;) {
            const int64_t sample = i % samples, row = i / samples * ROWS;
            for (int64_t head = 0; head < heads; ++head)
                take_dots(rows_of<const Number>(tensors[0], sample, head), rows_of<const Number>(tensors[1], sample, head), row,
                          std::min(row + ROWS, rows), d, reinterpret_cast<float*>(dots) + (sample * heads + head) * rows);
        }
    };
    py::gil_scoped_release released;
    run_on_threads(int(std::min<int64_t>(threads, tiles * samples)), job);
}

template <template <typename> class Work>
int64_t bytes_of(const Sizes& sizes, bool is_wide) {
    Work<Fp32> wide{};
    Work<Bf16> narrow{};
    return is_wide ? arrange(wide, sizes, nullptr) : arrange(narrow, sizes, nullptr);
}

// Adds a function of N tensors, and of M arrays with a number for each row, to the module.
template <size_t N, size_t M>
void define(py::module_& module, const char* name,
            void (*function)(const Sizes&, const std::array<Place, N>&, const std::array<uintptr_t, M>&, float, const Shown&,
                             uintptr_t, int),
            const char* text) {
    module.def(
        name,
        [=](const Sizes& sizes, const std::array<Place, N>& tensors, const std::array<uintptr_t, M>& of_rows, float scale,
            const std::array<int64_t, 3>& positions, const std::array<uintptr_t, 8>& addresses, uintptr_t memory,
            int threads) { function(sizes, tensors, of_rows, scale, {positions, addresses}, memory, threads); },
        text, py::arg("sizes"), py::arg("tensors"), py::arg("of_rows"), py::arg("scale"), py::arg("positions"),
        py::arg("addresses"), py::arg("memory"), py::arg("threads"));
}
#else
bool has_vectors() { return false; }
#endif

}  // namespace

PYBIND11_MODULE(_attention, module) {
    module.doc() = "Attention of tensors given by address; megatron_ds.ops.core_attention is the way in.";
    module.def("has_vectors", &has_vectors, "Whether the processor has the vectors for fp32, and this was compiled for it.");
    module.def("has_products", &has_products, "The same for bf16.");
    module.def("has_tiles", &has_tiles, "Whether the processor multiplies tiles of bf16, eight times as fast.");
#ifdef HAS_BF16_PRODUCTS
    define(module, "forward_fp32", &forward<Fp32>, "Writes out; of rows: lse.");
    define(module, "forward_bf16", &forward<Bf16>, "Writes out; of rows: lse.");
    define(module, "backward_fp32", &backward<Fp32>, "Writes dq, dk and dv; of rows: lse and D are read.");
    define(module, "backward_bf16", &backward<Bf16>, "Writes dq, dk and dv; of rows: lse and D are read.");
    for (const auto& [name, function] : {std::pair{"dots_fp32", &dots<Fp32>}, std::pair{"dots_bf16", &dots<Bf16>}})
        module.def(name, function, "Writes D of dout and out.", py::arg("sizes"), py::arg("tensors"), py::arg("dots"),
                   py::arg("threads"));
    module.def("forward_bytes", &bytes_of<ForwardWork>, py::arg("sizes"), py::arg("is_wide"), "Memory of a thread.");
    module.def("backward_bytes", &bytes_of<BackwardWork>, py::arg("sizes"), py::arg("is_wide"));
#endif
}
