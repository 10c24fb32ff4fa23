// Blending: which dataset comes next, for every step, as Megatron's floating-point numbers have it.
//
//   lag of dataset d at step i    w_d max(i, 1) − (samples drawn from d so far), rounded twice, in double precision
//   drawn at step i               the largest lag; of equals, the lowest number
//
// Looking at all D lags costs N D. Here most datasets sleep. A dataset that was drawn has fallen back by one sample and grows by
// w_d a step, so it can be told at which step its lag reaches a given *floor*; until then it cannot win, as long as somebody's
// lag is above the floor. It lies in a calendar, a ring of lists by step, and what is awake is a few datasets close behind each
// other, whose lags are computed exactly as above.
//
//   lag      floor |            awake: compared at every step
//    -1 ------ 0 --|---- +1
//   asleep: d wakes at (floor + drawn) / w_d, less a little for rounding: too early is harmless
//
// When nobody awake is above the floor, it was too high: all lags are computed and the floor is set below the largest. From time
// to time it is raised to just below the lowest lag that won. So the result never depends on where the floor is, only the time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "processors.h"

namespace {

class Blend {
public:
    // limits: how many samples a dataset has, or nullptr for any number.
    Blend(const double* shares, const int64_t* limits, int datasets)
        : share_(shares, shares + datasets), drawn_(datasets, 0.0), next_(datasets, NOBODY), wake_(datasets, 0), datasets_(datasets) {
        steps_per_share_.reserve(datasets);
        for (double share : share_) steps_per_share_.push_back(1.0 / share);
        if (limits != nullptr) limit_.assign(limits, limits + datasets);
        int64_t ring = 64;
        while (ring < datasets && ring < (1 << 14)) ring *= 2;
        calendar_.assign(ring, NOBODY);
        awake_share_.assign(datasets + 2 * WIDTH, 0.0);
        awake_drawn_.assign(datasets + 2 * WIDTH, INFINITY);        // places behind the last one never win
        awake_.assign(datasets + 2 * WIDTH, NOBODY);
        floor_ = -INFINITY;
    }

    void draw(int64_t size, int16_t* which, int64_t* sample);

private:
    static constexpr int WIDTH = 4, FEW = 8;                        // so few datasets are all kept awake
    static constexpr int64_t PERIOD = 4096;
    static constexpr int32_t NOBODY = -1;

#if defined(__GNUC__)
    typedef double Lanes __attribute__((vector_size(WIDTH * sizeof(double))));
    INLINE Lanes load(const double* from) {
        Lanes lanes;
        std::memcpy(&lanes, from, sizeof lanes);
        return lanes;
    }
#endif

    INLINE double largest(const double* share, const double* drawn, int count, double step) {
#if defined(__GNUC__)
        const Lanes steps = {step, step, step, step};
        Lanes one = load(share) * steps - load(drawn), two = load(share + WIDTH) * steps - load(drawn + WIDTH);
        for (int i = 2 * WIDTH; i < count; i += 2 * WIDTH) {
            const Lanes a = load(share + i) * steps - load(drawn + i);
            const Lanes b = load(share + i + WIDTH) * steps - load(drawn + i + WIDTH);
            one = a > one ? a : one;
            two = b > two ? b : two;
        }
        one = one > two ? one : two;
        const double left = one[0] > one[1] ? one[0] : one[1], right = one[2] > one[3] ? one[2] : one[3];
        return left > right ? left : right;
#else
        double best = -INFINITY;
        for (int i = 0; i < count; ++i) best = std::max(best, share[i] * step - drawn[i]);
        return best;
#endif
    }

    // Where among the awake the dataset of the lowest number with this lag is.
    INLINE int place_of(double lag, const double* share, const double* drawn, const int32_t* awake, int count, double step) {
        int place = NOBODY;
        for (int i = 0; i < count; ++i)
            if (share[i] * step - drawn[i] == lag && (place == NOBODY || awake[i] < awake[place])) place = i;
        return place;
    }

    bool is_spent(int dataset) const { return !limit_.empty() && drawn_[dataset] >= static_cast<double>(limit_[dataset]); }

