// Products of packed numbers, whose sums stay in registers or tiles, and copies of rows in the order in which they are read.
//
// Of a product C = A B, packed numbers of A are single ones in memory, of any strides; those of B are rows of sixteen or more. One
// function serves all seven products of attention.

// A of M rows and `depth` packed numbers with any strides, B of `depth` rows of R registers. Of several parts, B begins at multiples
// of `part_size`, which are anywhere, and A continues: the sums of all parts stay in registers. (On tiles, A is anywhere, and B
// continues.)
template <typename N>
struct Factors {
    using Packed = typename N::Packed;
    const Packed* a;
    int64_t a_row, a_step;
    const Packed* b;
    int64_t b_row, depth;
    Fetches& fetches;      // has a step for some rows of C
    const int32_t* parts = nullptr;
    int64_t count = 1, part_size = 0;
};

// A thread that multiplies numbers of type N has an object of it.
template <typename N>
class ReadyToMultiply {};

enum class Put { SET, ADDED, RESCALED };      // C = A B,    C += A B,    C = C factor[row] + A B (on tiles factor[column])

template <Put put, int M, int R, typename N>
INLINE void multiply_of(const Factors<N>& x, float* c, int64_t c_row, const float* factor) {
    constexpr int APART = 4;      // rows of A: distances to sixteen rows from one pointer would not fit the registers
    Vector sums[M][R];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) {
            const float* at = c + i * c_row + j * WIDE;
            if (put == Put::SET) sums[i][j] = zeros();
            if (put == Put::ADDED) sums[i][j] = register_of(at);
            if (put == Put::RESCALED) sums[i][j] = register_of(at) * broadcast(factor[i]);
        }
    const typename N::Packed *a[M / APART], *b = x.b;
    for (int i = 0; i < M / APART; ++i) a[i] = x.a + i * APART * x.a_row;
    for (int64_t part = 0; part < x.count; ++part) {
        if (x.parts != nullptr) b = x.b + x.parts[part] * x.part_size;
        for (int64_t k = 0; k < x.depth; ++k, b += x.b_row) {
            decltype(register_of(b)) row[R];
#pragma GCC unroll 16
            for (int j = 0; j < R; ++j) row[j] = register_of(b + j * WIDE);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const auto one = broadcast(a[i / APART][i % APART * x.a_row]);
#pragma GCC unroll 16
                for (int j = 0; j < R; ++j) sums[i][j] = sum_of(sums[i][j], one, row[j]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < M / APART; ++i) a[i] += x.a_step;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) store(c + i * c_row + j * WIDE, sums[i][j]);
}

template <Put put, int M, int R, typename N>
INLINE void multiply_in_steps(Factors<N> x, int64_t rows, float* c, int64_t c_row, const float* factor) {
    for (int64_t i = 0; i < rows; i += M, x.a += M * x.a_row) {
        x.fetches.step();
        multiply_of<put, M, R>(x, c + i * c_row, c_row, put == Put::RESCALED ? factor + i : factor);
    }
}

template <Put put, typename N>
INLINE void multiply_by_tiles(const Factors<N>& x, int64_t rows, int64_t registers, float* c, int64_t c_row, const float* factor);

