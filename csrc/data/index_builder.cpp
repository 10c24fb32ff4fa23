// Index maps of datasets: what data/loading/index_maps.py, data/loading/blend.py and extensions/bert/maps.py of
// megatron_ds build with numpy, faster, with equal values.
//
//   sample_index.h     where the samples of a GPT dataset begin       threads; each document's length is read once
//   shuffle.h          numpy's shuffle and C++'s, bit by bit          memory fetched ahead
//   blend_index.h      which dataset comes next in a blend            datasets that cannot win sleep; threads take segments
//   bert_mapping.h     which sentences make a BERT sample             one pass instead of two
//
// Here are the types and bounds that numpy arrays must have. The interpreter lock is released while a map is built.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "bert_mapping.h"
#include "blend_index.h"
#include "sample_index.h"
#include "shuffle.h"

namespace py = pybind11;

namespace {

// Contiguous, of this type; aligned or not, so that a mapped .idx file is not copied.
const char* bytes_of(const py::array& array, const char* type, const char* name) {
    if (array.ndim() != 1 || !array.dtype().equal(py::dtype(type)) || (array.size() > 0 && array.strides(0) != array.itemsize()))
        throw std::invalid_argument(std::string(name) + " must be a contiguous array of one dimension and type " + type);
    return static_cast<const char*>(array.data());
}

template <typename Row>
py::array sample_index(const py::array& lengths, const py::array& order, int64_t seq_length, int64_t num_tokens, int threads) {
    const char* from = bytes_of(lengths, "int32", "lengths");
    const bool is_narrow = order.dtype().equal(py::dtype("int32"));
    const void* documents = bytes_of(order, is_narrow ? "int32" : "int64", "order");
    if (seq_length < 1 || num_tokens < 1) throw std::invalid_argument("a sequence length and a number of tokens are positive");
    py::array_t<Row> rows({(num_tokens - 1) / seq_length + 1, static_cast<int64_t>(2)});
    int64_t found;
    {
        Row* to = rows.mutable_data();
        const int64_t count = order.size();
        py::gil_scoped_release released;
        const auto write = [&](auto* typed) {
            return write_sample_index(from, typed, count, seq_length, num_tokens, to, threads);
        };
        found = is_narrow ? write(static_cast<const int32_t*>(documents)) : write(static_cast<const int64_t*>(documents));
    }
    if (found != num_tokens)
        throw std::invalid_argument("the documents hold " + std::to_string(found) + " tokens, not " + std::to_string(num_tokens));
    return rows;
}

int shuffle(py::array array, py::array_t<uint32_t, py::array::c_style> key, int position) {
    const bool is_narrow = array.itemsize() == 4;
    if (array.ndim() != 1 || (!is_narrow && array.itemsize() != 8) || array.strides(0) != array.itemsize() ||
        array.size() > (int64_t{1} << 32) || key.size() != Twister::WORDS || position < 0 || position > Twister::WORDS)
        throw std::invalid_argument("only contiguous arrays of one dimension, 32 or 64 bits and at most 2^32 elements");
    void* data = array.mutable_data();
    Twister random(key.mutable_data(), position);
    const int64_t count = array.size();
    py::gil_scoped_release released;
    if (is_narrow) shuffle_as_numpy(static_cast<uint32_t*>(data), count, random);
    else shuffle_as_numpy(static_cast<uint64_t*>(data), count, random);
    return random.position();
}

py::tuple blend(const py::array& shares, int64_t size, const py::object& limits, int64_t segment, int threads) {
    const auto* share = reinterpret_cast<const double*>(bytes_of(shares, "float64", "shares"));
    const int64_t* limit = nullptr;
    if (!limits.is_none()) limit = reinterpret_cast<const int64_t*>(bytes_of(limits, "int64", "limits"));
    const int64_t datasets = shares.size();
    if (size < 0 || datasets < 1 || datasets > std::numeric_limits<int16_t>::max())
        throw std::invalid_argument("1 … 32767 datasets can be blended");
    py::array_t<int16_t> which(size);
    py::array_t<int64_t> sample(size);
    {
        int16_t* to = which.mutable_data();
        int64_t* and_to = sample.mutable_data();
        py::gil_scoped_release released;
        draw_blend(share, limit, static_cast<int>(datasets), size, segment, threads, to, and_to);
    }
    return py::make_tuple(which, sample);
}

template <typename Number, int WIDTH, typename Fill>
py::array shuffled_rows(int64_t seed, int64_t most, Fill fill) {
    Number* numbers;
    int64_t count;
    {
        py::gil_scoped_release released;
        Rows<Number, WIDTH> rows(most);
        fill(rows);
        count = rows.size();
        shuffle_rows<WIDTH>(rows.numbers(), count, static_cast<uint64_t>(seed + 1));
        numbers = rows.release();
    }
    const py::capsule owner(numbers, [](void* memory) { std::free(memory); });
    return py::array_t<Number>({count, static_cast<int64_t>(WIDTH)}, numbers, owner);
}

// A row has a sentence at least.
int64_t most_rows(const py::array& documents, const int64_t* bounds, int64_t epochs) {
    const int64_t sentences = bounds[documents.size() - 1] - bounds[0];
    return sentences < (int64_t{1} << 40) / std::max<int64_t>(epochs, 1) ? sentences * epochs : int64_t{1} << 40;
}

template <typename Number>
py::array mapping(const py::array& documents, const py::array& sizes, int64_t epochs, uint64_t max_samples, int64_t longest,
                  int64_t ratio, int64_t seed, int64_t least) {
    const auto* bounds = reinterpret_cast<const int64_t*>(bytes_of(documents, "int64", "documents"));
    const Lengths lengths(bytes_of(sizes, "int32", "sizes"));
    const int64_t count = documents.size() - 1;
    return shuffled_rows<Number, 3>(seed, most_rows(documents, bounds, epochs), [&](auto& rows) {
        map_sentences(rows, bounds, count, lengths, epochs, max_samples, longest, ratio, static_cast<uint32_t>(seed), least);
    });
}

template <typename Number>
py::array blocks_mapping(const py::array& documents, const py::array& sizes, const py::array& titles, int64_t epochs,
                         uint64_t max_samples, int64_t longest, int64_t seed, int64_t least) {
    const auto* bounds = reinterpret_cast<const int64_t*>(bytes_of(documents, "int64", "documents"));
    const Lengths lengths(bytes_of(sizes, "int32", "sizes")), title_lengths(bytes_of(titles, "int32", "title_sizes"));
    const int64_t count = documents.size() - 1;
    if (titles.size() < count) throw std::invalid_argument("every document has a title");
    return shuffled_rows<Number, 4>(seed, most_rows(documents, bounds, epochs), [&](auto& rows) {
        map_blocks(rows, bounds, count, lengths, title_lengths, epochs, max_samples, longest, least);
    });
}

}  // namespace

PYBIND11_MODULE(_index_builder, module) {
    module.doc() = "Index maps of datasets. See csrc/data/index_builder.cpp.";
    module.def("sample_index_int32", &sample_index<int32_t>);
    module.def("sample_index_int64", &sample_index<int64_t>);
    module.def("shuffle", &shuffle);
    module.def("blend", &blend);
    module.def("mapping_uint32", &mapping<uint32_t>);
    module.def("mapping_uint64", &mapping<uint64_t>);
    module.def("blocks_mapping_uint32", &blocks_mapping<uint32_t>);
    module.def("blocks_mapping_uint64", &blocks_mapping<uint64_t>);
}
