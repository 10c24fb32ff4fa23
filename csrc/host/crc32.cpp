// CRC-32 (zlib's, of zip archives) by products of polynomials without carries, an instruction of x86 processors since 2010.
//
// Derived from V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009. The message
// is a polynomial over the field of two elements; its first bit has the highest degree, and bit 0 of a byte comes first. A register
// of 16 bytes A is followed by D further bits. Modulo P,
//
//     A x^D = first 8 bytes · (x^(D+64) mod P) + last 8 bytes · (x^D mod P)
//
// so it is replaced by this sum, of 95 bits at most, in the place D bits later. Four registers go through the message 64 bytes at a
// time. In the order of bits above, the instruction gives the product divided by x; the factors below are therefore of one degree less.
//
// The result is that of zlib.crc32 on every input, which tests compare. Python (megatron_ds/host/checksum.py) takes zlib where the
// processor lacks the instruction, and for short inputs.

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__GNUC__) && defined(__x86_64__)
#define HAS_X86_VECTORS 1
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

constexpr uint32_t P = 0xEDB88320;      // bit 31 is the coefficient of x^0; that of x^32 is left out

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (a & 1 ? P : 0); }

constexpr std::array<uint32_t, 256> table() {
    std::array<uint32_t, 256> found{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t a = byte;
        for (int bit = 0; bit < 8; ++bit) a = times_x(a);
        found[byte] = a;
    }
    return found;
}

// Continue without the inversion at start and end.
uint32_t by_bytes(uint32_t crc, const uint8_t* at, size_t count) {
    static constexpr auto TABLE = table();
    for (size_t i = 0; i < count; ++i) crc = crc >> 8 ^ TABLE[(crc ^ at[i]) & 255];
    return crc;
}

#ifdef HAS_X86_VECTORS
// x^n mod P, in the upper half of 64 bits: there, too, the highest bit is the coefficient of x^0.
constexpr uint64_t power(int n) {
    uint32_t a = 0x80000000;
    for (int i = 0; i < n; ++i) a = times_x(a);
    return uint64_t(a) << 32;
}

#define WITH_PRODUCTS __attribute__((target("pclmul,sse4.1")))

// `a` moved by D bits, with the factors x^(D + 63) and x^(D - 1).
WITH_PRODUCTS inline __m128i moved(__m128i a, __m128i factors) {
    return _mm_xor_si128(_mm_clmulepi64_si128(a, factors, 0x00), _mm_clmulepi64_si128(a, factors, 0x11));
}

WITH_PRODUCTS inline __m128i load(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

WITH_PRODUCTS uint32_t by_products(uint32_t crc, const uint8_t* at, size_t count) {
    if (count < 64) return by_bytes(crc, at, count);
    __m128i registers[4];
    for (int i = 0; i < 4; ++i) registers[i] = load(at + 16 * i);
    registers[0] = _mm_xor_si128(registers[0], _mm_cvtsi32_si128(int(crc)));
    at += 64, count -= 64;
    const __m128i by_512 = _mm_set_epi64x(int64_t(power(511)), int64_t(power(575)));
    for (; count >= 64; at += 64, count -= 64)
        for (int i = 0; i < 4; ++i) registers[i] = _mm_xor_si128(moved(registers[i], by_512), load(at + 16 * i));
    const __m128i by_128 = _mm_set_epi64x(int64_t(power(127)), int64_t(power(191)));
    for (int i = 1; i < 4; ++i) registers[i] = _mm_xor_si128(moved(registers[i - 1], by_128), registers[i]);
    alignas(16) uint8_t rest[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(rest), registers[3]);
    return by_bytes(by_bytes(0, rest, 16), at, count);
}

#define WITH_WIDE_PRODUCTS __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))

// The same with registers of 64 bytes, each of four parts. What they hold at the end is a message of 256 bytes.
WITH_WIDE_PRODUCTS uint32_t by_wide_products(uint32_t crc, const uint8_t* at, size_t count) {
    if (count < 1024) return by_products(crc, at, count);
    __m512i registers[4];
    for (int i = 0; i < 4; ++i) registers[i] = _mm512_loadu_si512(at + 64 * i);
    registers[0] = _mm512_xor_si512(registers[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
    at += 256, count -= 256;
    const __m512i by_2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(int64_t(power(2047)), int64_t(power(2111))));
    for (; count >= 256; at += 256, count -= 256)
        for (int i = 0; i < 4; ++i)
            registers[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(registers[i], by_2048, 0x00),
                                                     _mm512_clmulepi64_epi128(registers[i], by_2048, 0x11),
                                                     _mm512_loadu_si512(at + 64 * i), 0x96);    // exclusive or
    alignas(64) uint8_t rest[256];
    for (int i = 0; i < 4; ++i) _mm512_store_si512(rest + 64 * i, registers[i]);
    return by_products(by_products(0, rest, 256), at, count);
}
#endif

// The ways that this processor has, the fastest last.
struct Way {
    const char* name;
    uint32_t (*run)(uint32_t, const uint8_t*, size_t);
};

std::vector<Way> ways() {
    std::vector<Way> found{{"bytes", by_bytes}};
#ifdef HAS_X86_VECTORS
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        found.push_back({"products", by_products});
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
            found.push_back({"wide products", by_wide_products});
    }
#endif
    return found;
}

const std::vector<Way> WAYS = ways();

uint32_t crc32(const py::object& data, uint32_t value, size_t way) {
    if (way >= WAYS.size()) throw py::value_error("this processor does not have that way");
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw py::error_already_set();
    uint32_t found = 0;
    {
        py::gil_scoped_release released;
        found = ~WAYS[way].run(~value, static_cast<const uint8_t*>(view.buf), size_t(view.len));
    }
    PyBuffer_Release(&view);
    return found;
}

}  // namespace

PYBIND11_MODULE(_crc32, m) {
    m.doc() = "CRC-32 of zlib, by products without carries.";
    py::list names;
    for (const Way& way : WAYS) names.append(way.name);
    m.attr("WAYS") = py::tuple(names);      // by which this processor can compute it, the fastest last
    m.def("crc32", &crc32, py::arg("data"), py::arg("value") = 0, py::arg("way") = WAYS.size() - 1,
          "CRC-32 of a contiguous buffer, continued from that of the bytes before it. way: index into WAYS.");
}
