// Rotary position embedding on the CPU, of one tensor, or of packed queries, keys and values while they are split or put together.
//
// Maths (Su et al. 2021, arXiv:2104.09864, section 3.4.2), for a pair (a, b) of a head and the angle of its position:
//
//   a' = a cos - b sin      b' = b cos + a sin      the gradient is turned back: direction -1
//
// Work: runs of positions and samples, which threads take in turn; each number is read and written once. The compiler makes each
// loop for AVX-512, AVX2 and what the system was built for; bf16 numbers are widened and rounded head by head.
//
// Bits: those of torch's operations on processors with fused multiply-add: the first product is rounded, the second is not.
//
// Limits: types, sizes and strides are checked in Python, which knows tensors.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t MOST_CHANNELS = 1024, CHUNK = 1 << 15;      // numbers of a head; of what a thread takes, about

// A tensor [positions, samples, heads, channels]: address, strides of the first three in elements.
using Place = std::array<int64_t, 4>;

struct Call {
    Place packed;                       // of `slots` heads in each group: queries, a key, a value
    std::array<Place, 3> parts;         // queries, keys, values; of them only the first two are turned
    const float *cos, *sin;             // [positions, samples or 1, pairs]
    int64_t table_position, table_sample;
    int64_t positions, samples, groups, slots, queries, channels, pairs;
    bool is_interleaved, to_packed;
    float direction;
};

template <typename T>
INLINE T* head_of(const Place& x, int64_t position, int64_t sample, int64_t head) {
    return reinterpret_cast<T*>(x[0]) + position * x[1] + sample * x[2] + head * x[3];
}

// y = x turned; distance: between the channels of a pair; step: between pairs.
INLINE void turn(const float* __restrict__ x, float* __restrict__ y, const float* __restrict__ cos, const float* __restrict__ sin,
                 int64_t pairs, int64_t distance, int64_t step, float direction) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[i * step], b = x[i * step + distance], back = direction * sin[i];
        const float of_a = a * cos[i], of_b = b * cos[i];
        y[i * step] = std::fma(-back, b, of_a);
        y[i * step + distance] = std::fma(back, a, of_b);
    }
}

INLINE void turn_head(const Call& call, const float* x, float* y, const float* cos, const float* sin) {
    if (call.is_interleaved)
        turn(x, y, cos, sin, call.pairs, 1, 2, call.direction);
    else
        turn(x, y, cos, sin, call.pairs, call.pairs, 1, call.direction);
}

INLINE void move_head(const Call& call, const float* x, float* y, const float* cos, const float* sin, bool is_turned) {
    const int64_t turned = is_turned ? 2 * call.pairs : 0;
    if (is_turned) turn_head(call, x, y, cos, sin);
    std::memcpy(y + turned, x + turned, size_t(call.channels - turned) * sizeof(float));
}

INLINE void move_head(const Call& call, const uint16_t* x, uint16_t* y, const float* cos, const float* sin, bool is_turned) {
    float wide[MOST_CHANNELS], result[MOST_CHANNELS];
    const int64_t turned = is_turned ? 2 * call.pairs : 0;
    if (is_turned) {
        widen(x, wide, turned);
        turn_head(call, wide, result, cos, sin);
        narrow(result, y, turned);
    }
    std::memcpy(y + turned, x + turned, size_t(call.channels - turned) * sizeof(uint16_t));
}

// Row i is sample i % samples of position i / samples.
template <typename T>
INLINE void move_rows(const Call& call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t position = row / call.samples, sample = row % call.samples;
        const int64_t angle = position * call.table_position + sample * call.table_sample;
        for (int64_t head = 0; head < call.groups * call.slots; ++head) {
            const int64_t group = head / call.slots, slot = head % call.slots;
            const int64_t part = std::max<int64_t>(0, slot - call.queries + 1);
            const int64_t of_part = part == 0 ? group * call.queries + slot : group;
            T* packed = head_of<T>(call.packed, position, sample, head);
            T* apart = head_of<T>(call.parts[size_t(part)], position, sample, of_part);
            move_head(call, call.to_packed ? apart : packed, call.to_packed ? packed : apart, call.cos + angle, call.sin + angle,
                      part < 2);
        }
    }
}

FOR_EACH_PROCESSOR void move_fp32(const Call& call, int64_t first, int64_t last) { move_rows<float>(call, first, last); }

FOR_EACH_PROCESSOR void move_bf16(const Call& call, int64_t first, int64_t last) { move_rows<uint16_t>(call, first, last); }

// -------------------------------------------------------------------------------------------------------------- binding
void rotate(const Place& packed, const std::array<Place, 3>& parts, const std::array<uintptr_t, 2>& tables,
            const std::array<int64_t, 2>& table_strides, const std::array<int64_t, 7>& sizes, bool is_interleaved, bool to_packed,
            float direction, bool is_bf16, int threads) {
    py::gil_scoped_release released;
    const auto [positions, samples, groups, slots, queries, channels, pairs] = sizes;
    const Call call{packed, parts, reinterpret_cast<const float*>(tables[0]), reinterpret_cast<const float*>(tables[1]),
                    table_strides[0], table_strides[1], positions, samples, groups, slots, queries, channels, pairs,
                    is_interleaved, to_packed, direction};
    const int64_t rows = positions * samples, size = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, groups * slots * channels));
    const int64_t chunks = (rows + size - 1) / size;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < chunks;)
            (is_bf16 ? move_bf16 : move_fp32)(call, i * size, std::min(rows, (i + 1) * size));
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

}  // namespace

PYBIND11_MODULE(_rotary, module) {
    module.doc() = "Rotary position embedding of fp32 or bf16 heads, given by address; megatron_ds.ops.rotary is the way in.";
    module.attr("MOST_CHANNELS") = MOST_CHANNELS;
    module.def("rotate", &rotate, py::arg("packed"), py::arg("parts"), py::arg("tables"), py::arg("table_strides"), py::arg("sizes"),
               py::arg("is_interleaved"), py::arg("to_packed"), py::arg("direction"), py::arg("is_bf16"), py::arg("threads"));
}
