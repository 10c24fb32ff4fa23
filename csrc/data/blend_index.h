// Blending: which dataset comes next, for every step, as Megatron's floating-point numbers have it.
//
//   lag of dataset d at step i    w_d max(i, 1) − (samples drawn from d so far), rounded twice, in double precision
//   drawn at step i               the largest lag; of equals, the lowest number
//
// Looking at all D lags at all N steps costs N D. Two things make it less, and neither changes a value.
//
// Datasets of equal weight take turns: the one that was drawn least is ahead, of equals the lowest number. They are one
// *source*, whose lag is that of the member whose turn it is.
//
// Most sources sleep. One that was drawn has fallen back by one sample and catches up by w a step, so it can be told when its
// lag reaches a given *floor*; before, it cannot win as long as somebody is above the floor. It lies in a calendar, a ring of
// lists by day, which is DAY steps long, and only who is awake is looked at, some tens of sources at most.
//
//   lag      floor |            awake: compared at every step, exactly as above, four at a time
//    -1 ------ 0 --|---- +1
//   asleep: wakes at (floor + drawn) / w, less a little for rounding, as too early is harmless
//
// When nobody awake is above the floor, it was too high: all lags are computed, and it goes below the largest of them. From time
// to time it is raised to just below the lowest lag that won. So the time depends on where the floor is, the result does not.
//
// And threads take segments of the steps. What was drawn up to a step is almost told by the shares: each dataset has the whole
// part of w_d i, and those with the largest fractions one more. From this guess the rule is followed for some steps, in which it
// finds into what it would have come to from the beginning; whether it did is then compared, exactly, with where the segment
// before ended, and a segment that began wrong is drawn again.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "lanes.h"
#include "../common/pool.h"
#include "../common/processors.h"

namespace {

// The number of a dataset, a source or a place among the awake: there are at most 32767 of each.
using Number = int16_t;

// Datasets of equal share, as one: what does not change while they are drawn from, for all threads.
struct Sources {
    // limits: how many samples a dataset has, or nullptr for any number; datasets of equal share have equal limits.
    Sources(const double* shares, const int64_t* limits, int datasets) : members(datasets), source_of(datasets) {
        std::iota(members.begin(), members.end(), 0);
        std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return shares[a] < shares[b]; });
        for (auto* numbers : {&share, &days_per_share, &limit}) numbers->reserve(datasets);
        first_member.reserve(datasets + 1);
        is_alone.reserve(datasets);
        for (int i = 0; i < datasets; ++i) {
            const int dataset = members[i];
            if (i == 0 || shares[dataset] != shares[members[i - 1]]) {
                share.push_back(shares[dataset]);
                days_per_share.push_back((1 - 1e-12) / (shares[dataset] * DAY));
                limit.push_back(limits == nullptr ? INFINITY : static_cast<double>(limits[dataset]));
                first_member.push_back(static_cast<Number>(i));
            }
            source_of[dataset] = static_cast<Number>(share.size() - 1);
        }
        first_member.push_back(static_cast<Number>(datasets));
        count = static_cast<int>(share.size());
        for (int source = 0; source < count; ++source) is_alone.push_back(size_of(source) == 1);
    }

    int size_of(int source) const { return first_member[source + 1] - first_member[source]; }

    std::vector<int64_t> nothing_drawn() const { return std::vector<int64_t>(count, 0); }

    // What has probably been drawn before this step, from each source.
    std::vector<int64_t> guess(int64_t step) const {
        std::vector<int64_t> totals(count);
        std::vector<Number> may_be_next;                            // datasets
        may_be_next.reserve(members.size());
        int64_t left = step;
        const auto due = [&](int source) { return share[source] * static_cast<double>(step); };
        const auto whole = [&](int source) { return std::min(std::floor(due(source)), limit[source]); };
        for (int source = 0; source < count; ++source) {
            totals[source] = static_cast<int64_t>(whole(source)) * size_of(source);
            left -= totals[source];
            if (whole(source) < limit[source])
                for (int i = first_member[source]; i < first_member[source + 1]; ++i) may_be_next.push_back(members[i]);
        }
        left = std::min(left, static_cast<int64_t>(may_be_next.size()));
        if (left <= 0) return totals;
        const auto order = [&](Number dataset) {
            const int source = source_of[dataset];
            return std::make_pair(whole(source) - due(source), dataset);    // − fraction: the largest comes first
        };
        std::nth_element(may_be_next.begin(), may_be_next.begin() + (left - 1), may_be_next.end(),
                         [&](Number a, Number b) { return order(a) < order(b); });
        for (int64_t i = 0; i < left; ++i) ++totals[source_of[may_be_next[i]]];
        return totals;
    }

    static constexpr int64_t DAY = 8;

    int count;
    std::vector<Number> members, source_of;                         // datasets by source; the source of a dataset
    std::vector<Number> first_member;                               // of a source, in members; at the end, of none
    std::vector<double> share, days_per_share, limit;               // of each member of a source
    std::vector<char> is_alone;                                     // a source of one dataset; size_of would do, but takes longer
};

