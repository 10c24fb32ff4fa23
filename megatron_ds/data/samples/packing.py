"""Whole documents packed into samples, instead of one stream of documents cut every s tokens.

    stream     | a a a b b|b b b c c|c d d d d|
    packed     | a a a c c c .|b b b b b . .|d d d d . . .|

A document is cut only if it is longer than a sample; then consecutive pieces share a token, so that each
token except a document's first is predicted once. Pieces are packed by the histogram of their lengths:
longest first, each into the fullest open sample with room for it (best fit; Krell et al. 2021,
arXiv:2107.02027, section 3 and algorithm 2), all pieces of a length at once, so the work hardly depends on
their number. The rest of a sample is padding, a few thousandths for ordinary text. Fewer truncated documents
help the model: Ding et al. 2024 (arXiv:2404.10830), section 4.
"""

import bisect
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DataError
from ..kind import PAD
from ..loading.cache import cached_arrays, default_cache
from ..text.indexed import IndexedDataset
from ..text.mask_file import LossMasks

logger = logging.getLogger(__name__)


class Pattern(NamedTuple):
    """A number of samples, each of which holds one piece of each of these lengths."""

    lengths: tuple[int, ...]
    samples: int


class Packs(NamedTuple):
    """Piece p is `length[p]` tokens of sequence `document[p]` from `start[p]` on.

    Sample i holds the pieces `members[bounds[i]:bounds[i + 1]]`.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    members: np.ndarray
    bounds: np.ndarray


def pack_lengths(histogram: Mapping[int, int], capacity: int) -> list[Pattern]:
    """Return the patterns that pack `histogram[length]` pieces of each length into samples of `capacity` tokens."""
    open_samples: dict[int, list[Pattern]] = {}  # free tokens → patterns
    rooms: list[int] = []  # keys of open_samples, ascending

    def put(pattern: Pattern, room: int) -> None:
        if room not in open_samples:
            open_samples[room] = []
            bisect.insort(rooms, room)
        open_samples[room].append(pattern)

    # Longest pieces first, each into the sample with the least room that it fits.
    for length in sorted(histogram, reverse=True):
        left = histogram[length]
        while left:
            at = bisect.bisect_left(rooms, length)
            # Where no sample has room, new ones begin, each with as many pieces of this length as fit.
            if at == len(rooms):
                each = min(capacity // length, left)
                samples = left // each
                put(Pattern((length,) * each, samples), capacity - each * length)
                left -= samples * each
                continue
            # Samples with room take one more piece each; the rest of the pattern keeps its room.
            room = rooms[at]
            pattern = open_samples[room].pop()
            if not open_samples[room]:
                del open_samples[room], rooms[at]
            taken = min(pattern.samples, left)
            if pattern.samples > taken:
                put(pattern._replace(samples=pattern.samples - taken), room)
            put(Pattern((*pattern.lengths, length), taken), room - length)
            left -= taken
    return [pattern for room in rooms for pattern in open_samples[room]]


def build_packs(
    lengths: np.ndarray, documents: range, seq_length: int, seed: int
) -> Packs:
    """Return the samples of one epoch over these sequences of a corpus. `seed` assigns the pieces to samples."""
    # Cut each sequence into pieces of s + 1 tokens, which share a token with the next one.
    tokens = lengths[documents.start : documents.stop].astype(np.int64)
    # A sequence of one token predicts nothing.
    pieces = np.maximum(0, -(-(tokens - 1) // seq_length))
    document = np.repeat(np.arange(documents.start, documents.stop), pieces)
    start = (
        np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    ) * seq_length
    length = np.minimum(seq_length + 1, np.repeat(tokens, pieces) - start)

    # Group the pieces by length; the seed orders the pieces of one length.
    drawn = np.random.RandomState(seed).permutation(len(document))
    by_length = drawn[np.argsort(length[drawn], kind="stable")]
    found, first, counts = np.unique(
        length[by_length], return_index=True, return_counts=True
    )
    next_piece = dict(zip(found.tolist(), first.tolist()))
    members = [np.zeros(0, np.int64)]
    sizes = [np.zeros(1, np.int64)]
    # Fill the patterns with pieces, in that order.
    for lengths_of, count in pack_lengths(
        dict(zip(found.tolist(), counts.tolist())), seq_length + 1
    ):
        columns = []
        for n in lengths_of:
            columns.append(by_length[next_piece[n] : next_piece[n] + count])
            next_piece[n] += count
        members.append(np.stack(columns, axis=1).ravel())
        sizes.append(np.full(count, len(lengths_of)))
    return Packs(
        document,
        start,
        length,
        np.concatenate(members),
        np.cumsum(np.concatenate(sizes)),
    )


class PackedDataset:
    """Sample i is {"tokens": int64 [s + 1], padded, "document_ids": int64 [s + 1], the number of the piece}.

    Each epoch has the same packs in another order. `num_samples` in all; None for one epoch.
    """

    def __init__(
        self,
        corpus: IndexedDataset,
        packs: Packs,
        seq_length: int,
        num_samples: int | None,
        seed: int,
        masks: LossMasks | None = None,
    ):
        self.corpus = corpus
        self.masks = masks
        self.packs = packs
        self.seq_length = seq_length
        self.seed = seed
        self.per_epoch = len(packs.bounds) - 1
        self.num_samples = num_samples or self.per_epoch

    def __len__(self) -> int:
        return self.num_samples if self.per_epoch else 0

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        epoch, number_in_epoch = divmod(i, self.per_epoch)
        pack = _order(self.per_epoch, self.seed, epoch)[number_in_epoch]
        packs = self.packs
        tokens = np.full(self.seq_length + 1, PAD, np.int64)
        document_ids = np.empty(self.seq_length + 1, np.int64)
        loss_mask = np.zeros(self.seq_length + 1, np.uint8)
        # Each piece is a document of its own, which attention does not leave.
        at = 0
        for number, piece in enumerate(
            packs.members[packs.bounds[pack] : packs.bounds[pack + 1]].tolist()
        ):
            end = at + int(packs.length[piece])
            place = (int(packs.document[piece]), int(packs.start[piece]), end - at)
            tokens[at:end] = self.corpus.get(*place)
            if self.masks is not None:
                loss_mask[at:end] = self.masks.get(*place)
            document_ids[at:end] = number
            at = end
        self.corpus.refuse_negative(tokens[:at], f"sample {i}")
        document_ids[at:] = number + 1  # padding is a document of its own
        sample = {"tokens": tokens, "document_ids": document_ids}
        return sample if self.masks is None else sample | {"loss_mask": loss_mask}


@lru_cache(maxsize=16)  # several corpora, each at the border of two epochs
def _order(samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(samples)


def open_packed_dataset(
    corpus: IndexedDataset,
    documents: range,
    *,
    title: str,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    cache: str | Path | None = None,
    masks: LossMasks | None = None,
) -> PackedDataset:
    """Return the dataset of a range of documents, packed. Its packs are read from the cache, or built and stored
    there.

    num_samples: samples in all, over several epochs; None for one epoch
    masks: of a corpus of conversations, which lose their end where they are longer than a sample: an answer
    without its question is nothing to learn
    """
    # The packs are stored under all that determines them.
    kind = "PackedDataset" if masks is None else "PackedChats"
    key = {
        "class": kind,
        **corpus.key(documents),
        "sequence_length": seq_length,
        "random_seed": seed,
    }

    def build() -> dict[str, np.ndarray]:
        corpus.check()
        lengths = corpus.lengths
        if masks is not None:
            lengths = np.minimum(lengths, seq_length + 1)
            _report_cut_chats(masks, documents, seq_length)
        packs = build_packs(lengths, documents, seq_length, seed)
        room = (len(packs.bounds) - 1) * (seq_length + 1)
        logger.info(
            "%s: %d documents packed into %d samples, %.2f%% full",
            corpus.prefix,
            len(documents),
            len(packs.bounds) - 1,
            100 * packs.length.sum() / max(room, 1),
        )
        return packs._asdict()

    # They are built only where the cache has none.
    directory = Path(cache) if cache else default_cache(corpus.prefix)
    arrays = cached_arrays(
        directory,
        title.replace("GPTDataset", kind),
        key,
        Packs._fields,
        build,
    )
    return PackedDataset(corpus, Packs(**arrays), seq_length, num_samples, seed, masks)


def _report_cut_chats(masks: LossMasks, documents: range, seq_length: int) -> None:
    """Warn of conversations that are longer than a sample. Raises DataError if no conversation keeps an answer."""
    corpus = masks.corpus
    room = seq_length + 1
    chosen = corpus.lengths[documents.start : documents.stop]
    cut = documents.start + np.flatnonzero(chosen > room)
    if not len(cut):
        return
    # The first token of a conversation is not predicted.
    empty = sum(not masks.get(i, 1, seq_length).any() for i in cut.tolist())
    if empty == len(documents):
        raise DataError(
            f"{corpus.prefix}: all answers of all {empty} conversations begin after the {room} tokens of a sample, "
            "so that no token would be learned. Use a larger --seq-length."
        )
    logger.warning(
        "%s: %d of %d conversations are longer than the %d tokens of a sample and lose their end, %d of them all of "
        "their answers. Use a larger --seq-length to keep them",
        corpus.prefix,
        len(cut),
        len(documents),
        room,
        empty,
    )
