// Attention of all heads of a call: memory of threads, and parts of the work. As attention_kernel.h, included
// once for each instruction set.
//
// Work: threads take parts in turn. Of forward, a part is a head, or some tiles of one where that divides the work better. Of
// backward it is a key head with its query heads; with fewer of them than threads, parts compute dq of some queries, and others dk
// and dv of some keys: 7 products in place of 5, but each thread has work.

template <typename N>
int64_t arrange(ForwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5], units = rounded_up(sizes[1], WIDE) / WIDE, most = w.MOST, of_unit = WIDE * d / N::PER;
    w.slots = std::max(most, rounded_up(std::min(sizes[1], sizes[6]), WIDE) / WIDE);
    arena.take(w.keys, w.slots * of_unit);
    arena.take(w.values, (N::HAS_TILES ? most : w.slots) * of_unit);
    arena.take(w.slot_of, units);
    arena.take(w.free, w.slots);
    arena.take(w.queries, ROWS * d / N::PER);
    arena.take(w.scores, most * WIDE * ROWS);
    arena.take(w.p, most * WIDE * ROWS / N::PER);
    arena.take(w.out, d * ROWS);
    return arena.used();
}

template <typename N>
int64_t arrange(BackwardWork<N>& w, const Sizes& sizes, char* memory) {
    Arena arena(memory);
    const int64_t d = sizes[5], run = rounded_up(std::min(sizes[1], sizes[6]), WIDE);
    const bool has_runs = run < sizes[1];
    w.slots = run / WIDE;
    for (auto** of_keys : {&w.keys, &w.values}) arena.take(*of_keys, run * d / N::PER);
    w.pairs_row = rounded_up(run, 2 * WIDE) / 2 + WIDE;      // no power of two: rows of a tile would share a set of the cache
    arena.take(w.key_pairs, N::HAS_TILES ? w.pairs_row * d : N::PER == 2 ? run / N::PER * d : 0);
    for (float** sums : {&w.dk, &w.dv}) arena.take(*sums, run * d);
    arena.take(w.slot_of, rounded_up(sizes[1], WIDE) / WIDE);
    arena.take(w.free, w.slots);
    for (auto** of_rows : {&w.query_columns, &w.dout_columns, &w.query_pairs, &w.dout_pairs}) arena.take(*of_rows, ROWS * d / N::PER);
    for (auto** tile : {&w.p, &w.ds, &w.ds_pairs}) arena.take(*tile, MOST_KEYS * ROWS / N::PER);
    arena.take(w.dq, d * (has_runs ? rounded_up(sizes[0], ROWS) : ROWS));
    return arena.used();
}

// Calls part(memory of the thread, number) for each part.
template <typename Work, typename Do>
void share(int64_t parts, int threads, uintptr_t memory, const Sizes& sizes, const Do& part) {
    Work counted{};
    const int64_t bytes = arrange(counted, sizes, nullptr);
    std::atomic<int64_t> next{0}, thread{0};
    const std::function<void()> job = [&] {
        const ReadyToMultiply<typename Work::Numbers> ready;
        Work work{};
        arrange(work, sizes, Arena::aligned(memory + uintptr_t(thread.fetch_add(1) * bytes)));
        for (int64_t i; (i = next.fetch_add(1)) < parts;) part(work, i);
    };
    run_on_threads(int(std::min<int64_t>(threads, parts)), job);
}

template <typename N>
void forward(const Sizes& sizes, const std::array<Place, 4>& tensors, const std::array<uintptr_t, 1>& of_rows, float scale,
             const Shown& shown, uintptr_t memory, int threads) {
    using Number = typename N::Number;
    const auto& [q, k, v, out] = tensors;
    const Call call = shown.call(sizes, scale);
    const int64_t heads = sizes[3], group = heads / sizes[4], all = sizes[2] * heads, units = rounded_up(sizes[1], WIDE) / WIDE;
    if (all == 0) return;
    const Cut cut(rounded_up(sizes[0], ROWS) / ROWS, all % threads == 0 ? 1 : (4 * threads + all - 1) / all);
    // Bindings cannot be captured by name in C++17.
    const auto part = [&, q = q, k = k, v = v, out = out](const ForwardWork<N>& w, int64_t i) {
        const int64_t head = i / cut.parts % heads, sample = i / cut.parts / heads, at = i % cut.parts;
        const Plan plan = shown.plan(sizes, sample, head);
        const bool keeps_units = plan.live <= w.slots && cut.at(at + 1) - cut.at(at) > 1;
        const Slots slots(w.slot_of, w.free, 0, units, std::min(plan.live, w.slots), false);
        ForwardHead<N> of_head{rows_of<const Number>(q, sample, head), rows_of<const Number>(k, sample, head / group),
                               rows_of<const Number>(v, sample, head / group), rows_of<Number>(out, sample, head),
                               reinterpret_cast<float*>(of_rows[0]) + (sample * heads + head) * call.queries, slots,
                               keeps_units, {}};
        attend(call, w, plan, shown.sink(head), of_head, cut.at(at), cut.at(at + 1));
    };
    py::gil_scoped_release released;
    const FlushedSubnormals flushed;
    share<ForwardWork<N>>(all * cut.parts, threads, memory, sizes, part);
}

