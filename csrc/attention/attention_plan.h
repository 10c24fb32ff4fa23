// What a call of attention is about, without a vector: tensors, the keys that queries see, memory, and parts of the work.
//
// Work: a tile of ROWS queries is four registers, each of which is a *unit* of WIDE queries; keys are units of WIDE, too. A span is
// a list of units of keys that neighbouring registers of the tile see, and no other register: so a unit that the pattern hides is
// not computed.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "../common/bf16_vectors.h"

namespace {

constexpr int64_t ROWS = 64, REGISTERS = ROWS / WIDE;      // queries of a tile, and its registers
constexpr int64_t UNITS = 4, MOST_KEYS = UNITS * WIDE;     // worked on at once, in forward PER times as many
constexpr int64_t AHEAD = 8;                               // units that are fetched before they are worked on, as in key_spans.py
constexpr float LN_2 = 0.693147181f, HIDDEN = -std::numeric_limits<float>::infinity();
constexpr float EMPTY = std::numeric_limits<float>::infinity();      // log-sum-exp of a row that sees nothing

using Sizes = std::array<int64_t, 7>;      // queries, keys, samples, query heads, key heads, d, keys that are packed at a time
using Place = std::array<int64_t, 4>;      // address, and the strides of rows, samples and heads in elements

// Rows of one head: the numbers of a row lie together.
template <typename T>
struct Rows {
    T* data;
    int64_t stride;
    T* operator[](int64_t row) const { return data + row * stride; }
    Rows from(int64_t row) const { return {data + row * stride, stride}; }
};

template <typename T>
Rows<T> rows_of(const Place& x, int64_t sample, int64_t head) {
    return {reinterpret_cast<T*>(x[0]) + sample * x[2] + head * x[3], x[1]};
}

// ---------------------------------------------------------------------------------------------------------- what queries see
// What all heads of a call share. A query sees the keys from `before` positions before it to `after` positions after it, of those
// that the spans show. offset: positions from the first query to the first key.
struct Call {
    int64_t queries, keys, d, offset, before, after;
    float scale;
};

// Units [from, to) of the list that registers [low, high) of a tile see.
struct Span {
    int32_t from, to, low, high;
};

// Of a head: its spans by tile; the last tile that sees a unit; how many units there are at most at a time between the first and the
// last tile that see them; the ids of its sample, or null: a query sees keys of its own id; the slope of ALiBi, or 0.
struct Plan {
    const int32_t* first;      // span of each tile, and of the end
    const Span* spans;
    const int32_t* units;      // of all spans
    const int32_t* last_tile;
    int64_t live;
    const int32_t *query_ids, *key_ids;
    float slope;
};

// Some units that registers [low, high) of a tile see.
struct Part {
    const int32_t* units;
    int64_t count, low, high;
};

// What queries see: offset, before and after of `Call`; and addresses of what Python has planned: of each head its number among
// the layouts; of each layout the first span of each tile and of the end; the spans; their units; of each layout the last tile of
// each unit, and the number of units at a time; ids of queries and of keys [samples, a multiple of WIDE], or 0; sinks and slopes
// [heads], or 0.
struct Shown {
    std::array<int64_t, 3> positions;
    std::array<uintptr_t, 10> addresses;

    template <typename T>
    const T* at(size_t i) const { return reinterpret_cast<const T*>(addresses[i]); }

    Call call(const Sizes& sizes, float scale) const {
        return {sizes[0], sizes[1], sizes[5], positions[0], positions[1], positions[2], scale};
    }
    Plan plan(const Sizes& sizes, int64_t sample, int64_t head) const {
        const int64_t tiles = rounded_up(sizes[0], ROWS) / ROWS;
        const auto ids = [&](size_t i, int64_t count) { return addresses[i] ? at<int32_t>(i) + sample * rounded_up(count, WIDE) : nullptr; };
        const int32_t layout = at<int32_t>(0)[head];
        const float slope = addresses[9] ? at<float>(9)[head] : 0;
        const int32_t* last_tile = at<int32_t>(4) + layout * (rounded_up(sizes[1], WIDE) / WIDE);
        return {at<int32_t>(1) + layout * (tiles + 1), at<Span>(2), at<int32_t>(3), last_tile, at<int32_t>(5)[layout],
                ids(6, sizes[0]), ids(7, sizes[1]), slope};
    }
    const float* sink(int64_t head) const { return addresses[8] ? at<float>(8) + head : nullptr; }
};

// ------------------------------------------------------------------------------------------------------------------ functions
// What an instruction set has for numbers of a type: sizes, tensors, arrays with a number for each row, scale, what queries see,
// memory, threads.
template <size_t TENSORS, size_t ARRAYS>
using OfHeads = void (*)(const Sizes&, const std::array<Place, TENSORS>&, const std::array<uintptr_t, ARRAYS>&, float, const Shown&,
                         uintptr_t, int);

struct Functions {
    OfHeads<4, 1> forward;                // writes out; of rows: lse
    OfHeads<7, 2> backward;               // writes dq, dk and dv; of rows: lse and D are read
    OfHeads<7, 2> add_gradients;          // as backward, but adds to fp32 dq, dk and dv
    void (*dots)(const std::array<int64_t, 4>& sizes, const std::array<Place, 2>& tensors, uintptr_t dots, int threads);
    int64_t (*forward_bytes)(const Sizes&);      // memory of a thread
    int64_t (*backward_bytes)(const Sizes&);
};

// Equal parts of some pieces.
struct Cut {
    int64_t pieces, parts;

    Cut(int64_t pieces, int64_t most) : pieces(pieces), parts(std::max<int64_t>(1, std::min(most, pieces))) {}
    int64_t at(int64_t part) const { return pieces * part / parts; }
};

}  // namespace
