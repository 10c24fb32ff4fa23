"""The order in which a GPT dataset reads its corpus: three arrays, with Megatron's values.

    document_index  [E * docs]   the documents in the order they are read, E epochs, shuffled
    sample_index    [M + 1, 2]   where sample i begins: (position in document_index, token in that document)
    shuffle_index   [M]          the cut that is the i-th sample of training

The documents, in the order of document_index, are one long stream of tokens; sample i is the s + 1 tokens i·s
… i·s + s. The last one is only a label, and is the first token of the next sample.

    stream   | doc 2          | doc 0     | doc 5   | ...
    samples  |---- 0 ----|---- 1 ----|---- 2 ----|        s = 4 tokens + 1 shared

A numpy `RandomState(seed)` shuffles document_index first, then shuffle_index. Pure; `lengths` may be mapped.

`extension` is the compiled index builder, csrc/data/index_builder.cpp. It is optional: the arrays here, in
`blend.py` and of features are also built with numpy, with the same values, several times slower.
"""

import functools
import logging
import os
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ...host import load_compiled

logger = logging.getLogger(__name__)
INT32 = np.iinfo(np.int32).max
MOST_THREADS = 16  # random reads are limited by memory, not by cores
SEPARATE_LAST_EPOCH_BELOW = 0.80


class IndexMaps(NamedTuple):
    """The arrays with the order of documents, the start of each sample, and the order of samples."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def build_index_maps(
    lengths: np.ndarray,
    documents: np.ndarray,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> IndexMaps:
    """Return the three arrays for at least `num_samples` samples of `documents`; one epoch for `num_samples` None.

    lengths: tokens of every sequence of the corpus.  Raises DataError when the documents hold no sample.
    """
    tokens_per_epoch = sum_of(lengths, documents)
    if (
        tokens_per_epoch == 0
        or num_samples is None
        and num_samples_in(tokens_per_epoch, seq_length) == 0
    ):
        raise DataError(
            f"{len(documents)} documents hold {tokens_per_epoch} tokens: not one sample of "
            f"{seq_length} + 1. Use more text or a shorter --seq-length."
        )
    # Whole epochs are laid end to end and cut into samples.
    epochs, separate = epochs_of(tokens_per_epoch, seq_length, num_samples)
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, epochs, separate, random)
    sample_index = build_sample_index(
        lengths, document_index, seq_length, epochs * tokens_per_epoch
    )
    # The samples of a separate last epoch are shuffled after the others.
    total = len(sample_index) - 1
    first = (
        num_samples_in((epochs - 1) * tokens_per_epoch, seq_length)
        if separate
        else total
    )
    return IndexMaps(
        document_index, sample_index, build_shuffle_index(first, total, random)
    )


def epochs_of(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None
) -> tuple[int, bool]:
    """Return (number of epochs, whether the last is shuffled separately). The maps depend on the number of samples
    by these alone."""
    epochs = epochs_needed(tokens_per_epoch, seq_length, num_samples)
    separate = last_epoch_is_separate(tokens_per_epoch, seq_length, num_samples, epochs)
    return epochs, separate


def num_samples_in(num_tokens: int, seq_length: int) -> int:
    """Return the number of samples in a stream of tokens. Each takes s + 1 tokens and shares the last one with the
    next sample."""
    return (num_tokens - 1) // seq_length


def epochs_needed(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None
) -> int:
    """Return the smallest E with E · tokens_per_epoch >= num_samples · s + 1."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def last_epoch_is_separate(
    tokens_per_epoch: int, seq_length: int, num_samples: int | None, epochs: int
) -> bool:
    """Return whether so little of the last epoch is used that it is shuffled separately.

    Shuffled with the others, a partly used last epoch would leave parts of the corpus read once less than the
    rest.
    """
    if num_samples is None or epochs == 1:
        return False
    from_last = num_samples - num_samples_in(
        (epochs - 1) * tokens_per_epoch, seq_length
    )
    return from_last < int(
        SEPARATE_LAST_EPOCH_BELOW * num_samples_in(tokens_per_epoch, seq_length)
    )


