// Rows of BERT samples: runs of whole sentences of a document that reach a target length. The rule is told, with a drawing, in
// megatron_ds/extensions/bert/maps.py.
//
// Targets come from one stream of random numbers, and how many are drawn depends on the rows before, so documents are taken one
// after the other. Each is first summed up as a whole, which also finds its longest sentence: where the rest of a document is
// shorter than the target, which is most of them, its last row is known without going through its sentences again.
// Rows go, in one pass, to more memory than they need; what is never written to is only promised, so the peak is the size of
// the result.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "../common/processors.h"
#include "shuffle.h"

namespace {

constexpr int32_t LONG_SENTENCE = 512;

template <typename Number, int WIDTH>
class Rows {
public:
    // At most so many rows, if that can be told; what is not written to takes no memory.
    explicit Rows(int64_t most) { grow(std::clamp<int64_t>(most, 1024, (64 << 20) / (WIDTH * sizeof(Number)))); }
    Rows(const Rows&) = delete;
    Rows& operator=(const Rows&) = delete;
    ~Rows() { std::free(numbers_); }

    int64_t size() const { return size_; }

    INLINE_MEMBER Number* add() {
        if (size_ == room_) grow(room_ + room_ / 2);
        return numbers_ + WIDTH * size_++;
    }

    // The numbers, for whoever calls std::free.
    Number* release() {
        grow(std::max<int64_t>(size_, 1));
        return std::exchange(numbers_, nullptr);
    }

    Number* numbers() { return numbers_; }

private:
    void grow(int64_t room) {
        void* numbers = std::realloc(numbers_, sizeof(Number) * WIDTH * room);
        if (numbers == nullptr) throw std::bad_alloc();
        numbers_ = static_cast<Number*>(numbers);
        room_ = room;
    }

    Number* numbers_ = nullptr;
    int64_t size_ = 0, room_ = 0;
};

// Lengths of sentences, which may lie at any byte.
class Lengths {
public:
    explicit Lengths(const char* bytes) : bytes_(bytes) {}

    const char* at(int64_t sentence) const { return bytes_ + 4 * sentence; }

    INLINE_MEMBER int32_t operator[](int64_t sentence) const {
        int32_t length;
        std::memcpy(&length, bytes_ + 4 * sentence, sizeof length);
        return length;
    }

private:
    const char* bytes_;
};

struct Summary {
    int64_t tokens;
    int32_t longest;
};

constexpr int64_t SENTENCES_AT_ONCE = 1 << 20;

// Sum and maximum of at most SENTENCES_AT_ONCE lengths. The 32-bit sum is right where it matters: sentences of at most
// LONG_SENTENCE tokens cannot overflow it; of others a document is left out, unless it has but one.
FOR_EACH_PROCESSOR
Summary sum_up(const char* lengths, int64_t count) {
    uint32_t tokens = 0;
    int32_t longest = 0;
    for (int64_t i = 0; i < count; ++i) {
        int32_t length;
        std::memcpy(&length, lengths + 4 * i, sizeof length);
        tokens += static_cast<uint32_t>(length);
        longest = length > longest ? length : longest;
    }
    return {static_cast<int64_t>(tokens), longest};
}

// Calls start(document, first, last) → target, then row(first, last, target) → target of the next, for every run of sentences.
// tested_from: documents of so many sentences are left out if one of these is too long.
template <typename Start, typename Row>
INLINE void cut_documents(const int64_t* bounds, int64_t documents, Lengths lengths, int64_t least, int64_t tested_from,
                          int64_t least_left, Start start, Row row) {
    for (int64_t document = 0; document < documents; ++document) {
        const int64_t first = bounds[document], last = bounds[document + 1];
        if (last - first < std::max<int64_t>(least, 1)) continue;
        int64_t rest = 0;
        int32_t longest = 0;
        for (int64_t i = first; i < last; i += SENTENCES_AT_ONCE) {
            const Summary part = sum_up(lengths.at(i), std::min(SENTENCES_AT_ONCE, last - i));
            rest += part.tokens;
            longest = std::max(longest, part.longest);
        }
        if (last - first >= tested_from && longest > LONG_SENTENCE) continue;
        int64_t target = start(document);
        for (int64_t begin = first; begin < last;) {
            int64_t end = last, tokens = 0;
            if (rest >= target) {
                // A row ends here if it is long enough and leaves enough sentences; so it cannot end after `latest`.
                const int64_t latest = last - least_left;
                int64_t i = begin;
                while (i < latest && (tokens < target || i - begin < least)) tokens += lengths[i++];
                if (i > begin && i <= latest && tokens >= target && i - begin >= least) end = i;
            }
            rest -= tokens;
            target = row(begin, end, document, target);
            begin = end;
        }
    }
}

template <typename Number>
void map_sentences(Rows<Number, 3>& rows, const int64_t* bounds, int64_t documents, Lengths lengths, int64_t epochs,
                   uint64_t max_samples, int64_t longest, int64_t ratio, uint32_t seed, int64_t least) {
    uint32_t key[Twister::WORDS];
    Twister random = Twister::seeded(key, seed);
    // drawn % ratio == 0 without a division: Lemire, Kaser and Kurz 2019 (arXiv:1902.01961), section 3.2.
    const uint64_t inverse = ratio == 0 ? 0 : std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(ratio) + 1;
    const auto draw = [&]() -> int64_t {
        if (ratio == 0) return longest;
        const uint32_t drawn = random();
        return drawn * inverse <= inverse - 1 ? 2 + drawn % static_cast<uint32_t>(longest - 1) : longest;
    };
    for (int64_t epoch = 0; epoch < epochs && static_cast<uint64_t>(rows.size()) < max_samples; ++epoch)
        cut_documents(bounds, documents, lengths, least, 2, 2, [&](int64_t) { return draw(); },
                      [&](int64_t begin, int64_t end, int64_t, int64_t target) {
                          Number* row = rows.add();
                          row[0] = static_cast<Number>(begin);
                          row[1] = static_cast<Number>(end);
                          row[2] = static_cast<Number>(target);
                          return draw();
                      });
}

template <typename Number>
void map_blocks(Rows<Number, 4>& rows, const int64_t* bounds, int64_t documents, Lengths lengths, Lengths titles, int64_t epochs,
                uint64_t max_samples, int64_t longest, int64_t least) {
    for (int64_t epoch = 0; epoch < epochs && static_cast<uint64_t>(rows.size()) < max_samples; ++epoch) {
        const int64_t before = rows.size();
        cut_documents(bounds, documents, lengths, least, least, least,
                      [&](int64_t document) { return longest - titles[document]; },
                      [&](int64_t begin, int64_t end, int64_t document, int64_t target) {
                          const int64_t block = rows.size() - before;
                          Number* row = rows.add();
                          row[0] = static_cast<Number>(begin);
                          row[1] = static_cast<Number>(end);
                          row[2] = static_cast<Number>(document);
                          row[3] = static_cast<Number>(block);
                          return target;
                      });
    }
}

}  // namespace
