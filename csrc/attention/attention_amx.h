// Products of bf16 on tiles (AMX): one instruction multiplies 16 x 16 pairs by 16 x 16 pairs and adds the results to fp32 sums. Numbers
// are `TiledBf16`, vectors those of attention_avx512.h.

// Shapes of the tiles of a thread: 0 to 3 for sums, 4 and 5 for factors, 6 and 7 for factors of half the depth.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 32, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

// While an object exists, its thread has these shapes. Then those of before are back, which other libraries may rely on.
template <>
class ReadyToMultiply<TiledBf16> {
public:
    ReadyToMultiply() {
        asm volatile("sttilecfg %0" : "=m"(before_));
        load(SHAPES);
    }
    ~ReadyToMultiply() {
        if (before_.palette == 0)
            asm volatile("tilerelease" ::: "memory");
        else
            load(before_);
    }
    ReadyToMultiply(const ReadyToMultiply&) = delete;
    ReadyToMultiply& operator=(const ReadyToMultiply&) = delete;

private:
    static void load(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

    static constexpr TileShapes SHAPES{};
    TileShapes before_;
};

// The compiler keeps no track of tiles: these instructions are volatile, so that their order stays.
template <int TILE>
INLINE void load_tile(const void* x, int64_t row) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"n"(TILE), "r"(x), "r"(4 * row) : "memory");
}
template <int TILE>
INLINE void store_tile(void* x, int64_t row) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"n"(TILE), "r"(x), "r"(4 * row) : "memory");
}
template <int TILE>
INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"n"(TILE));
}
template <int SUM, int A, int B>
INLINE void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(SUM), "n"(A), "n"(B));
}

// C of 16 rows and a register for each J. Packed numbers of a row of A are neighbours, as are parts of A that follow each other; their
// depth is a multiple of HALF.
template <bool is_added, int... J>
INLINE void multiply_tile(const Factors<TiledBf16>& x, float* c, int64_t c_row, std::integer_sequence<int, J...>) {
    constexpr int64_t DEPTH = 16, HALF = 8;      // pairs
    if constexpr (is_added)
        (load_tile<J>(c + J * WIDE, c_row), ...);
    else
        (clear_tile<J>(), ...);
    const uint32_t* b = x.b;
    for (int64_t part = 0, next; part < x.count; part = next) {
        for (next = part + 1; next < x.count && x.parts[next] == x.parts[next - 1] + 1;) ++next;
        const uint32_t* a = x.a + (x.parts ? x.parts[part] * x.part_size : 0);
        int64_t depth = (next - part) * x.depth;
        for (; depth >= DEPTH; depth -= DEPTH, a += DEPTH, b += DEPTH * x.b_row) {
            load_tile<4>(a, x.a_row);
            ((load_tile<5>(b + J * WIDE, x.b_row), add_product<J, 4, 5>()), ...);
        }
        if (depth == 0) continue;
        load_tile<6>(a, x.a_row);
        ((load_tile<7>(b + J * WIDE, x.b_row), add_product<J, 6, 7>()), ...);
        b += HALF * x.b_row;
    }
    (store_tile<J>(c + J * WIDE, c_row), ...);
}

template <bool is_added, int R>
INLINE void multiply_rows(Factors<TiledBf16> x, int64_t rows, float* c, int64_t c_row) {
    for (int64_t i = 0; i < rows; i += WIDE, x.a += WIDE * x.a_row) {
        x.fetches.step();
        multiply_tile<is_added>(x, c + i * c_row, c_row, std::make_integer_sequence<int, R>());
    }
}

// C times a factor of each column, unless all are 1.
INLINE void rescale(int64_t rows, int64_t registers, float* c, int64_t c_row, const float* factor) {
    for (int64_t j = 0; j < registers * WIDE; j += WIDE) {
        const Vector factors = register_of(factor + j);
        if (is_empty(differs(factors, broadcast(1.0f)))) continue;
        for (int64_t i = 0; i < rows; ++i) store(c + i * c_row + j, register_of(c + i * c_row + j) * factors);
    }
}

template <Put put, typename N>
INLINE void multiply_by_tiles(const Factors<N>& x, int64_t rows, int64_t registers, float* c, int64_t c_row, const float* factor) {
    constexpr bool is_added = put != Put::SET;
    if (put == Put::RESCALED) rescale(rows, registers, c, c_row, factor);
    switch (registers) {
        case 4: return multiply_rows<is_added, 4>(x, rows, c, c_row);
        case 3: return multiply_rows<is_added, 3>(x, rows, c, c_row);
        case 2: return multiply_rows<is_added, 2>(x, rows, c, c_row);
        default: return multiply_rows<is_added, 1>(x, rows, c, c_row);
    }
}

// row(i) of `count` rows, a multiple of WIDE, or null → pairs of rows [d, y_row]; zeros for null.
template <typename Row>
INLINE void turn_pairs(const Row& row, int64_t count, int64_t d, uint32_t* y, int64_t y_row) {
    for (int64_t at = 0; at < count; at += 2 * WIDE) {
        const int64_t pairs = std::min(WIDE, (count - at) / 2);
        const __mmask16 written = __mmask16((1u << pairs) - 1);
        for (int64_t j = 0; j < d; j += 2 * WIDE) {
            Integers lower[WIDE], upper[WIDE];
            for (int64_t i = 0; i < WIDE; ++i) {
                const uint16_t* first = i < pairs ? row(at + 2 * i) : nullptr;
                const uint16_t* second = i < pairs ? row(at + 2 * i + 1) : nullptr;
                const Integers a = first ? load(first + j) : no_integers(), b = second ? load(second + j) : no_integers();
                lower[i] = lower_pairs(a, b);
                upper[i] = upper_pairs(a, b);
            }
            transpose(lower);
            transpose(upper);
            for (int64_t i = 0; i < WIDE; ++i) {
                _mm512_mask_storeu_epi32(y + (j + i) * y_row + at / 2, written, lower[i]);
                _mm512_mask_storeu_epi32(y + (j + WIDE + i) * y_row + at / 2, written, upper[i]);
            }
        }
    }
}
