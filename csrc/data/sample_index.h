// Where the samples of a GPT dataset begin, by threads that read each document's length once.
//
// Row r is the document that holds token r·s of the stream of all documents, and the place in it; empty documents hold none.
//
//   lengths[order[i]]   | 5 | 3 | 8       | 1 | 10          |       read at random places: this is what takes the time
//   blocks              |--- thread A ----|---- thread B ...|
//
// A thread takes the next block of documents, copies their lengths together (many loads under way at once), waits for its turn
// to learn how many tokens lie before the block, passes the sum on, and then writes the rows that begin in the block.
// What is needed besides the result is one block a thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "../common/pool.h"
#include "../common/processors.h"

namespace {

constexpr int64_t DOCUMENTS_OF_A_BLOCK = 1 << 12;

// lengths may lie at any byte: those of an .idx file begin at byte 34.
template <typename Document>
INLINE int64_t copy_lengths(const char* lengths, const Document* order, int64_t count, int32_t* copied) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        int32_t length;
        std::memcpy(&length, lengths + 4 * static_cast<int64_t>(order[i]), sizeof length);
        copied[i] = length;
        sum += length;
    }
    return sum;
}

// floor(number / divisor) for 0 <= number < 2^52, by a product: the quotient in floating point is off by one at most.
class Divisor {
public:
    explicit Divisor(int64_t divisor) : divisor_(divisor), inverse_(1.0 / static_cast<double>(divisor)) {}
    INLINE_MEMBER int64_t quotient(int64_t number) const {
        const int64_t guess = static_cast<int64_t>(static_cast<double>(number) * inverse_);
        const int64_t rest = number - guess * divisor_;
        return guess + (rest >= divisor_) - (rest < 0);
    }

private:
    int64_t divisor_;
    double inverse_;
};

// Writes `count` rows, from number `row` on: those that begin in documents `first`, `first` + 1, …, which begin at `token`.
//
// Every document writes the next two rows whether they begin in it or not; a later document writes its own over them. So
// nothing depends on a comparison that the processor would have to guess; only third rows of a document are a loop.
template <typename Row>
INLINE void write_rows(const int32_t* lengths, int64_t first, int64_t token, int64_t row, int64_t count, int64_t seq_length,
                       Row* rows) {
    const Divisor seq(seq_length);
    int64_t begin = token - row * seq_length;                       // tokens, from the first row on
    rows += 2 * row;
    for (int64_t document = first, next = 0; next < count; ++document) {
        const int64_t end = begin + *lengths++, upto = seq.quotient(end + seq_length - 1);
        const auto write = [&](int64_t i) {
            rows[2 * i] = static_cast<Row>(document);
            rows[2 * i + 1] = static_cast<Row>(i * seq_length - begin);
        };
        write(next);
        if (next + 1 < count) write(next + 1);
        for (int64_t i = next + 2; i < upto && i < count; ++i) write(i);
        next = upto;
        begin = end;
    }
}

// Writes (num_tokens − 1) / seq_length + 1 rows. Returns the tokens that the documents really hold; the rows are right if they
// are num_tokens, and nothing is written outside them in any case.
template <typename Document, typename Row>
int64_t write_sample_index(const char* lengths, const Document* order, int64_t documents, int64_t seq_length, int64_t num_tokens,
                           Row* rows, int threads) {
    const int64_t total = (num_tokens - 1) / seq_length + 1;
    const int64_t blocks = (documents + DOCUMENTS_OF_A_BLOCK - 1) / DOCUMENTS_OF_A_BLOCK;
    std::atomic<int64_t> taken{0}, turn{0};
    int64_t tokens = 0;                                             // before the block whose turn it is
    const auto rows_before = [&](int64_t token) { return std::min(total, (token + seq_length - 1) / seq_length); };
    run_on_threads(static_cast<int>(std::min<int64_t>(threads, blocks)), [&] {
        const std::unique_ptr<int32_t[]> copied(new int32_t[DOCUMENTS_OF_A_BLOCK]);
        for (int64_t block; (block = taken.fetch_add(1)) < blocks;) {
            const int64_t first = block * DOCUMENTS_OF_A_BLOCK;
            const int64_t count = std::min(DOCUMENTS_OF_A_BLOCK, documents - first);
            const int64_t sum = copy_lengths(lengths, order + first, count, copied.get());
            // Blocks are taken in order, so whoever has the turn is at work.
            for (int64_t spins = 0; turn.load(std::memory_order_acquire) != block; ++spins)
                if (spins > 1000) std::this_thread::yield();
            const int64_t before = tokens;
            tokens += sum;
            turn.store(block + 1, std::memory_order_release);
            const int64_t row = rows_before(before);
            write_rows(copied.get(), first, before, row, rows_before(before + sum) - row, seq_length, rows);
        }
    });
    rows[0] = rows[1] = 0;                                          // the very beginning, even if the first document is empty
    return tokens;
}

}  // namespace
