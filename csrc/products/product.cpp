// Products of matrices in fp32 or bf16 on CPUs with AVX-512 BF16: C = A B + bias in their dtype, and C += A B in fp32.
// product_kernel.h has the tiles, product_row.h products of a single row.
//
// Work: C is divided into chunks whose part of B, packed, stays in the shared cache; all threads pack it, then take parts of C in
// turn, each with columns of B that stay in their own cache. Parts of a long sum are added in fp32.
//
// Bits: an element is the same sum in the same order however the work is divided, on any number of threads; it depends on the
// length of the sum alone.
//
// Several products, as those of experts, are one call. Threads take whole products in turn where these are many and of similar
// sizes, each with packed copies of its own: then they wait for one another once. Otherwise all threads share one after the other.
//
// Memory: that of packed copies is one piece, which Python allocates: torch counts it so, and plans do.
//
// Limits: types, sizes and strides are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "../common/pool.h"
#include "../common/bf16_vectors.h"
#ifdef HAS_BF16_PRODUCTS
#include "product_row.h"
#endif

namespace py = pybind11;

namespace {

using Sizes = std::array<int64_t, 3>;                    // rows of C, columns of C, length of the sums
using Place = std::array<int64_t, 3>;                    // address, and the strides of rows and columns in elements

#ifdef HAS_BF16_PRODUCTS
constexpr int64_t MOST_ROWS = 1024, MOST_COLUMNS = 32 * PANEL;      // of a chunk
constexpr int64_t OWN_CACHE = 384 << 10;                 // bytes of packed B that a thread works on
constexpr int64_t PART = 16 * TALL;                      // rows of a part

Range range_of(int64_t from, int64_t size, int64_t most) { return {from, std::min(most, size - from)}; }

// Equal parts of the sums, of whole registers.
template <typename N>
int64_t sum_of(int64_t length) {
    const int64_t parts = (length + LONGEST_SUM<N> - 1) / LONGEST_SUM<N>;
    return rounded_up((length + parts - 1) / std::max<int64_t>(1, parts), 2 * WIDE);
}

// Memory of a call.
template <typename Packed>
struct Work {
    Packed *a, *b;
    float* sums;
};

template <typename N>
struct Call {
    Sizes sizes;
    Matrix<typename N::Number> a, b;
    const typename N::Number* bias;
    uint16_t* narrow;           // C, or
    float* wide;                // C, in fp32
    bool is_added;              // to C
    int64_t row;                // of C
    int threads;
};

template <typename N>
int64_t arrange(Work<typename N::Packed>& w, const Sizes& sizes, bool is_wide, char* memory) {
    const auto [rows, columns, length] = sizes;
    const int64_t sum = sum_of<N>(length), most_rows = rounded_up(std::min(rows, MOST_ROWS), TALL);
    const int64_t most_columns = std::min(rounded_up(columns, WIDE), MOST_COLUMNS), size = sizeof(typename N::Number);
    char* start = memory;
    const auto take = [&](auto*& array, int64_t bytes) {
        array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
        memory += rounded_up(bytes, 64);
    };
    take(w.b, most_columns * sum * size);
    take(w.a, most_rows * sum * size);
    take(w.sums, !is_wide && sum < length ? most_rows * most_columns * 4 : 0);
    return memory - start + 64;
}

template <typename Part>
void in_turn(int64_t parts, int threads, const Part& part) {
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < parts;) part(i);
    };
    run_on_threads(int(std::min<int64_t>(threads, parts)), job);
}

template <typename N>
void pack(const Call<N>& call, const Work<typename N::Packed>& w, Range rows, Range columns, Range sum) {
    const bool in_rows = call.a.column == 1, in_columns = call.b.row == 1;      // numbers of a sum lie together
    const int64_t length = packed<N>(sum.count), steps = (sum.count + SUM - 1) / SUM;
    const int64_t of_a = in_rows ? (rows.count + 2 * TALL - 1) / (2 * TALL) : steps;
    const int64_t of_b = in_columns ? (columns.count + PANEL - 1) / PANEL : steps;
    in_turn(of_a + of_b, call.threads, [&](int64_t i) {
        if (i < of_a) {
            const int64_t row = 2 * TALL * i;
            if (in_rows)
                pack_rows_of_a<N>(call.a, rows.from + row, rows.count - row, sum, w.a + row * length);
            else
                pack_columns_of_a<N>(call.a, rows, sum, i * SUM, w.a);
        } else {
            const int64_t part = i - of_a, column = PANEL * part;
            if (in_columns)
                pack_columns_of_b<N>(call.b, columns.from + column, std::min(PANEL, columns.count - column), sum,
                                     w.b + column * length);
            else
                pack_rows_of_b<N>(call.b, columns, sum, part * SUM, w.b);
        }
    });
}