    // The first step at which the dataset may be above the floor; each of the operations rounds by at most 2^-53.
    int64_t wakes_at(int dataset) const {
        const double step = (floor_ + drawn_[dataset]) * steps_per_share_[dataset] * (1 - 1e-12) - 1;
        return step < FAR ? (step > 0 ? static_cast<int64_t>(step) : 0) : NEVER;
    }

    void wake_up(int dataset) {
        awake_share_[count_] = share_[dataset];
        awake_drawn_[count_] = drawn_[dataset];
        awake_[count_++] = dataset;
    }

    void put_to_sleep(int dataset, int64_t until) {
        if (until == NEVER) return;                                 // found again when the floor moves
        int32_t& day = calendar_[until & (static_cast<int64_t>(calendar_.size()) - 1)];
        wake_[dataset] = until;
        next_[dataset] = day;
        day = dataset;
    }

    void leave(int place) {
        --count_;
        awake_share_[place] = awake_share_[count_];
        awake_drawn_[place] = awake_drawn_[count_];
        awake_[place] = awake_[count_];
        awake_share_[count_] = 0.0;
        awake_drawn_[count_] = INFINITY;
    }

    void move_floor(double floor, int64_t step) {
        floor_ = floor;
        std::fill(calendar_.begin(), calendar_.end(), NOBODY);
        while (count_ > 0) leave(count_ - 1);
        for (int dataset = 0; dataset < datasets_; ++dataset) {
            if (is_spent(dataset)) continue;
            const int64_t until = wakes_at(dataset);
            if (until <= step) wake_up(dataset);
            else put_to_sleep(dataset, until);
        }
    }

    void read_calendar(int64_t step) {
        int32_t& day = calendar_[step & (static_cast<int64_t>(calendar_.size()) - 1)];
        int32_t dataset = day;
        if (dataset == NOBODY) return;
        day = NOBODY;
        while (dataset != NOBODY) {
            const int32_t following = next_[dataset];
            if (wake_[dataset] <= step) wake_up(dataset);
            else put_to_sleep(dataset, wake_[dataset]);             // in another turn of the ring
            dataset = following;
        }
    }

    static constexpr double FAR = 4e18;
    static constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

    std::vector<double> share_, steps_per_share_, drawn_;
    std::vector<int64_t> limit_;
    std::vector<int32_t> calendar_, next_;
    std::vector<int64_t> wake_;
    std::vector<double> awake_share_, awake_drawn_;
    std::vector<int32_t> awake_;
    int datasets_, count_ = 0;
    double floor_;
};

FOR_EACH_PROCESSOR
void Blend::draw(int64_t size, int16_t* which, int64_t* sample) {
    const bool sleeps = datasets_ > FEW;
    double lowest = INFINITY, gap = 0.01;
    move_floor(-INFINITY, 0);
    for (int64_t i = 0; i < size; ++i) {
        const double step = i > 1 ? static_cast<double>(i) : 1.0;
        if (sleeps) read_calendar(i);
        double lag = largest(awake_share_.data(), awake_drawn_.data(), count_, step);
        if (sleeps && (!(lag > floor_) || i % PERIOD == 0)) {
            if (!(lag > floor_)) {
                move_floor(-INFINITY, i);
                lag = largest(awake_share_.data(), awake_drawn_.data(), count_, step);
                move_floor(lag - gap, i);
            } else {
                move_floor(lowest < lag ? lowest : lag - gap, i);
            }
            lowest = INFINITY;
            lag = largest(awake_share_.data(), awake_drawn_.data(), count_, step);
        }
        if (lag < lowest) lowest = lag - 1e-3;
        const int place = place_of(lag, awake_share_.data(), awake_drawn_.data(), awake_.data(), count_, step);
        const int dataset = awake_[place];
        which[i] = static_cast<int16_t>(dataset);
        sample[i] = static_cast<int64_t>(drawn_[dataset]);
        awake_drawn_[place] = drawn_[dataset] += 1;
        if (is_spent(dataset)) {
            leave(place);
        } else if (sleeps) {
            const int64_t until = wakes_at(dataset);
            if (until > i + 1) {
                leave(place);
                put_to_sleep(dataset, until);
            }
        }
    }
}

}  // namespace
