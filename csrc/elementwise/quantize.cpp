// Numbers as 8-bit or 4-bit integers with a scale for each block of neighbours, on the CPU, and back, in one pass over memory.
// The operations, and their bits, are those of megatron_ds/ops/quantize.py.
//
//   quantize     scale = max |x| of the block * (1/most)      most = 127 or 7      a block with infinity or NaN: NaN
//                code = x / scale, rounded to nearest even, in [-most, most]; 0 where the scale is 0 or NaN
//   dequantize   y = code * scale, rounded once
//
// The largest magnitude is that of the bits without the sign, as integers: NaN is above infinity, infinity above numbers. x / scale
// is below 2^22 (at most 1.5 most, where the scale is subnormal): adding and subtracting 1.5 * 2^23 rounds it to nearest even.
//
// Work: chunks of blocks, which threads take in turn; of a block, pieces that stay in the first cache. Loops have elements of one
// size; the compiler makes each for AVX-512, AVX2 and what the system was built for.
//
// Limits: types, sizes, contiguity are checked in Python. Blocks are even, so that two 4-bit codes of a byte are of one block.

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstring>
#include <limits>

#include "../common/pool.h"
#include "../common/processors.h"
#include "../common/vector_math.h"

namespace py = pybind11;

namespace {

constexpr int64_t CHUNK = 1 << 15, PIECE = 1024;
constexpr float TO_INTEGER = 12582912.0f;            // 1.5 * 2^23
constexpr uint32_t INFINITE = 0x7f800000u;

// Bits of the largest magnitude, as of an fp32 number.
INLINE uint32_t largest(const float* __restrict__ x, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return uint32_t(most);
}

INLINE uint32_t largest(const uint16_t* __restrict__ x, int64_t count) {
    uint16_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t bits = x[i] & 0x7fff;
        most = bits > most ? bits : most;
    }
    return uint32_t(most) << 16;
}

INLINE const float* wide(const float* x, float*, int64_t) { return x; }
INLINE const float* wide(const uint16_t* x, float* buffer, int64_t count) {
    widen(x, buffer, count);
    return buffer;
}

INLINE void encode(const float* __restrict__ x, int8_t* __restrict__ codes, int64_t count, float scale, float most) {
    for (int64_t i = 0; i < count; ++i) {
        float code = (x[i] / scale + TO_INTEGER) - TO_INTEGER;
        code = code > most ? most : code;
        code = code < -most ? -most : code;
        codes[i] = int8_t(int32_t(code));
    }
}

INLINE void pack(const int8_t* __restrict__ codes, int8_t* __restrict__ bytes, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        bytes[i] = int8_t((uint8_t(codes[2 * i]) & 15) | uint8_t(uint8_t(codes[2 * i + 1]) << 4));
}

INLINE void unpack(const int8_t* __restrict__ bytes, int8_t* __restrict__ codes, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        codes[2 * i] = int8_t(int8_t(uint8_t(bytes[i]) << 4) >> 4);
        codes[2 * i + 1] = int8_t(bytes[i] >> 4);
    }
}

// `count` numbers of one block. codes: from their first one on.
template <typename T>
INLINE float quantize_block(const T* x, int8_t* codes, int64_t count, bool is_half) {
    const float most = is_half ? 7.0f : 127.0f, part = is_half ? float(1.0 / 7) : float(1.0 / 127);
    const uint32_t bits = largest(x, count);
    float scale = float_of(bits) * part;
    if (bits >= INFINITE) scale = std::numeric_limits<float>::quiet_NaN();
    if (!(scale > 0)) {
        std::memset(codes, 0, size_t(is_half ? (count + 1) / 2 : count));
        return scale;
    }
    float buffer[PIECE];
    int8_t apart[PIECE + 1];
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t n = std::min(PIECE, count - i);
        encode(wide(x + i, buffer, n), is_half ? apart : codes + i, n, scale, most);
        if (is_half) {
            apart[n] = 0;
            pack(apart, codes + i / 2, (n + 1) / 2);
        }
    }
    return scale;
}

INLINE void store(const int8_t* __restrict__ codes, float* __restrict__ y, int64_t count, float scale) {
    for (int64_t i = 0; i < count; ++i) y[i] = float(codes[i]) * scale;
}

INLINE void store(const int8_t* __restrict__ codes, uint16_t* __restrict__ y, int64_t count, float scale) {
    float buffer[PIECE];
    store(codes, buffer, count, scale);
    narrow(buffer, y, count);
}

