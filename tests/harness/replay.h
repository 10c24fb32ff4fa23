// Recorded launches of kernels again, in a program without Python: each tensor is an allocation of its own,
// whose bounds a sanitizer knows. sanitized.py writes the file and the main function.
//
// The file, in numbers of 64 bits. Bytes are their number, and they themselves, padded to 8. For each launch:
// grid (3), block (3), the number of tensors, the bytes of each; the number of arguments; for each the number
// of its tensor or -1, and the bytes of the offset in the tensor or of the value.
#pragma once
#include <string.h>

#include "emulate.h"

struct Replay {
    FILE* file;
    uint64_t seed;
    Replay(const char* path, uint64_t seed) : file(fopen(path, "rb")), seed(seed) {}

    int64_t number() {
        int64_t n;
        if (fread(&n, sizeof n, 1, file) == 1) return n;
        fputs("the recorded launches end early\n", stderr);
        exit(3);
    }
    char* bytes() {
        const int64_t size = number();
        char* memory = static_cast<char*>(aligned_alloc(16, size + 15 & ~15));
        char* exact = static_cast<char*>(realloc(memory, size));        // aligned_alloc takes multiples of 16
        for (int64_t at = 0; at < size; at += 8) {
            const int64_t n = number();
            memcpy(exact + at, &n, size - at < 8 ? size - at : 8);
        }
        return exact;
    }
    template <class... A> void launch(void (*kernel)(A...)) {
        unsigned grid[3], block[3];
        for (unsigned& n : grid) n = number();
        for (unsigned& n : block) n = number();
        char* tensors[32];
        const int count = number();
        for (int i = 0; i < count; ++i) tensors[i] = bytes();
        char* values[32];
        const int given = number();
        for (int i = 0; i < given; ++i) {
            const int64_t which = number();
            values[i] = bytes();
            if (which >= 0) *reinterpret_cast<int64_t*>(values[i]) += int64_t(tensors[which]);
        }
        char text[512];
        if (const int error = emu::launch(kernel, grid, block, reinterpret_cast<void**>(values), seed, text,
                                           sizeof text)) {
            fputs(error == 2 ? text : "no GPU takes this grid or block", stderr);
            exit(4);
        }
        for (int i = 0; i < count; ++i) free(tensors[i]);
        for (int i = 0; i < given; ++i) free(values[i]);
    }
};