// What has been drawn, and who is awake: the state of a thread.
class Blend {
public:
    explicit Blend(const Sources& sources)
        : sources_(sources), turn_(sources.count), next_(sources.count), place_(sources.count), drawn_(sources.count) {
        size_t ring = 16;
        while (ring * DAY < 2 * drawn_.size() && ring < (1 << 12)) ring *= 2;
        calendar_.resize(ring);
    }

    // From each source, the samples drawn so far; what `begin` takes and tells this state from others.
    std::vector<int64_t> totals() const {
        std::vector<int64_t> totals(sources_.count);
        for (int source = 0; source < sources_.count; ++source)
            totals[source] = static_cast<int64_t>(drawn_[source]) * sources_.size_of(source) + turn_[source] - first_member(source);
        return totals;
    }

    void begin(const std::vector<int64_t>& totals) {
        for (int source = 0; source < sources_.count; ++source) {
            turn_[source] = static_cast<Number>(first_member(source) + totals[source] % sources_.size_of(source));
            drawn_[source] = static_cast<double>(totals[source] / sources_.size_of(source));
        }
    }

    // Steps first … last − 1, from the state after the steps before; written to which[step] and sample[step].
    void draw(int64_t first, int64_t last, int16_t* which, int64_t* sample);

private:
    static constexpr int FEW = 8;                                   // so few sources are all kept awake
    static constexpr int64_t DAY = Sources::DAY, PERIOD = 2048;
    static constexpr Number NOBODY = -1;

    Number first_member(int source) const { return sources_.first_member[source]; }
    bool is_spent(int source) const { return drawn_[source] >= sources_.limit[source]; }

    // The day on which the source may come above the floor; each of the operations rounds by at most 2^-53.
    INLINE_MEMBER double wakes_on(int source) const {
        return (floor_ + drawn_[source]) * sources_.days_per_share[source] - 1.0 / DAY;
    }

    INLINE_MEMBER void wake_up(int source) {
        int place = count_;
        if (!free_.empty()) place = free_.back(), free_.pop_back();
        else if (++count_ > static_cast<int>(awake_share_.size())) add_places();
        awake_share_[place] = sources_.share[source];
        awake_drawn_[place] = drawn_[source];
        awake_number_[place] = sources_.members[turn_[source]];
        place_[source] = static_cast<Number>(place);
    }

    // A place that is free never wins: its lag is − infinity.
    INLINE_MEMBER void leave(int source) {
        awake_drawn_[place_[source]] = awake_number_[place_[source]] = INFINITY;
        free_.push_back(place_[source]);
        place_[source] = NOBODY;
    }

    void add_places() {
        const size_t places = awake_share_.size() + 8 * Lanes::WIDTH;
        awake_share_.resize(places, 0.0);
        awake_drawn_.resize(places, INFINITY);
        awake_number_.resize(places, INFINITY);
    }

    INLINE_MEMBER Number& on_calendar(int64_t day) { return calendar_[day & (static_cast<int64_t>(calendar_.size()) - 1)]; }

    INLINE_MEMBER void sleep(int source, double until) {
        if (!(until < last_day_)) return;                           // found again when the floor moves
        Number& day = on_calendar(static_cast<int64_t>(until));
        next_[source] = day;
        day = static_cast<Number>(source);
    }

    void move_floor(double floor, int64_t today) {
        floor_ = floor;
        count_ = 0;
        free_.clear();
        std::fill(calendar_.begin(), calendar_.end(), NOBODY);
        std::fill(place_.begin(), place_.end(), NOBODY);
        std::fill(awake_share_.begin(), awake_share_.end(), 0.0);
        std::fill(awake_drawn_.begin(), awake_drawn_.end(), INFINITY);
        std::fill(awake_number_.begin(), awake_number_.end(), INFINITY);
        for (int source = 0; source < sources_.count; ++source) {
            if (is_spent(source)) continue;
            const double until = wakes_on(source);
            if (until >= static_cast<double>(today + 1)) sleep(source, until);
            else wake_up(source);
        }
    }

    // The largest lag of all, asleep or awake.
    double largest_lag(double step) const {
        double lag = -INFINITY;
        for (int source = 0; source < sources_.count; ++source)
            if (!is_spent(source)) lag = std::max(lag, sources_.share[source] * step - drawn_[source]);
        return lag;
    }

