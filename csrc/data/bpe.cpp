// Byte-level BPE, from text to ids, for megatron_ds/extensions/tokenizers/backend.py.
//
//   text ── cut into pieces ──► " the" ── in the cache? ──► ids               Radford et al. 2019, section 2.2
//                                  └─ no: bytes, then merges, first learned first; cache        arXiv:1508.07909, algorithm 1
//
//   bpe_cutter.h     where a piece ends
//   bpe_merges.h     which neighbours are merged
//
// This file holds the cache of pieces. Most words of a text occur often, so the cost is cutting and one look-up per piece.
// Pieces of up to 15 bytes are cached in a table of 32-byte slots, two to a cache line, with the key and up to three ids:
//
//   | 15 bytes of the piece, zeros after it | its length | number of ids | id | id | id |       more ids: their index in `many_`
//
// Longer pieces are cached in a map. Both are emptied when full, so memory is bounded; the cache never changes an id.
//
// Limits, checked by the caller: each of the 256 bytes has an id, so nothing is unknown; texts are whole characters.
// Threads: an encoder is used by one thread at a time; it releases the interpreter lock while it works.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bpe_cutter.h"
#include "bpe_merges.h"

namespace py = pybind11;

namespace {

constexpr size_t SHORT = 15;                    // bytes of a piece that fit a slot
constexpr size_t LONGEST_KEPT = 256;
constexpr size_t MOST_SLOTS = size_t(1) << 20;  // 32 MiB
constexpr size_t MOST_LONG = size_t(1) << 15;
constexpr size_t AHEAD = 32;                   // pieces cut before they are looked up

struct Slot {
    uint64_t low = 0, high = 0;     // the piece, its length in the last byte; no piece is empty, so 0 is a free slot
    uint32_t count = 0;
    int32_t ids[3] = {0, 0, 0};
};

struct Piece {
    const char* start;
    size_t size;
    uint64_t low, high, hash;       // of a short one
};

class Encoder {
public:
    Encoder(const std::vector<int32_t>& byte_ids, const py::array_t<int32_t, py::array::c_style>& merges,
            const std::vector<std::pair<std::string, int32_t>>& whole, const std::vector<std::string>& specials,
            std::string classes, bool newer, int most_digits)
        : cutter_{std::move(classes), newer, most_digits}, merges_(size_t(merges.shape(0))), slots_(1 << 12) {
        if (byte_ids.size() != 256 || cutter_.classes.size() != 0x110000)
            throw py::value_error("an id for each byte and a class for each code point are needed");
        std::copy(byte_ids.begin(), byte_ids.end(), byte_ids_.begin());
        const auto rows = merges.unchecked<2>();
        for (py::ssize_t i = 0; i < rows.shape(0); ++i) merges_.set(rows(i, 0), rows(i, 1), uint32_t(i), rows(i, 2));
        whole_.insert(whole.begin(), whole.end());
        for (const std::string& special : specials) {
            if (special.empty()) continue;
            std::vector<std::string>& words = specials_[uint8_t(special[0])];
            if (words.empty()) first_bytes_ += special[0];
            words.push_back(special);
        }
    }

    // Ids of all texts back to back, the number of ids of each, and the texts with a special token, which are not encoded.
    py::tuple encode(const py::list& texts) {
        std::vector<std::string_view> views;
        views.reserve(texts.size());
        for (const py::handle text : texts) {
            py::ssize_t size;
            const char* start = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
            if (!start) throw py::error_already_set();
            views.emplace_back(start, size);
        }
        Ids ids;
        std::vector<int64_t> lengths, left;
        {
            py::gil_scoped_release released;
            size_t bytes = 0;
            for (const auto& view : views) bytes += view.size();
            ids.reserve(bytes / 3);
            for (size_t i = 0; i < views.size(); ++i) {
                const size_t before = ids.size();
                if (holds_special(views[i]))
                    left.push_back(int64_t(i));
                else
                    encode_one(views[i], ids);
                lengths.push_back(int64_t(ids.size() - before));
            }
        }
        return py::make_tuple(py::array_t<int32_t>(ids.size(), ids.data()), py::array_t<int64_t>(lengths.size(), lengths.data()),
                              left);
    }

private:
    bool holds_special(std::string_view text) const {
        if (first_bytes_.empty()) return false;
        const auto next = [&](size_t at) {                       // most often all special tokens begin with <
            return first_bytes_.size() == 1 ? text.find(first_bytes_[0], at) : text.find_first_of(first_bytes_, at);
        };
        for (size_t at = next(0); at != text.npos; at = next(at + 1))
            for (const std::string& word : specials_[uint8_t(text[at])])
                if (text.compare(at, word.size(), word) == 0) return true;
        return false;
    }

    // AHEAD pieces are cut before the first of them is looked up, so that their slots are prefetched meanwhile.
    void encode_one(std::string_view text, Ids& out) {
        const char* end = text.data() + text.size();
        Piece pieces[AHEAD];
        for (const char* p = text.data(); p < end;) {
            size_t count = 0;
            for (; count < AHEAD && p < end; ++count) {
                const char* q = cutter_.next(p, end);
                pieces[count] = {p, size_t(q - p), 0, 0, 0};
                if (size_t(q - p) <= SHORT) {
                    name(pieces[count], size_t(end - p));
                    __builtin_prefetch(&slots_[pieces[count].hash & (slots_.size() - 1)]);
                }
                p = q;
            }
            for (size_t i = 0; i < count; ++i)
                pieces[i].size <= SHORT ? append_short(pieces[i], out)
                                        : append_long(std::string_view(pieces[i].start, pieces[i].size), out);
        }
    }

