"""The sentences of each BERT sample: rows of sentence numbers, with Megatron's values and random numbers.

A document is a run of sentences: document d is the sentences documents[d] … documents[d + 1] − 1. It is cut,
from the front, into runs of whole sentences that reach a target length, and the runs of all documents and
epochs are shuffled.

    sentences of a document    | 0 | 1   | 2 | 3     | 4 | 5 |      target 9 tokens, lengths 4 6 3 8 4 5
    samples                    |--- 0 ---|---- 1 ----|-- 2 --|      the last one is the rest, of any length

Random numbers are those of C++: `mt19937(seed)` for the targets, `mt19937_64(seed + 1)` for the shuffle.
Pure; arrays may be mapped. Built by the compiled builder of `index_maps.py` if it is installed.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from ...data.loading.index_maps import extension
from ...errors import DataError

LONG_SENTENCE = 512  # tokens; documents with a longer sentence are left out
CHECKED_AT_ONCE = 1 << 16
SEEDS = range(2**31 - 1)  # for which std::mt19937_64(seed + 1) does not wrap around


def build_mapping(
    documents: np.ndarray,
    sizes: np.ndarray,
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int,
) -> np.ndarray:
    """[N, 3]: first sentence, last sentence + 1, target length. uint32, or uint64 from 2^32 sentences on.

    documents: [D + 1], `IndexedDataset.document_indices` or a slice of it.  sizes: tokens of every sentence
    of the corpus. max_num_samples: no further epoch begins after so many samples; the current epoch is
    finished, so N may be larger. max_seq_length: tokens of a sample without special tokens.  short_seq_prob:
    share of samples whose target is drawn from 2 … max_seq_length; 0 for none.  min_num_sent: 2 for sentence
    pairs, else 1. Raises DataError for impossible arguments.
    """
    _check(documents, sizes, max_seq_length, seed)
    ratio = short_ratio(short_seq_prob)
    arguments = (num_epochs, max_num_samples, max_seq_length)
    if extension() and sizes.dtype == np.int32:
        build = (
            extension().mapping_uint32
            if _dtype(sizes) == np.uint32
            else extension().mapping_uint64
        )
        return build(
            np.ascontiguousarray(documents, np.int64),
            sizes,
            *arguments,
            ratio,
            seed,
            min_num_sent,
        )
    return plain_mapping(documents, sizes, *arguments, ratio, seed, min_num_sent)


def plain_mapping(
    documents: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    ratio: int,
    seed: int,
    min_num_sent: int,
) -> np.ndarray:
    """Return the result of `build_mapping`, computed in Python.  ratio: one in so many samples is short."""
    targets = _targets(ratio, max_seq_length, seed)
    rows: list[tuple[int, int, int]] = []
    for _ in range(num_epochs):
        if len(rows) >= max_num_samples:
            break
        for _, lengths, first in _documents(
            documents, sizes, min_num_sent, tested_from=2
        ):
            rows += _runs(first, lengths, targets, min_num_sent, rest=2)
    return _shuffled(rows, 3, _dtype(sizes), seed)


def build_blocks_mapping(
    documents: np.ndarray,
    sizes: np.ndarray,
    title_sizes: np.ndarray,
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> np.ndarray:
    """[N, 4]: first sentence, last sentence + 1, document, number of the block in its epoch. For retrieval.

    title_sizes: [D], tokens of each document's title, which is part of all its blocks. Others as in
    `build_mapping`.
    """
    _check(documents, sizes, max_seq_length, seed)
    least = 1 if use_one_sent_blocks else 2
    arguments = (num_epochs, max_num_samples, max_seq_length, seed)
    if extension() and sizes.dtype == title_sizes.dtype == np.int32:
        native = extension()
        build = (
            native.blocks_mapping_uint32
            if _dtype(sizes) == np.uint32
            else native.blocks_mapping_uint64
        )
        return build(
            np.ascontiguousarray(documents, np.int64),
            sizes,
            title_sizes,
            *arguments,
            least,
        )
    return plain_blocks_mapping(documents, sizes, title_sizes, *arguments, least)


def plain_blocks_mapping(
    documents: np.ndarray,
    sizes: np.ndarray,
    title_sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    least: int,
) -> np.ndarray:
    """Return the result of `build_blocks_mapping`, computed in Python.

    least: sentences of a block, and of the rest of its document
    """
    rows: list[tuple[int, int, int, int]] = []
    for _ in range(num_epochs):
        if len(rows) >= max_num_samples:
            break
        before = len(rows)
        for document, lengths, first in _documents(
            documents, sizes, least, tested_from=least
        ):
            targets = repeat(max_seq_length - int(title_sizes[document]))
            for begin, end, _ in _runs(first, lengths, targets, least, rest=least):
                rows.append((begin, end, document, len(rows) - before))
    return _shuffled(rows, 4, _dtype(sizes), seed)


def short_ratio(short_seq_prob: float) -> int:
    """Return n if one sample in n is short; 0 for none. Halves are rounded up, as in C and unlike Python."""
    return (
        min(math.floor(1.0 / short_seq_prob + 0.5), 2**31 - 1)
        if short_seq_prob > 0
        else 0
    )


def _dtype(sizes: np.ndarray) -> type[np.unsignedinteger]:
    return np.uint32 if len(sizes) <= np.iinfo(np.uint32).max else np.uint64


def _documents(
    documents: np.ndarray, sizes: np.ndarray, least: int, tested_from: int
) -> Iterator[tuple[int, list[int], int]]:
    """(document, lengths of its sentences, its first sentence) of those with enough sentences, none too long.

    tested_from: in documents of fewer sentences, long ones are allowed
    """
    bounds = np.asarray(documents).tolist()
    for document, (first, last) in enumerate(zip(bounds, bounds[1:])):
        if last - first >= max(least, 1):
            lengths = sizes[first:last].tolist()
            if last - first < tested_from or max(lengths) <= LONG_SENTENCE:
                yield document, lengths, first


def _runs(
    first: int, lengths: list[int], targets: Iterator[int], least: int, rest: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (first sentence, last sentence + 1, target) of the samples of a document. The last target is not used.

    rest: fewest sentences that may be left for the samples after it.
    """
    begin = first
    tokens = 0
    left = len(lengths)
    target = next(targets)
    for end, length in enumerate(lengths, first + 1):
        tokens = tokens + length
        left = left - 1
        if not left or tokens >= target and left >= rest and end - begin >= least:
            yield begin, end, target
            begin = end
            tokens = 0
            target = next(targets)