// Where a chunk of C goes: to C, or to sums in fp32 until the last part of its sums is known.
template <typename N>
Target<typename N::Number> target_of(const Call<N>& call, const Work<typename N::Packed>& w, Range rows, Range columns, Range sum) {
    const bool is_first = sum.from == 0, is_last = sum.from + sum.count == call.sizes[2];
    const auto* bias = is_last && call.bias ? call.bias + columns.from : nullptr;
    const int64_t start = rows.from * call.row + columns.from;
    if (call.wide)
        return {is_first && !call.is_added ? nullptr : call.wide + start, bias, call.wide + start, nullptr, call.row, 0};
    return {is_first ? nullptr : w.sums, bias, is_last ? nullptr : w.sums, is_last ? call.narrow + start : nullptr, columns.count,
            call.row};
}

template <typename N>
void multiply(const Call<N>& call, const Work<typename N::Packed>& w, Range rows, Range columns, Range sum) {
    const int64_t length = packed<N>(sum.count), panels = (columns.count + PANEL - 1) / PANEL;
    const int64_t most = std::max<int64_t>(1, OWN_CACHE / (PANEL * length * int64_t(sizeof(typename N::Packed))));
    const int64_t blocks = (panels + most - 1) / most, parts = (rows.count + PART - 1) / PART;
    const Target<typename N::Number> c = target_of(call, w, rows, columns, sum);
    in_turn(blocks * parts, call.threads, [&](int64_t i) {
        const int64_t block = i / parts, first = panels * block / blocks, last = panels * (block + 1) / blocks;
        for (int64_t row = i % parts * PART; row < std::min(rows.count, (i % parts + 1) * PART); row += TALL)
            for (int64_t panel = first; panel < last; ++panel) {
                const int64_t column = panel * PANEL;
                tile(w.a + row * length, w.b + column * length, length, c.at(row, column), std::min(TALL, rows.count - row),
                     std::min(PANEL, columns.count - column));
            }
    });
}

template <typename N>
void compute(const Call<N>& call, uintptr_t memory) {
    const auto [all_rows, all_columns, length] = call.sizes;
    Work<typename N::Packed> w{};
    arrange<N>(w, call.sizes, call.wide, reinterpret_cast<char*>(rounded_up(int64_t(memory), 64)));
    const int64_t sum = sum_of<N>(length);
    for (int64_t column = 0; column < all_columns; column += MOST_COLUMNS)
        for (int64_t row = 0; row < all_rows; row += MOST_ROWS)
            for (int64_t k = 0; k < length; k += sum) {
                const Range rows = range_of(row, all_rows, MOST_ROWS), columns = range_of(column, all_columns, MOST_COLUMNS);
                pack(call, w, rows, columns, range_of(k, length, sum));
                multiply(call, w, rows, columns, range_of(k, length, sum));
            }
}

template <typename N>
void run(const Call<N>& call, uintptr_t memory) {
    py::gil_scoped_release released;
    compute(call, memory);
}

constexpr int64_t FOR_A_THREAD = 2;      // products, at least, that it takes whole

// bytes: of memory for one product. There are as many pieces as threads.
template <typename N>
void run_all(std::vector<Call<N>>& calls, uintptr_t memory, int64_t bytes, int threads) {
    int64_t all = 0, largest = 0;
    for (const auto& call : calls) {
        const int64_t size = call.sizes[0] * call.sizes[1] * call.sizes[2];
        all += size;
        largest = std::max(largest, size);
    }
    const bool are_apart = threads > 1 && largest * threads * FOR_A_THREAD <= all;
    for (auto& call : calls) call.threads = are_apart ? 1 : threads;
    std::atomic<int64_t> next{0}, piece{0};
    const std::function<void()> job = [&] {
        const uintptr_t own = memory + uintptr_t(piece.fetch_add(1) * bytes);
        for (int64_t i; (i = next.fetch_add(1)) < int64_t(calls.size());) compute(calls[size_t(i)], own);
    };
    run_on_threads(are_apart ? threads : 1, job);
}

template <typename T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

template <typename Number>
Matrix<Number> matrix_of(const Place& x) { return {pointer<const Number>(uintptr_t(x[0])), x[1], x[2]}; }

template <typename N>
void product(const Sizes& sizes, const Place& a, const Place& b, uintptr_t out, int64_t row, uintptr_t bias, uintptr_t memory,
             int threads) {
    using Number = typename N::Number;
    const bool is_wide = sizeof(Number) == 4;
    run<N>({sizes, matrix_of<Number>(a), matrix_of<Number>(b), pointer<const Number>(bias),
            pointer<uint16_t>(is_wide ? 0 : out), pointer<float>(is_wide ? out : 0), false, row, threads}, memory);
}

