// Arithmetic on four double precision numbers at once, in what GCC and Clang have for it; elsewhere one after the other.

#pragma once

#include <cstring>

#include "../common/processors.h"

namespace {

// Four numbers side by side; compilers make vector instructions of it.
struct Lanes {
    static constexpr int WIDTH = 4;
#if defined(__GNUC__)
    typedef double Vector __attribute__((vector_size(WIDTH * sizeof(double))));
    static INLINE_MEMBER Vector all(double x) { return Vector{x, x, x, x}; }
    static INLINE_MEMBER Vector larger(Vector a, Vector b) { return a > b ? a : b; }
    static INLINE_MEMBER Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
    static INLINE_MEMBER Vector where_equal(Vector a, Vector b, Vector then, Vector otherwise) { return a == b ? then : otherwise; }
#else
    struct Vector {
        double x[WIDTH];
        double operator[](int i) const { return x[i]; }
    };
    template <typename F> static Vector each(F f) { return {{f(0), f(1), f(2), f(3)}}; }
    static Vector all(double x) { return {{x, x, x, x}}; }
    static Vector larger(Vector a, Vector b) { return each([&](int i) { return a[i] > b[i] ? a[i] : b[i]; }); }
    static Vector smaller(Vector a, Vector b) { return each([&](int i) { return a[i] < b[i] ? a[i] : b[i]; }); }
    static Vector where_equal(Vector a, Vector b, Vector then, Vector otherwise) {
        return each([&](int i) { return a[i] == b[i] ? then[i] : otherwise[i]; });
    }
    friend Vector operator+(Vector a, Vector b) { return each([&](int i) { return a[i] + b[i]; }); }
    friend Vector operator*(Vector a, Vector b) { return each([&](int i) { return a[i] * b[i]; }); }
    friend Vector operator-(Vector a, Vector b) { return each([&](int i) { return a[i] - b[i]; }); }
#endif
    static INLINE_MEMBER Vector load(const double* from) {
        Vector v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static INLINE_MEMBER void store(Vector v, double* to) { std::memcpy(to, &v, sizeof v); }
    // The largest and the smallest of four, in all four places.
    static INLINE_MEMBER Vector largest(Vector v) { return v = larger(v, halves(v)), larger(v, pairs(v)); }
    static INLINE_MEMBER Vector smallest(Vector v) { return v = smaller(v, halves(v)), smaller(v, pairs(v)); }

private:
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
    static INLINE_MEMBER Vector halves(Vector v) { return __builtin_shufflevector(v, v, 2, 3, 0, 1); }
    static INLINE_MEMBER Vector pairs(Vector v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }
#else
    static Vector halves(Vector v) { return Vector{v[2], v[3], v[0], v[1]}; }
    static Vector pairs(Vector v) { return Vector{v[1], v[0], v[3], v[2]}; }
#endif
};

}  // namespace