template <typename T>
INLINE void dequantize_block(const int8_t* codes, T* y, int64_t count, float scale, bool is_half) {
    int8_t apart[PIECE + 1];
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t n = std::min(PIECE, count - i);
        if (is_half) unpack(codes + i / 2, apart, (n + 1) / 2);
        store(is_half ? apart : codes + i, y + i, n, scale);
    }
}

struct Format {
    int64_t numel, block;
    bool is_half;
    int64_t blocks() const { return (numel + block - 1) / block; }
    int64_t count_of(int64_t b) const { return std::min(block, numel - b * block); }
    int64_t code_of(int64_t b) const { return is_half ? b * block / 2 : b * block; }
};

template <typename T>
INLINE void quantize(const T* x, int8_t* codes, float* scales, const Format& format, int64_t first, int64_t stop) {
    for (int64_t b = first; b < stop; ++b)
        scales[b] = quantize_block(x + b * format.block, codes + format.code_of(b), format.count_of(b), format.is_half);
}

template <typename T>
INLINE void dequantize(const int8_t* codes, const float* scales, T* y, const Format& format, int64_t first, int64_t stop) {
    for (int64_t b = first; b < stop; ++b)
        dequantize_block(codes + format.code_of(b), y + b * format.block, format.count_of(b), scales[b], format.is_half);
}

FOR_EACH_PROCESSOR void quantize_fp32(const float* x, int8_t* codes, float* scales, const Format& f, int64_t first, int64_t stop) {
    quantize(x, codes, scales, f, first, stop);
}

FOR_EACH_PROCESSOR void quantize_bf16(const uint16_t* x, int8_t* codes, float* scales, const Format& f, int64_t first,
                                      int64_t stop) {
    quantize(x, codes, scales, f, first, stop);
}

FOR_EACH_PROCESSOR void dequantize_fp32(const int8_t* codes, const float* scales, float* y, const Format& f, int64_t first,
                                        int64_t stop) {
    dequantize(codes, scales, y, f, first, stop);
}

FOR_EACH_PROCESSOR void dequantize_bf16(const int8_t* codes, const float* scales, uint16_t* y, const Format& f, int64_t first,
                                        int64_t stop) {
    dequantize(codes, scales, y, f, first, stop);
}

// -------------------------------------------------------------------------------------------------------------- binding
template <typename Part>
void share(const Format& format, int threads, const Part& part) {
    const int64_t each = std::max<int64_t>(1, CHUNK / format.block), blocks = format.blocks(), chunks = (blocks + each - 1) / each;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&] {
        for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;)
            part(chunk * each, std::min(blocks, (chunk + 1) * each));
    };
    run_on_threads(int(std::min<int64_t>(threads, chunks)), job);
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void run_quantize(uintptr_t x, uintptr_t codes, uintptr_t scales, int64_t numel, int64_t block, int bits, bool is_bf16,
                  int threads) {
    py::gil_scoped_release released;
    const Format format{numel, block, bits == 4};
    share(format, threads, [&](int64_t first, int64_t stop) {
        is_bf16 ? quantize_bf16(at<uint16_t>(x), at<int8_t>(codes), at<float>(scales), format, first, stop)
                : quantize_fp32(at<float>(x), at<int8_t>(codes), at<float>(scales), format, first, stop);
    });
}

void run_dequantize(uintptr_t codes, uintptr_t scales, uintptr_t y, int64_t numel, int64_t block, int bits, bool is_bf16,
                    int threads) {
    py::gil_scoped_release released;
    const Format format{numel, block, bits == 4};
    share(format, threads, [&](int64_t first, int64_t stop) {
        is_bf16 ? dequantize_bf16(at<int8_t>(codes), at<float>(scales), at<uint16_t>(y), format, first, stop)
                : dequantize_fp32(at<int8_t>(codes), at<float>(scales), at<float>(y), format, first, stop);
    });
}

}  // namespace

PYBIND11_MODULE(_quantize, module) {
    module.doc() = "Blocks of integers of contiguous fp32 or bf16 arrays, given by address; megatron_ds.ops.quantize is the way in.";
    module.def("quantize", &run_quantize, py::arg("x"), py::arg("codes"), py::arg("scales"), py::arg("numel"), py::arg("block"),
               py::arg("bits"), py::arg("is_bf16"), py::arg("threads"));
    module.def("dequantize", &run_dequantize, py::arg("codes"), py::arg("scales"), py::arg("y"), py::arg("numel"), py::arg("block"),
               py::arg("bits"), py::arg("is_bf16"), py::arg("threads"));
}