// C in fp32.
template <typename N, bool is_added>
void wide_product(const Sizes& sizes, const Place& a, const Place& b, uintptr_t out, int64_t row, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    run<N>({sizes, matrix_of<Number>(a), matrix_of<Number>(b), nullptr, nullptr, pointer<float>(out), is_added, row, threads},
           memory);
}

// Sizes, A, B, bias or 0, C.
using Product = std::tuple<Sizes, Place, Place, uintptr_t, uintptr_t>;

// is_wide: C is in fp32.
template <typename N>
void products(const std::vector<Product>& all, int64_t row, bool is_wide, bool is_added, uintptr_t memory, int64_t bytes, int threads) {
    using Number = typename N::Number;
    std::vector<Call<N>> calls;
    for (const auto& [sizes, a, b, bias, out] : all)
        calls.push_back({sizes, matrix_of<Number>(a), matrix_of<Number>(b), pointer<const Number>(bias),
                         pointer<uint16_t>(is_wide ? 0 : out), pointer<float>(is_wide ? out : 0), is_added, row, threads});
    py::gil_scoped_release released;
    run_all(calls, memory, bytes, threads);
}

template <typename N>
int64_t bytes(const Sizes& sizes, bool is_wide) {
    Work<typename N::Packed> w{};
    return arrange<N>(w, sizes, is_wide, nullptr);
}

constexpr int64_t OF_A_THREAD = 1 << 19;      // numbers of the matrix that it reads in the time in which another one wakes up

// One bf16 row x times W [rows, length].
void row_product(const std::array<int64_t, 2>& sizes, const std::array<int64_t, 2>& w, uintptr_t x, uintptr_t bias, uintptr_t out,
                 int threads) {
    const auto [rows, length] = sizes;
    const RowProduct call{pointer<const uint16_t>(uintptr_t(w[0])), pointer<const uint16_t>(x), pointer<const uint16_t>(bias),
                          pointer<uint16_t>(out), rows, length, w[1]};
    const int64_t blocks = (rows + WIDE - 1) / WIDE, helpful = std::min<int64_t>(threads, rows * length / OF_A_THREAD);
    const int64_t parts = helpful > 1 ? std::min(4 * helpful, blocks) : 1;
    py::gil_scoped_release released;
    in_turn(parts, int(helpful), [&, rows = rows](int64_t i) {
        multiply_row(call, blocks * i / parts * WIDE, std::min(rows, blocks * (i + 1) / parts * WIDE));
    });
}

template <typename N>
void define(py::module_& module, const std::string& dtype) {
    module.def(("bytes_" + dtype).c_str(), &bytes<N>, py::arg("sizes"), py::arg("is_wide"),
               "Bytes of memory that a call works in; is_wide: C is in fp32.");
    module.def(("product_" + dtype).c_str(), &product<N>, py::arg("sizes"), py::arg("a"), py::arg("b"), py::arg("out"),
               py::arg("row"), py::arg("bias"), py::arg("memory"), py::arg("threads"));
    for (const auto& [name, function] : {std::pair("add_product_", &wide_product<N, true>), {"write_product_", &wide_product<N, false>}})
        module.def((name + dtype).c_str(), function, py::arg("sizes"), py::arg("a"), py::arg("b"), py::arg("out"), py::arg("row"),
                   py::arg("memory"), py::arg("threads"));
    module.def(("products_" + dtype).c_str(), &products<N>, py::arg("products"), py::arg("row"), py::arg("is_wide"),
               py::arg("is_added"), py::arg("memory"), py::arg("bytes"), py::arg("threads"),
               "Each product: sizes, A, B, address of a bias or 0, address of C. bytes: of memory, for each thread.");
}
#endif

}  // namespace

PYBIND11_MODULE(_product, module) {
    module.doc() = "Products of fp32 or bf16 matrices given by address; megatron_ds.ops.product is the way in.";
    module.def("has_products", &has_products, "Whether the processor multiplies bf16 in vectors, and this was compiled for it.");
    module.def("is_amd", &is_amd, "Whether the processor is one of AMD's.");
    module.def("has_tiles", &has_tiles, "Whether the processor multiplies tiles of bf16, eight times as fast. Asks the system for AMX.");
#ifdef HAS_BF16_PRODUCTS
    define<Fp32>(module, "fp32");
    define<Bf16>(module, "bf16");
    module.def("row_product", &row_product, py::arg("sizes"), py::arg("w"), py::arg("x"), py::arg("bias"), py::arg("out"),
               py::arg("threads"), "out = W x + bias in bf16; w: address, and the stride of rows.");
#endif
}
