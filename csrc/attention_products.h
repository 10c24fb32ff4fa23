// Products of packed numbers, whose sums stay in registers or tiles, and copies of rows in the order in which they are read.
//
// Of a product C = A B, packed numbers of A are single ones in memory, of any strides; those of B are rows of sixteen or more. One
// function serves all seven products of attention.

// A of M rows and `depth` packed numbers with any strides, B of `depth` rows of R registers. Of several parts, A begins at multiples
// of `a_part`, which are anywhere, and B continues: the sums of all parts stay in registers.
template <typename N>
struct Factors {
    using Packed = typename N::Packed;
    const Packed* a;
    int64_t a_row, a_step;
    const Packed* b;
    int64_t b_row, depth;
    const int32_t* parts = nullptr;
    int64_t count = 1, a_part = 0;
};

// A thread that multiplies numbers of type N has an object of it.
template <typename N>
class ReadyToMultiply {};

enum class Put { SET, ADDED, RESCALED };      // C = A B,    C += A B,    C = C factor[column] + A B

template <Put put, int M, int R, typename N>
INLINE void multiply_of(const Factors<N>& x, float* c, int64_t c_row, const float* factor) {
    Vector sums[M][R];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) {
            const float* at = c + i * c_row + j * WIDE;
            if (put == Put::SET) sums[i][j] = zeros();
            if (put == Put::ADDED) sums[i][j] = register_of(at);
            if (put == Put::RESCALED) sums[i][j] = register_of(at) * register_of(factor + j * WIDE);
        }
    const auto* b = x.b;
    for (int64_t part = 0; part < x.count; ++part) {
        const auto* a = x.a + (x.parts ? x.parts[part] * x.a_part : 0);
        for (int64_t k = 0; k < x.depth; ++k, a += x.a_step, b += x.b_row) {
            decltype(register_of(b)) row[R];
#pragma GCC unroll 16
            for (int j = 0; j < R; ++j) row[j] = register_of(b + j * WIDE);
#pragma GCC unroll 16
            for (int i = 0; i < M; ++i) {
                const auto one = broadcast(a[i * x.a_row]);
#pragma GCC unroll 16
                for (int j = 0; j < R; ++j) sums[i][j] = sum_of(sums[i][j], one, row[j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) store(c + i * c_row + j * WIDE, sums[i][j]);
}

template <Put put, int M, int R, typename N>
INLINE void multiply_in_steps(Factors<N> x, int64_t rows, float* c, int64_t c_row, const float* factor) {
    for (int64_t i = 0; i < rows; i += M, x.a += M * x.a_row) multiply_of<put, M, R>(x, c + i * c_row, c_row, factor);
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
            multiply_in_steps<put, SUMS, 1>(column, rows, c + j * WIDE, c_row, put == Put::RESCALED ? factor + j * WIDE : factor);
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

// Rows of a head are far from each other, so the processor does not fetch them ahead by itself.
template <typename Number>
INLINE void fetch(Rows<const Number> x, int64_t first, int64_t end, int64_t d) {
    constexpr int64_t LINE = 64 / sizeof(Number);
    for (int64_t i = first; i < end; ++i)
        for (int64_t j = 0; j < d; j += LINE) _mm_prefetch(reinterpret_cast<const char*>(x[i] + j), _MM_HINT_T1);
}

// Rows that will be written soon.
template <typename Number>
INLINE void fetch_to_write(Rows<Number> x, int64_t first, int64_t end, int64_t d) {
    constexpr int64_t LINE = 64 / sizeof(Number);
    for (int64_t i = first; i < end; ++i)
        for (int64_t j = 0; j < d; j += LINE) PREFETCH(x[i] + j);
}

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

// [count, d] → rows.
template <typename Number>
void put_rows(const float* x, int64_t count, int64_t d, Rows<Number> y) {
    constexpr int64_t AHEAD = 16;
    fetch_to_write(y, 0, std::min(AHEAD, count), d);
    for (int64_t i = 0; i < count; ++i) {
        fetch_to_write(y, i + AHEAD, std::min(i + AHEAD + 1, count), d);
        for (int64_t j = 0; j < d; j += WIDE) put_row(y[i] + j, register_of(x + i * d + j));
    }
}

// [d, ROWS] times a factor of each column → `count` rows.
template <typename Number>
void put_columns(const float* x, const float* factor, int64_t count, int64_t d, Rows<Number> y) {
    for (int64_t row = 0; row < count; row += WIDE)
        for (int64_t j = 0; j < d; j += WIDE) {
            Integers tile[WIDE];
            const Vector factors = register_of(factor + row);
            for (int64_t i = 0; i < WIDE; ++i)
                tile[i] = bits_of(register_of(x + (j + i) * ROWS + row) * factors);
            transpose(tile);
            for (int64_t i = 0; i < std::min(WIDE, count - row); ++i) put_row(y[row + i] + j, floats_of(tile[i]));
        }
}