// C of `rows`, a multiple of WIDE, and 1 to 4 registers.
template <Put put, typename N>
INLINE void multiply(const Factors<N>& x, int64_t rows, int64_t registers, float* c, int64_t c_row, const float* factor = nullptr) {
    if constexpr (N::HAS_TILES) {
        multiply_by_tiles<put>(x, rows, registers, c, c_row, factor);
    } else if constexpr (SUMS == 16) {
        switch (registers) {
            case 4: return multiply_in_steps<put, 4, 4>(x, rows, c, c_row, factor);
            case 3: return multiply_in_steps<put, 4, 3>(x, rows, c, c_row, factor);
            case 2: return multiply_in_steps<put, 8, 2>(x, rows, c, c_row, factor);
            default: return multiply_in_steps<put, 16, 1>(x, rows, c, c_row, factor);
        }
    } else {
        for (int64_t j = 0; j < registers; ++j) {
            Factors<N> column = x;
            column.b += j * WIDE;
            multiply_in_steps<put, SUMS, 1>(column, rows, c + j * WIDE, c_row, factor);
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- packing
// `count` rows, at most ROWS → columns [d / PER, ROWS]; zeros after them.
template <typename N>
void take_columns(Rows<const typename N::Number> x, int64_t count, int64_t d, typename N::Packed* y) {
    for (int64_t row = 0; row < ROWS; row += WIDE)
        for (int64_t j = 0; j < d / N::PER; j += WIDE) {
            Integers tile[WIDE];
            for (int64_t i = 0; i < WIDE; ++i)
                tile[i] = row + i < count ? load(x[row + i] + N::PER * j) : no_integers();
            transpose(tile);
            for (int64_t i = 0; i < WIDE; ++i) store(y + (j + i) * ROWS + row, tile[i]);
        }
}

// `count` rows → [count, d / PER]; zeros after them, up to a multiple of WIDE rows.
template <typename N>
INLINE void take_rows(Rows<const typename N::Number> x, int64_t count, int64_t d, typename N::Packed* y) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < d / N::PER; j += WIDE) store(y + i * d / N::PER + j, load(x[i] + N::PER * j));
    std::memset(y + count * d / N::PER, 0, size_t(rounded_up(count, WIDE) - count) * size_t(d) * sizeof(typename N::Number));
}

// `count` rows → [count / PER, d], of bf16 pairs of rows; zeros as above.
INLINE void take_pairs(Rows<const float> x, int64_t count, int64_t d, float* y) { take_rows<Fp32>(x, count, d, y); }

// An fp32 number to which others are added.
struct Sum {
    float so_far;
};
INLINE void put_row(Sum* y, Vector x) { put_row(&y->so_far, register_of(&y->so_far) + x); }

// Rows of a head's gradient: numbers of the type of its tensors, which are overwritten, or sums, to which the gradient is added.
template <typename Number>
struct Gradient {
    Rows<Number> numbers;
    Rows<Sum> sums;
    bool adds;

    Gradient(const Place& x, int64_t sample, int64_t head, bool adds)
        : numbers(rows_of<Number>(x, sample, head)), sums(rows_of<Sum>(x, sample, head)), adds(adds) {}

    // Calls put(rows) with the rows from `first` on, of either type.
    template <typename Do>
    void from(int64_t first, const Do& put) const {
        if (adds)
            put(sums.from(first));
        else
            put(numbers.from(first));
    }
};

// [count, d] times a factor of each row, if there are any → rows.
template <typename Number>
void put_rows(const float* x, const float* factor, int64_t count, int64_t d, Rows<Number> y) {
    for (int64_t i = 0; i < count; ++i) {
        const Vector times = broadcast(factor == nullptr ? 1.0f : factor[i]);
        for (int64_t j = 0; j < d; j += WIDE) put_row(y[i] + j, register_of(x + i * d + j) * times);
    }
}

// The same of [d, ROWS].
template <typename Number>
void put_columns(const float* x, const float* factor, int64_t count, int64_t d, Rows<Number> y) {
    for (int64_t row = 0; row < count; row += WIDE)
        for (int64_t j = 0; j < d; j += WIDE) {
            Integers tile[WIDE];
            const Vector times = factor == nullptr ? broadcast(1.0f) : register_of(factor + row);
            for (int64_t i = 0; i < WIDE; ++i) tile[i] = bits_of(register_of(x + (j + i) * ROWS + row) * times);
            transpose(tile);
            for (int64_t i = 0; i < std::min(WIDE, count - row); ++i) put_row(y[row + i] + j, floats_of(tile[i]));
        }
}

// ----------------------------------------------------------------------------------------------------------- sums of a tile of queries
// What some units of keys add to the sums of a tile of queries, [ROWS, d]: xᵀ Y, where x has a number of each score
// [keys / PER, ROWS], and Y [WIDE / PER, d] is that of each unit, by slot. On tiles the sums are [d, ROWS], and Y is [d, y_row] with the
// slots next to each other.
template <Put put, typename N>
INLINE void add_to_queries(const Part& part, const int32_t* slots, const typename N::Packed* x, const typename N::Packed* y,
                           int64_t y_row, int64_t d, float* sums, const float* factor, Fetches& fetches) {
    const int64_t depth = WIDE / N::PER, left = part.low * WIDE, wide = part.high - part.low;
    if (put == Put::RESCALED) factor += left;
    if constexpr (N::HAS_TILES) {
        const Factors<N> factors{y, y_row, 1, x + left, ROWS, depth, fetches, slots, part.count, depth};
        multiply<put>(factors, d, wide, sums + left, ROWS, factor);
    } else {
        for (int64_t j = 0; j < d; j += ROWS) {
            const Factors<N> factors{x + left, 1, ROWS, y + j, d, depth, fetches, slots, part.count, depth * d};
            multiply<put>(factors, wide * WIDE, std::min(REGISTERS, (d - j) / WIDE), sums + left * d + j, d, factor);
        }
    }
}

template <typename N, typename Number>
INLINE void put_queries(const float* sums, const float* factor, int64_t count, int64_t d, Rows<Number> y) {
    if constexpr (N::HAS_TILES)
        put_columns(sums, factor, count, d, y);
    else
        put_rows(sums, factor, count, d, y);
}