    INLINE_MEMBER void read_calendar(int64_t today) {
        Number source = NOBODY;
        std::swap(source, on_calendar(today));
        while (source != NOBODY) {
            const Number following = next_[source];
            const double until = wakes_on(source);
            if (until < static_cast<double>(today + 1)) wake_up(source);
            else sleep(source, until);                              // in another turn of the ring
            source = following;
        }
    }

    // Whoever was drawn goes to sleep until it is near the floor again, or for ever.
    INLINE_MEMBER void settle(const int32_t* sources, int count, double tomorrow, bool sleeps) {
        for (int i = 0; i < count; ++i) {
            const int source = sources[i];
            if (place_[source] == NOBODY) continue;                 // drawn twice
            if (is_spent(source)) {
                leave(source);
            } else if (sleeps) {
                const double until = wakes_on(source);
                if (until >= tomorrow) {
                    leave(source);
                    sleep(source, until);
                }
            }
        }
    }

    // Steps `i` … `end` − 1, or as far as the floor holds and no source is spent; returns where it stopped. VECTORS of Lanes are
    // awake; 0 for `vectors`, in memory instead of registers.
    template <int VECTORS>
    INLINE_MEMBER int64_t draw_awake(int vectors, int64_t i, int64_t end, int16_t* which, int64_t* sample, int32_t* touched) {
        typedef Lanes::Vector Vector;
        const int count = VECTORS ? VECTORS : vectors;
        const Number* const source_of = sources_.source_of.data();
        const char* const is_alone = sources_.is_alone.data();
        Vector kept_drawn[VECTORS + 1], kept_number[VECTORS + 1], lag[VECTORS + 1];
        for (int v = 0; v < VECTORS; ++v) {
            kept_drawn[v] = Lanes::load(&awake_drawn_[v * Lanes::WIDTH]);
            kept_number[v] = Lanes::load(&awake_number_[v * Lanes::WIDTH]);
        }
        const auto share = [&](int v) { return Lanes::load(&awake_share_[v * Lanes::WIDTH]); };
        const auto drawn = [&](int v) { return VECTORS ? kept_drawn[v] : Lanes::load(&awake_drawn_[v * Lanes::WIDTH]); };
        const auto number = [&](int v) { return VECTORS ? kept_number[v] : Lanes::load(&awake_number_[v * Lanes::WIDTH]); };
        const auto keep = [&](int v, Vector new_drawn, Vector new_number) {
            if (VECTORS) kept_drawn[v] = new_drawn, kept_number[v] = new_number;
            else keep_in_memory(v, new_drawn, new_number);
        };
        for (bool goes_on = true; goes_on && i < end; ++i) {
            const Vector step = Lanes::all(i > 1 ? static_cast<double>(i) : 1.0);
            Vector best = Lanes::all(-INFINITY), first = Lanes::all(INFINITY);
            for (int v = 0; v < count; ++v) {
                const Vector here = share(v) * step - drawn(v);
                if (VECTORS) lag[v] = here;
                best = Lanes::larger(here, best);
            }
            best = Lanes::largest(best);
            const double largest = best[0];
            if (!(largest > floor_)) break;
            lowest_ = largest < lowest_ ? largest : lowest_;
            for (int v = 0; v < count; ++v) {
                const Vector here = VECTORS ? lag[v] : share(v) * step - drawn(v);
                first = Lanes::smaller(Lanes::where_equal(here, best, number(v), first), first);
            }
            first = Lanes::smallest(first);
            const int dataset = static_cast<int>(first[0]), source = source_of[dataset];
            which[i] = static_cast<int16_t>(dataset);
            sample[i] = static_cast<int64_t>(drawn_[source]);
            // Each step waits for the one before it: the usual case, a source of one, needs no number from memory.
            if (is_alone[source]) {
                drawn_[source] += 1;
                for (int v = 0; v < count; ++v)
                    keep(v, drawn(v) + Lanes::where_equal(number(v), first, Lanes::all(1.0), Lanes::all(0.0)), number(v));
                goes_on = !is_spent(source);
            } else {
                if (++turn_[source] == first_member(source + 1)) {
                    turn_[source] = first_member(source);
                    drawn_[source] += 1;
                    goes_on = !is_spent(source);
                }
                const Vector new_drawn = Lanes::all(drawn_[source]), turn = Lanes::all(sources_.members[turn_[source]]);
                for (int v = 0; v < count; ++v) {
                    const Vector n = number(v);
                    keep(v, Lanes::where_equal(n, first, new_drawn, drawn(v)), Lanes::where_equal(n, first, turn, n));
                }
            }
            *touched++ = source;
        }
        for (int v = 0; v < VECTORS; ++v) keep_in_memory(v, kept_drawn[v], kept_number[v]);
        return i;
    }

