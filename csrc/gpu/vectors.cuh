// Loads and stores of WIDTH elements, a power of two of at most 16 bytes in all, for rows that are not whole
// packets of 16 bytes. Addresses are multiples of WIDTH elements.
#pragma once
#include "device.cuh"

template <int WIDTH, class T> INLINE Vec<T, WIDTH> take(const T* p) {
    return *reinterpret_cast<const Vec<T, WIDTH>*>(p);
}
template <int WIDTH, class T> INLINE void put(T* p, const Vec<T, WIDTH>& v) {
    *reinterpret_cast<Vec<T, WIDTH>*>(p) = v;
}