def _targets(ratio: int, longest: int, seed: int) -> Iterator[int]:
    """Target lengths in the order of the draws."""
    random = np.random.RandomState(seed)  # equal to std::mt19937(seed)
    while True:
        if not ratio:
            yield longest
            continue
        drawn = random.randint(0, 2**32, size=4096, dtype=np.uint32).astype(np.int64)
        yield from np.where(
            drawn % ratio == 0, 2 + drawn % (longest - 1), longest
        ).tolist()


def _shuffled(
    rows: Sequence[tuple[int, ...]], width: int, dtype: type, seed: int
) -> np.ndarray:
    """Return the rows in random order, by Fisher and Yates' shuffle from the back."""
    order = list(range(len(rows)))
    # Each draw is from the part that is not shuffled yet.
    sizes = np.arange(len(rows), 1, -1, dtype=np.uint64)
    drawn = (mt19937_64(seed + 1, len(sizes)) % sizes).tolist()
    for i, j in zip(range(len(rows) - 1, 0, -1), drawn):
        order[i], order[j] = order[j], order[i]
    return np.array(rows, dtype).reshape(len(rows), width)[order]


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of `std::mt19937_64(seed)`, uint64.

    Nishimura 2000, "Tables of 64-bit Mersenne Twisters", as in the C++ standard, [rand.predef].
    """
    # The seed fills the first state.
    words = 312
    middle = 156
    mask = 2**64 - 1
    first = [seed]
    for i in range(1, words):
        first.append((6364136223846793005 * (first[-1] ^ first[-1] >> 62) + i) & mask)
    state = np.array(first, np.uint64)
    blocks = []

    def twist(high: np.ndarray, low: np.ndarray, far: np.ndarray) -> np.ndarray:
        y = high & np.uint64(0xFFFFFFFF80000000) | low & np.uint64(0x7FFFFFFF)
        return (
            far ^ y >> np.uint64(1) ^ (y & np.uint64(1)) * np.uint64(0xB5026F5AA96619E9)
        )

    # Each round renews the whole state in three parts: the second and third read words of the first.
    for _ in range(0, count, words):
        state[:middle] = twist(state[:middle], state[1 : middle + 1], state[middle:])
        state[middle:-1] = twist(
            state[middle:-1], state[middle + 1 :], state[: middle - 1]
        )
        state[-1:] = twist(state[-1:], state[:1], state[middle - 1 : middle])
        # Words of the state are tempered before they are returned.
        x = state ^ state >> np.uint64(29) & np.uint64(0x5555555555555555)
        x ^= x << np.uint64(17) & np.uint64(0x71D67FFFEDA60000)
        x ^= x << np.uint64(37) & np.uint64(0xFFF7EEE000000000)
        blocks.append(x ^ x >> np.uint64(43))
    return np.concatenate([np.empty(0, np.uint64), *blocks])[:count]


def _check(
    documents: np.ndarray, sizes: np.ndarray, max_seq_length: int, seed: int
) -> None:
    bounds = np.asarray(documents)
    pieces = (
        bounds[first : first + CHECKED_AT_ONCE + 1]
        for first in range(0, len(bounds), CHECKED_AT_ONCE)
    )
    descends = any((piece[1:] < piece[:-1]).any() for piece in pieces)
    if len(bounds) == 0 or bounds[0] < 0 or bounds[-1] > len(sizes) or descends:
        raise DataError(
            f"the document boundaries are not ascending numbers in 0 … {len(sizes)}: give "
            "document_indices of the same corpus, or a slice of them with its last boundary."
        )
    if max_seq_length < 2:
        raise DataError(
            f"samples of at most {max_seq_length} tokens are too short: a sample has at least "
            "2 tokens. Use a longer --seq-length."
        )
    if seed not in SEEDS:
        raise DataError(
            f"seed {seed} is not in 0 … {SEEDS[-1]}, the range of Megatron's shuffle. Use "
            "another --seed."
        )