def build_document_index(
    documents: np.ndarray, epochs: int, separate: bool, random: np.random.RandomState
) -> np.ndarray:
    """Return `epochs` copies of `documents` shuffled together; if `separate`, the last copy is shuffled alone.

    int32, or int64 if a document number needs it.
    """
    largest = int(max(documents[0], documents[-1])) if len(documents) else 0
    index = np.tile(
        np.asarray(documents, np.int32 if largest <= INT32 else np.int64), epochs
    )
    last = len(index) - len(documents) if separate else 0
    if last:
        shuffle(index[:last], random)
    shuffle(index[last:], random)
    return index


def sum_of(lengths: np.ndarray, documents: np.ndarray) -> int:
    """Return the number of tokens of the documents. A range of the corpus, the usual case, is not copied."""
    first, last = (int(documents[0]), int(documents[-1])) if len(documents) else (0, -1)
    is_range = last - first + 1 == len(documents) and bool(
        (documents[1:] > documents[:-1]).all()
    )
    return int(
        (lengths[first : last + 1] if is_range else lengths[documents]).sum(
            dtype=np.int64
        )
    )


def build_sample_index(
    lengths: np.ndarray,
    document_index: np.ndarray,
    seq_length: int,
    num_tokens: int | None = None,
) -> np.ndarray:
    """Return [M + 1, 2]: where the samples begin, and where the last one ends. int32, or int64 if a number needs it.

    Row i names the document that holds token i·s of the stream, so never an empty document, except that row 0
    is always the beginning.  num_tokens: of all documents of the index, if known.
    """
    if (
        not extension()
        or lengths.dtype != np.int32
        or document_index.dtype not in (np.int32, np.int64)
    ):
        return plain_sample_index(lengths, document_index, seq_length)
    if num_tokens is None:
        num_tokens = int(lengths[document_index].sum(dtype=np.int64))
    build = (
        extension().sample_index_int32
        if len(document_index) <= INT32
        else extension().sample_index_int64
    )
    return build(lengths, document_index, seq_length, num_tokens, num_threads())


def plain_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int
) -> np.ndarray:
    """Return the result of `build_sample_index`, computed with numpy by bisection in the ends of the documents."""
    sizes = lengths[document_index]
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = (
        np.arange(num_samples_in(int(ends[-1]), seq_length) + 1, dtype=np.int64)
        * seq_length
    )
    position = np.searchsorted(ends, starts, side="right")
    position[0] = 0
    largest = max(len(document_index), int(sizes.max()))
    index = np.empty((len(starts), 2), np.int32 if largest <= INT32 else np.int64)
    index[:, 0] = position
    index[:, 1] = starts - (ends[position] - sizes[position])
    index[0, 1] = 0
    return index


def build_shuffle_index(
    first: int, total: int, random: np.random.RandomState
) -> np.ndarray:
    """Return [0, first) shuffled, then [first, total) shuffled. uint32, or int64 where needed."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(total, dtype=dtype)
    shuffle(index[:first], random)
    if first < total:
        shuffle(index[first:], random)
    return index


@functools.cache
def extension() -> ModuleType | Any:
    """Return the compiled module; None, logged once, where the package was installed without a compiler."""
    return load_compiled(
        "_index_builder",
        "the index builder",
        "numpy builds index maps instead, slowly where there are millions of samples",
        logger,
    )


def num_threads() -> int:
    """Return the number of threads to build with: the processors that this process may use, at most MOST_THREADS."""
    allowed = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return min(allowed, MOST_THREADS)


def shuffle(array: np.ndarray, random: np.random.RandomState) -> None:
    """Shuffle in place as `random.shuffle(array)` does: to the same order, and with the same state of `random`
    afterwards."""
    is_supported = (
        1 < len(array) <= 2**32
        and array.itemsize in (4, 8)
        and array.flags.c_contiguous
    )
    if not is_supported or not extension():
        return random.shuffle(array)
    state = random.get_state(legacy=False)
    position = extension().shuffle(array, state["state"]["key"], state["state"]["pos"])
    state["state"]["pos"] = position
    random.set_state(state)