    INLINE_MEMBER void keep_in_memory(int v, Lanes::Vector drawn, Lanes::Vector number) {
        Lanes::store(drawn, &awake_drawn_[v * Lanes::WIDTH]);
        Lanes::store(number, &awake_number_[v * Lanes::WIDTH]);
    }

    const Sources& sources_;
    int count_ = 0;                                                 // places of the awake, free ones among them
    double floor_ = -INFINITY, lowest_ = INFINITY, last_day_ = 0;
    std::vector<Number> turn_, next_, place_;                       // of a source; turn_: whose, in Sources::members
    std::vector<double> drawn_;                                     // from the member whose turn it is
    std::vector<Number> calendar_, free_;
    std::vector<double> awake_share_, awake_drawn_, awake_number_;  // side by side, for Lanes; number of the member
};

FOR_EACH_PROCESSOR
void Blend::draw(int64_t first, int64_t last, int16_t* which, int64_t* sample) {
    constexpr int64_t LONG_DAY = 64;
    constexpr double GAP = 0.02;
    const bool sleeps = sources_.count > FEW;
    int32_t touched[LONG_DAY];
    last_day_ = static_cast<double>(last / DAY + 1);
    lowest_ = INFINITY;
    if (!sleeps) move_floor(-INFINITY, first / DAY);
    bool too_high = sleeps;
    for (int64_t i = first, period_end = first + PERIOD; i < last;) {
        const int64_t start = i, today = i / DAY;
        if (too_high || (sleeps && i >= period_end)) {
            move_floor(too_high ? largest_lag(i > 1 ? static_cast<double>(i) : 1.0) - GAP : lowest_ - 1e-3, today);
            lowest_ = INFINITY;
            period_end = i + PERIOD;
        }
        if (sleeps) read_calendar(today);
        const int64_t end = std::min(last, sleeps ? (today + 1) * DAY : i + LONG_DAY);
        const int vectors = (count_ + Lanes::WIDTH - 1) / Lanes::WIDTH;
        switch (vectors) {
            case 1: i = draw_awake<1>(1, i, end, which, sample, touched); break;
            case 2: i = draw_awake<2>(2, i, end, which, sample, touched); break;
            case 3: i = draw_awake<3>(3, i, end, which, sample, touched); break;
            case 4: i = draw_awake<4>(4, i, end, which, sample, touched); break;
            case 5: i = draw_awake<5>(5, i, end, which, sample, touched); break;
            case 6: i = draw_awake<6>(6, i, end, which, sample, touched); break;
            default: i = draw_awake<0>(vectors, i, end, which, sample, touched);
        }
        settle(touched, static_cast<int>(i - start), static_cast<double>(i / DAY + 1), sleeps);
        too_high = i < end && i == start;
    }
}

// Which dataset is drawn at each step, and which of its samples, by threads in segments of so many steps.
//
// Steps before a segment are drawn into its own place, to be written over. What is needed besides the result is the Sources, 31
// bytes a dataset if no two have the same share; a Blend a thread, 15 to 20 and 26 for each that is awake, which is all of them
// at the beginning only; and the totals on both sides of each border between segments, 16. So one more thread of two segments
// needs 50 to 65 bytes a dataset: plan_threads in megatron_ds/data/loading/blend.py goes by that.
inline void draw_blend(const double* shares, const int64_t* limits, int datasets, int64_t size, int64_t segment, int threads,
                       int16_t* which, int64_t* sample) {
    const int64_t segments = std::max<int64_t>(1, size / std::max<int64_t>(segment, 1));
    const int64_t warm_up = std::min<int64_t>(2 * datasets + 64, size / segments);
    const auto start_of = [&](int64_t i) { return size / segments * i + std::min(i, size % segments); };
    const Sources sources(shares, limits, datasets);
    std::vector<std::vector<int64_t>> before(segments), after(segments);
    std::atomic<int64_t> taken{0};
    run_on_threads(static_cast<int>(std::min<int64_t>(threads, segments)), [&] {
        Blend blend(sources);
        for (int64_t i; (i = taken.fetch_add(1)) < segments;) {
            const int64_t first = start_of(i), earlier = std::max<int64_t>(0, first - warm_up), moved = first - earlier;
            blend.begin(earlier == 0 ? sources.nothing_drawn() : sources.guess(earlier));
            blend.draw(earlier, first, which + moved, sample + moved);
            if (i > 0) before[i] = blend.totals();
            blend.draw(first, start_of(i + 1), which, sample);
            if (i + 1 < segments) after[i] = blend.totals();
        }
    });
    for (int64_t i = 1; i < segments; ++i) {
        if (before[i] == after[i - 1]) continue;
        Blend again(sources);
        again.begin(after[i - 1]);
        again.draw(start_of(i), start_of(i + 1), which, sample);
        if (i + 1 < segments) after[i] = again.totals();
    }
}

}  // namespace