    // The key of a short piece and its hash. room: bytes that may be read from its start on.
    static void name(Piece& piece, size_t room) {
        uint64_t key[2] = {0, 0};
        if (room >= 16) {
            std::memcpy(key, piece.start, 16);
            const size_t low = std::min<size_t>(piece.size, 8), high = piece.size - low;     // high < 8
            key[0] &= ~0ull >> (64 - 8 * low);
            key[1] &= (1ull << 8 * high) - 1;
        } else {
            std::memcpy(key, piece.start, piece.size);
        }
        piece.low = key[0];
        piece.high = key[1] | uint64_t(piece.size) << 56;
        piece.hash = mix(piece.low, piece.high);
    }

    void append_short(const Piece& piece, Ids& out) {
        Slot* slot = find(piece.low, piece.high, piece.hash);
        if (!slot->high) slot = remember(piece);
        if (slot->count == 1)
            out.push_back(slot->ids[0]);
        else if (slot->count <= 3)
            out.insert(out.end(), slot->ids, slot->ids + slot->count);
        else
            out.insert(out.end(), many_.begin() + slot->ids[0], many_.begin() + slot->ids[0] + slot->count);
    }

    Slot* find(uint64_t low, uint64_t high, uint64_t hash) {
        const size_t mask = slots_.size() - 1;
        size_t i = hash & mask;
        while (slots_[i].high && (slots_[i].low != low || slots_[i].high != high)) i = (i + 1) & mask;
        return &slots_[i];
    }

    Slot* remember(const Piece& piece) {
        make_room();
        merge(std::string_view(piece.start, piece.size));
        Slot* slot = find(piece.low, piece.high, piece.hash);
        *slot = {piece.low, piece.high, uint32_t(piece_ids_.size()), {0, 0, 0}};
        if (piece_ids_.size() <= 3) {
            std::copy(piece_ids_.begin(), piece_ids_.end(), slot->ids);
        } else {
            slot->ids[0] = int32_t(many_.size());
            many_.insert(many_.end(), piece_ids_.begin(), piece_ids_.end());
        }
        ++used_;
        return slot;
    }

    void make_room() {
        if (2 * used_ < slots_.size()) return;
        if (slots_.size() >= MOST_SLOTS) {
            std::fill(slots_.begin(), slots_.end(), Slot{});
            many_.clear();
            used_ = 0;
            return;
        }
        std::vector<Slot> old(2 * slots_.size());
        old.swap(slots_);
        for (const Slot& slot : old)
            if (slot.high) *find(slot.low, slot.high, mix(slot.low, slot.high)) = slot;
    }

    void append_long(std::string_view piece, Ids& out) {
        if (piece.size() > LONGEST_KEPT) {
            merge(piece);
            out.insert(out.end(), piece_ids_.begin(), piece_ids_.end());
            return;
        }
        name_.assign(piece);
        auto found = long_.find(name_);
        if (found == long_.end()) {
            if (long_.size() >= MOST_LONG) long_.clear();
            merge(piece);
            found = long_.emplace(name_, piece_ids_).first;
        }
        out.insert(out.end(), found->second.begin(), found->second.end());
    }

    // Writes the ids of the piece to `piece_ids_`.
    void merge(std::string_view piece) {
        piece_ids_.clear();
        if (!whole_.empty())
            if (const auto found = whole_.find(std::string(piece)); found != whole_.end()) {
                piece_ids_.push_back(found->second);
                return;
            }
        for (const char byte : piece) piece_ids_.push_back(byte_ids_[uint8_t(byte)]);
        piece_ids_.size() <= FEW ? merge_few(merges_, piece_ids_) : merge_many(merges_, piece_ids_);
    }

    Cutter cutter_;
    Merges merges_;
    std::array<int32_t, 256> byte_ids_;
    std::unordered_map<std::string, int32_t> whole_;
    std::array<std::vector<std::string>, 256> specials_;         // by first byte
    std::string first_bytes_;
    std::vector<Slot> slots_;
    size_t used_ = 0;
    Ids many_, piece_ids_;
    std::unordered_map<std::string, Ids> long_;
    std::string name_;
};

}  // namespace

PYBIND11_MODULE(_bpe, module) {
    module.doc() = "Byte-level BPE; used through megatron_ds.extensions.tokenizers.backend.";
    py::class_<Encoder>(module, "Encoder")
        .def(py::init<const std::vector<int32_t>&, const py::array_t<int32_t, py::array::c_style>&,
                      const std::vector<std::pair<std::string, int32_t>>&, const std::vector<std::string>&, std::string, bool,
                      int>(),
             py::arg("byte_ids"), py::arg("merges"), py::arg("whole"), py::arg("specials"), py::arg("classes"),
             py::arg("newer"), py::arg("most_digits"))
        .def("encode", &Encoder::encode, py::arg("texts"));
}