// adds: to dq, dk and dv, which are fp32 then.
template <typename N>
void differentiate_heads(const Sizes& sizes, const std::array<Place, 7>& tensors, const std::array<uintptr_t, 2>& of_rows, float scale,
                         const Shown& shown, uintptr_t memory, int threads, bool adds) {
    using Number = typename N::Number;
    const auto& [q, k, v, dout, dq, dk, dv] = tensors;
    const Call call = shown.call(sizes, scale);
    const int64_t heads = sizes[3], key_heads = sizes[4], group = heads / key_heads, all = sizes[2] * key_heads;
    if (all == 0) return;
    const int64_t tiles = rounded_up(sizes[0], ROWS) / ROWS, units = rounded_up(sizes[1], WIDE) / WIDE;
    const Cut by_key((units + REGISTERS - 1) / REGISTERS, all >= threads ? 1 : (4 * threads + all - 1) / all);
    const Cut by_query(tiles, by_key.parts);
    const bool is_split = by_key.parts > 1;
    const int64_t of_head = is_split ? by_key.parts + by_query.parts : 1;
    const auto part = [&, q = q, k = k, v = v, dout = dout, dq = dq, dk = dk, dv = dv](const BackwardWork<N>& w, int64_t i) {
        const int64_t key_head = i / of_head % key_heads, sample = i / of_head / key_heads, at = i % of_head;
        const Wanted wanted{!is_split || at >= by_key.parts, at < by_key.parts};
        const bool has_some_keys = is_split && wanted.keys, has_some_queries = is_split && wanted.dq;
        const int64_t first_tile = has_some_queries ? by_query.at(at - by_key.parts) : 0;
        const int64_t last_tile = has_some_queries ? by_query.at(at - by_key.parts + 1) : tiles;
        const int64_t first = has_some_keys ? REGISTERS * by_key.at(at) : 0;
        const int64_t last = has_some_keys ? std::min(units, REGISTERS * by_key.at(at + 1)) : units;
        // Heads that share keys need them all again. Tiles sum neighbouring slots together: with slots in the order of units their sums do not
        // depend on the tile at which a part of the work begins.
        const int64_t first_head = key_head * group;
        const int64_t live = group > 1 || N::HAS_TILES ? units : shown.plan(sizes, sample, first_head).live;
        const int64_t run_units = live <= w.slots ? units : w.slots;
        for (int64_t unit = first; unit < last; unit += run_units) {
            const int64_t end = std::min(unit + run_units, last);
            const Slots slots(w.slot_of, w.free, unit, end, std::min(live, end - unit), N::HAS_TILES);
            Run run{unit, end, unit == first, end == last, wanted, slots, {}, false};
            for (int64_t head = first_head; head < first_head + group; ++head) {
                const int64_t first_row = (sample * heads + head) * call.queries;
                const auto sums = [&](uintptr_t x) { return reinterpret_cast<const float*>(x) + first_row; };
                const BackwardTensors<N> t{rows_of<const Number>(q, sample, head), rows_of<const Number>(k, sample, key_head),
                                           rows_of<const Number>(v, sample, key_head), rows_of<const Number>(dout, sample, head),
                                           sums(of_rows[0]), sums(of_rows[1]), {dq, sample, head, adds},
                                           {dk, sample, key_head, adds}, {dv, sample, key_head, adds}};
                run.is_last_head = head == first_head + group - 1;
                differentiate(call, w, shown.plan(sizes, sample, head), t, run, first_tile, last_tile);
                if (wanted.keys && run.is_last_head) put_run(call, w, run, t);
            }
        }
    };
    py::gil_scoped_release released;
    const FlushedSubnormals flushed;
    share<BackwardWork<N>>(all * of_head, threads, memory, sizes, part);
}

template <typename N, bool ADDS>
void backward(const Sizes& sizes, const std::array<Place, 7>& tensors, const std::array<uintptr_t, 2>& of_rows, float scale,
              const Shown& shown, uintptr_t memory, int threads) {
    differentiate_heads<N>(sizes, tensors, of_rows, scale, shown, memory, threads, ADDS);
}

template <typename N>
void dots(const std::array<int64_t, 4>& sizes, const std::array<Place, 2>& tensors, uintptr_t dots, int threads) {
    using Number = typename N::Number;
    const auto [rows, samples, heads, d] = sizes;
    const int64_t tiles = rounded_up(rows, ROWS) / ROWS;
    std::atomic<int64_t> next{0};
    const std::function<void()> job = [&, rows = rows, samples = samples, heads = heads, d = d] {
        for (int64_t i; (i = next.fetch_add(1)) < tiles * samples;) {
            const int64_t sample = i % samples, row = i / samples * ROWS;
            float* to = reinterpret_cast<float*>(dots) + sample * heads * rows;
            for (int64_t j = row; j < std::min(row + ROWS, rows); ++j)      // the heads of a row are next to each other
                for (int64_t head = 0; head < heads; ++head)
                    to[head * rows + j] = dot(rows_of<const Number>(tensors[0], sample, head)[j],
                                              rows_of<const Number>(tensors[1], sample, head)[j], d);
        }
    };
    py::gil_scoped_release released;
    run_on_threads(int(std::min<int64_t>(threads, tiles * samples)), job);
}

template <typename Work>
int64_t bytes_of(const Sizes& sizes) {
    Work counted{};
    return arrange(counted, sizes, nullptr);
}

template <typename N>
constexpr Functions FUNCTIONS{&forward<N>, &backward<N, false>, &backward<N, true>,
                              &dots<N>,    &bytes_of<ForwardWork<N>>, &bytes_of<BackwardWork<N>>};
