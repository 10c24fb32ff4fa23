"""In which order a GPT dataset visits its corpus: three arrays, with Megatron's values.

    document_index  [E * docs]   the documents in the order they are read, E epochs, shuffled
    sample_index    [M + 1, 2]   where sample i begins: (position in document_index, token in that document)
    shuffle_index   [M]          which of these cuts the i-th sample of training is

The documents, read in document order, are one long stream of tokens; sample i is the tokens i·s … i·s + s (s + 1 of them:
the last one is only ever a label, and is the first token of the next sample).

    stream   | doc 2          | doc 0     | doc 5   | ...
    samples  |---- 0 ----|---- 1 ----|---- 2 ----|        s = 4 tokens + 1 shared

A numpy `RandomState(seed)` is consumed first by document_index, then by shuffle_index. Pure; `lengths` may be mapped.
The compiled builder does the work where it is there (`native_index.py`).
"""

from dataclasses import dataclass

import numpy as np

from ...errors import DataError
from ..loading.native_index import extension, num_threads, shuffle

INT32 = np.iinfo(np.int32).max
SEPARATE_LAST_EPOCH_BELOW = 0.80


@dataclass(frozen=True)
class IndexMaps:
    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def build_index_maps(lengths: np.ndarray, documents: np.ndarray, seq_length: int, num_samples: int | None,
                     seed: int) -> IndexMaps:
    """The three arrays for at least `num_samples` samples out of `documents`; one epoch when `num_samples` is None.

    lengths: tokens of every sequence of the corpus.  Raises DataError when the documents hold no sample.
    """
    tokens_per_epoch = sum_of(lengths, documents)
    if tokens_per_epoch == 0 or num_samples is None and num_samples_in(tokens_per_epoch, seq_length) == 0:
        raise DataError(f"{len(documents)} documents hold {tokens_per_epoch} tokens: not one sample of {seq_length} + 1.")
    epochs = epochs_needed(tokens_per_epoch, seq_length, num_samples)
    separate = last_epoch_is_separate(tokens_per_epoch, seq_length, num_samples, epochs)
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, epochs, separate, random)
    sample_index = build_sample_index(lengths, document_index, seq_length, epochs * tokens_per_epoch)
    total = len(sample_index) - 1
    first = num_samples_in((epochs - 1) * tokens_per_epoch, seq_length) if separate else total
    return IndexMaps(document_index, sample_index, build_shuffle_index(first, total, random))


def num_samples_in(num_tokens: int, seq_length: int) -> int:
    """Samples that a stream of tokens yields; one more token than s is needed for each, shared with the next."""
    return (num_tokens - 1) // seq_length


def epochs_needed(tokens_per_epoch: int, seq_length: int, num_samples: int | None) -> int:
    """The smallest E with E · tokens_per_epoch >= num_samples · s + 1."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def last_epoch_is_separate(tokens_per_epoch: int, seq_length: int, num_samples: int | None, epochs: int) -> bool:
    """Whether so little of the last epoch is used that it is shuffled by itself.

    Shuffled with the others, a last epoch of which only some samples are needed would leave parts of the corpus seen
    one time less than the rest.
    """
    if epochs == 1:
        return False
    from_last = num_samples - num_samples_in((epochs - 1) * tokens_per_epoch, seq_length)
    return from_last < int(SEPARATE_LAST_EPOCH_BELOW * num_samples_in(tokens_per_epoch, seq_length))


def build_document_index(documents: np.ndarray, epochs: int, separate: bool, random: np.random.RandomState) -> np.ndarray:
    """`epochs` copies of `documents` shuffled together, the last one by itself behind the others if `separate`.

    int32; int64 where the number of a document needs it.
    """
    largest = int(max(documents[0], documents[-1])) if len(documents) else 0
    index = np.tile(np.asarray(documents, np.int32 if largest <= INT32 else np.int64), epochs)
    last = len(index) - len(documents) if separate else 0
    if last:
        shuffle(index[:last], random)
    shuffle(index[last:], random)
    return index


def sum_of(lengths: np.ndarray, documents: np.ndarray) -> int:
    """Tokens of the documents, a range of the corpus as a rule: then nothing is copied."""
    first, last = (int(documents[0]), int(documents[-1])) if len(documents) else (0, -1)
    is_range = last - first + 1 == len(documents) and bool((documents[1:] > documents[:-1]).all())
    return int((lengths[first:last + 1] if is_range else lengths[documents]).sum(dtype=np.int64))


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, seq_length: int,
                       num_tokens: int | None = None) -> np.ndarray:
    """[M + 1, 2]: where the samples begin, and where the last one ends. int32, int64 where a number needs it.

    Row i is the document that holds token i·s of the stream: an empty document holds no token, so it is never named, except
    that row 0 is always the very beginning.  num_tokens: of all documents of the index, where it is known.
    """
    if not extension() or lengths.dtype != np.int32 or document_index.dtype not in (np.int32, np.int64):
        return plain_sample_index(lengths, document_index, seq_length)
    if num_tokens is None:
        num_tokens = int(lengths[document_index].sum(dtype=np.int64))
    build = extension().sample_index_int32 if len(document_index) <= INT32 else extension().sample_index_int64
    return build(lengths, document_index, seq_length, num_tokens, num_threads())


def plain_sample_index(lengths: np.ndarray, document_index: np.ndarray, seq_length: int) -> np.ndarray:
    """The same with numpy: by bisection in the ends of the documents."""
    sizes = lengths[document_index]
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = np.arange(num_samples_in(int(ends[-1]), seq_length) + 1, dtype=np.int64) * seq_length
    position = np.searchsorted(ends, starts, side="right")
    position[0] = 0
    largest = max(len(document_index), int(sizes.max()))
    index = np.empty((len(starts), 2), np.int32 if largest <= INT32 else np.int64)
    index[:, 0] = position
    index[:, 1] = starts - (ends[position] - sizes[position])
    index[0, 1] = 0
    return index


def build_shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """[0, first) shuffled, then [first, total) shuffled. uint32, int64 when there are too many."""
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(total, dtype=dtype)
    shuffle(index[:first], random)
    if first < total:
        shuffle(index[first:], random)
    return index
