// Text → pieces that are never merged with each other: by GPT-2's pattern, or by the newer one of GPT-4 and Llama 3.
//
// Without regular expressions: the patterns depend on the class of each character only, so each alternative is a small loop.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace {

enum Class : uint8_t { OTHER = 0, LETTER = 1, NUMBER = 2, SPACE = 3 };

struct Character {
    uint32_t code;
    uint32_t size;          // bytes
};

Character character_at(const char* p) {
    const auto* u = reinterpret_cast<const uint8_t*>(p);
    if (u[0] < 0x80) return {u[0], 1};
    if (u[0] < 0xe0) return {uint32_t(u[0] & 0x1f) << 6 | (u[1] & 0x3fu), 2};
    if (u[0] < 0xf0) return {uint32_t(u[0] & 0x0f) << 12 | (u[1] & 0x3fu) << 6 | (u[2] & 0x3fu), 3};
    return {uint32_t(u[0] & 0x07) << 18 | (u[1] & 0x3fu) << 12 | (u[2] & 0x3fu) << 6 | (u[3] & 0x3fu), 4};
}

struct Cutter {
    std::string classes;    // a Class for each code point
    bool newer;             // the pattern of GPT-4 and Llama 3 instead of GPT-2's
    int most_digits;        // of a number, in the newer pattern

    Class of(uint32_t code) const { return Class(classes[code]); }
    Class at(const char* p) const { return uint8_t(*p) < 0x80 ? Class(classes[uint8_t(*p)]) : of(character_at(p).code); }

    // Where the run of characters of a class ends that begins at p.
    const char* run(const char* p, const char* end, Class wanted) const {
        while (p < end) {
            while (p < end && uint8_t(*p) < 0x80) {
                if (Class(classes[uint8_t(*p)]) != wanted) return p;
                ++p;
            }
            if (p == end) break;
            const Character c = character_at(p);
            if (of(c.code) != wanted) break;
            p += c.size;
        }
        return p;
    }

    const char* next(const char* p, const char* end) const { return newer ? next_newer(p, end) : next_gpt2(p, end); }

    // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    const char* next_gpt2(const char* p, const char* end) const {
        if (*p == '\'')
            if (const int size = contraction(p, end, false)) return p + size;
        const char* q = p + (*p == ' ' && p + 1 < end);
        const Class first = at(q);
        return first == SPACE ? spaces(p, end) : run(q, end, first);
    }

    // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
    const char* next_newer(const char* p, const char* end) const {
        if (*p == '\'')
            if (const int size = contraction(p, end, true)) return p + size;
        const Character c = character_at(p);
        const Class first = of(c.code);
        const char* q = p + c.size;
        if (first == LETTER) return run(q, end, LETTER);
        if (first == NUMBER) {
            for (int n = 1; n < most_digits && q < end && at(q) == NUMBER; ++n) q += character_at(q).size;
            return q;
        }
        if (q < end && c.code != '\r' && c.code != '\n' && at(q) == LETTER) return run(q, end, LETTER);
        if (first == OTHER || (c.code == ' ' && q < end && at(q) == OTHER)) {
            q = run(q, end, OTHER);
            while (q < end && (*q == '\r' || *q == '\n')) ++q;
            return q;
        }
        const char* after = run(p, end, SPACE);
        for (const char* last = after; last > p; --last)
            if (last[-1] == '\r' || last[-1] == '\n') return last;
        return spaces(p, end);
    }

    // White space up to the last character before a word, which goes with the word; all of it at the end of the text.
    const char* spaces(const char* p, const char* end) const {
        const char* after = run(p, end, SPACE);
        if (after == end) return after;
        const char* last = after - 1;
        while ((*last & 0xc0) == 0x80) --last;
        return last > p ? last : after;
    }

    static int contraction(const char* p, const char* end, bool any_case) {
        const auto letter = [&](ptrdiff_t i) -> int {
            if (end - p <= i) return 0;
            return any_case && p[i] >= 'A' && p[i] <= 'Z' ? p[i] + 32 : uint8_t(p[i]);
        };
        const int a = letter(1), b = letter(2);
        if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
        if (any_case && a == 0xc5 && b == 0xbf) return 3;       // U+017F, the long s, is an s when case does not count
        return 0;
    }
};

}  // namespace
