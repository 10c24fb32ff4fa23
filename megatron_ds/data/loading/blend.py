"""Blends: one stream of samples from several datasets, in proportion to their weights, as in Megatron.

Each step draws from the dataset that is farthest behind its share: the one with the largest
weight · max(step, 1) − samples drawn so far; of equals, the first. A dataset is never far from its share, so
any part of the training sees the mixture.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from .index_maps import extension, num_threads

MAX_DATASETS = np.iinfo(np.int16).max
SURPLUS = 0.005
SEGMENT = 1 << 16  # fewest steps that a thread draws at a time
BYTES_PER_STEP = 2 + 8  # of the result
BYTES_PER_THREAD = 60  # and dataset, besides the result: see csrc/data/blend_index.h
SPARE = 1 / 2000  # of the result, for that
COUNTED_AT_ONCE = 1 << 22
MOST_ROWS = 24  # of the table of draws
# A range of documents, which stands before a prefix.
RANGE = re.compile(r"([\d.]+(?:e-?\d+)?):([\d.]+(?:e-?\d+)?)")


def cut(num_documents: int, shares: Sequence[float]) -> tuple[range, ...]:
    """Return the documents of each part: contiguous ranges, as in Megatron.

    Bounds are running sums of the shares, rounded to a whole document (half to even).
    """
    bounds = [round(share * num_documents) for share in accumulate(shares, initial=0.0)]
    return tuple(range(first, last) for first, last in zip(bounds, bounds[1:]))


class CorpusSlice(NamedTuple):
    """A range of the documents of a corpus, as fractions of their number; by default all of them."""

    prefix: str
    first: float = 0.0
    last: float = 1.0

    def documents(self, count: int) -> range:
        """Return the range of `count` documents. Bounds are rounded to a whole document, half to even, as in
        BigScience's fork.
        """
        return range(round(self.first * count), round(self.last * count))

    @property
    def range_text(self) -> str:
        """ " 0:0.6" for a part of the documents, "" for all of them."""
        return (
            ""
            if (self.first, self.last) == (0, 1)
            else f" {self.first:g}:{self.last:g}"
        )

    @property
    def name(self) -> str:
        """The name without a folder, for tables and messages."""
        return Path(self.prefix).name + self.range_text


@dataclass(frozen=True)
class Blend:
    """Corpora or ranges of them, and their weights as given; None to draw each sample once."""

    slices: tuple[CorpusSlice, ...]
    weights: tuple[float, ...] | None
    left_out: tuple[str, ...] = ()  # of weight 0

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefix of each corpus."""
        return tuple(part.prefix for part in self.slices)

    def without(self, slices: Collection[CorpusSlice]) -> "Blend":
        """Return the blend without these corpora; the others keep their proportions."""
        kept = [i for i, part in enumerate(self.slices) if part not in slices]
        weights = None if self.weights is None else tuple(self.weights[i] for i in kept)
        return Blend(
            tuple(self.slices[i] for i in kept),
            weights,
            (*self.left_out, *(part.prefix for part in slices)),
        )

    @property
    def _given(self) -> tuple[float, ...]:
        assert self.weights is not None, "a blend without weights has no shares"
        return self.weights

    def times(self, sizes: Sequence[float]) -> "Blend":
        """Multiply each weight by its size, which turns epochs of each corpus into samples."""
        return replace(
            self, weights=tuple(w * size for w, size in zip(self._given, sizes))
        )

    @property
    def shares(self) -> list[float]:
        """Weights that sum to 1, for the number of samples of each corpus."""
        return normalized(self._given)

    @property
    def order_shares(self) -> list[float]:
        """Weights for the order of samples. Megatron normalizes twice, which can break a tie."""
        return normalized(self.shares)


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """Return `["0.3", "a", "0.7", "0:0.6", "b"]`, or prefixes alone, each with or without a range of its documents.

    Corpora of weight 0 are left out. Raises ConfigError.
    """
    # Weights and prefixes alternate, unless the first word is a prefix.
    given = f"{flag} {' '.join(words[:12])}{' …' if len(words) > 12 else ''}"
    items = list(_with_ranges(words, given))
    words_of_weights = [_number(item) for item in items[0::2]]
    if words_of_weights[0] is None:
        return Blend(tuple(map(_slice, items)), None)
    prefixes = tuple(map(_slice, items[1::2]))
    # Weights are proportions of any unit, for at most MAX_DATASETS corpora.
    weights = [weight for weight in words_of_weights if weight is not None]
    if len(items) % 2 or len(weights) < len(prefixes):
        raise ConfigError(
            f"{given}: give either prefixes alone, or a weight before each of them."
        )
    if wrong := [w for w in weights if not 0 <= w < math.inf]:
        raise ConfigError(
            f"{given}: weight {wrong[0]:g} is not allowed. Weights are proportions: numbers of "
            "at least 0, in any unit."
        )
    if not any(weights):
        raise ConfigError(
            f"{given}: all weights are 0, so there is nothing to draw. Give a corpus a weight "
            "above 0, or leave out the weights to read each corpus once."
        )
    if len(prefixes) > MAX_DATASETS:
        raise ConfigError(
            f"{flag} names {len(prefixes)} corpora; at most {MAX_DATASETS} can be blended. "
            "Merge some."
        )
    # Logs name a corpus of weight 0, which is not read.
    kept, left_out = (
        [i for i, w in enumerate(weights) if bool(w) == wanted]
        for wanted in (True, False)
    )
    return Blend(
        tuple(prefixes[i] for i in kept),
        tuple(weights[i] for i in kept),
        tuple(prefixes[i].prefix for i in left_out),
    )


def _with_ranges(words: Sequence[str], given: str) -> Iterator[str | CorpusSlice]:
    """Yield the words, each range and the prefix after it as one `CorpusSlice`."""
    remaining = iter(words)
    for word in remaining:
        found = RANGE.fullmatch(word)
        if not found:
            yield word
            continue
        first, last = map(_number, found.groups())
        prefix = next(remaining, None)
        if prefix is None:
            raise ConfigError(
                f"{given}: the range of documents {word} has no prefix after it. Add one."
            )
        if first is None or last is None or not 0 <= first < last <= 1:
            raise ConfigError(
                f"{given}: {word} is not a range of documents. Write two fractions between 0 "
                "and 1, such as 0:0.6 for the first 60 %."
            )
        yield CorpusSlice(prefix, first, last)


def _slice(item: str | CorpusSlice) -> CorpusSlice:
    return item if isinstance(item, CorpusSlice) else CorpusSlice(item)


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1. They are summed by numpy, as in Megatron: another order of summation could
    break a tie differently."""
    array = np.array(weights, np.float64)
    return (array / array.sum()).tolist()


def samples_to_provide(num_samples: int, share: float) -> int:
    """Return the number of samples that a dataset of this share is built with: half a percent more than its share, as
    in Megatron.

    The number decides how often documents repeat and how they are shuffled. It is always enough: lags sum to 0, so
    the largest is not negative, and no dataset gets more than share · (num_samples − 1) + 1.
    """
    return math.ceil(math.ceil(num_samples * share) * (1 + SURPLUS))


def build_blend_index(
    shares: Sequence[float], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (int16 [size] the dataset, int64 [size] the sample in it) of each step; shares sum to 1."""
    return _draw(np.asarray(shares, np.float64), size, None)


def build_exhaustive_index(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (int16 [n] the dataset, int64 [n] the sample in it) of each step, n the sum of the sizes.

    Every sample of every dataset occurs once; exhausted datasets are skipped.
    """
    limits = np.asarray(sizes, np.int64)
    total = int(limits.sum())
    return _draw(limits / total, total, limits)


def _draw(
    shares: np.ndarray, size: int, limits: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    if not extension():
        return plain_draw(shares, size, limits)
    threads, segment = plan_threads(len(shares), size, num_threads())
    return extension().blend(shares, size, limits, segment, threads)


def plan_threads(datasets: int, size: int, processors: int) -> tuple[int, int]:
    """Return (threads that draw, steps that one draws at a time).

    Each thread needs a state of every dataset. All processors draw if these states are small compared with
    the result; a short blend of many datasets is drawn by fewer threads.
    """
    affordable = int(SPARE * BYTES_PER_STEP * size / (BYTES_PER_THREAD * datasets))
    threads = max(1, min(processors, affordable, size // (2 * SEGMENT)))
    # Each thread draws twice, which balances the threads.
    return threads, size if threads == 1 else size // (2 * threads)


def plain_draw(
    shares: np.ndarray, size: int, limits: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw by numpy, which computes all lags at every step. limits: samples of each dataset; None for any number."""
    which = np.empty(size, np.int16)
    sample = np.empty(size, np.int64)
    drawn = np.zeros(len(shares))
    lag = np.empty(len(shares))
    for step in range(size):
        np.multiply(shares, max(step, 1), out=lag)
        np.subtract(lag, drawn, out=lag)
        if limits is not None:
            lag[drawn >= limits] = -np.inf
        dataset = int(lag.argmax())
        which[step], sample[step] = dataset, drawn[dataset]
        drawn[dataset] += 1
    return which, sample


class BlendedDataset:
    """Samples of several datasets in the order of a blend index."""

    def __init__(
        self, datasets: Sequence, dataset_index: np.ndarray, sample_index: np.ndarray
    ):
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.sample_index = sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.datasets[self.dataset_index[i]][int(self.sample_index[i])]


@dataclass(frozen=True)
class Draw:
    """Samples drawn from a corpus.  share: requested, or None.  tokens: of the corpus in this part."""

    name: str
    share: float | None
    samples: int
    tokens: int


def count_draws(dataset_index: np.ndarray, num_datasets: int) -> np.ndarray:
    """Return the samples drawn from each dataset; int64 [num_datasets]."""
    counts = np.zeros(num_datasets, np.int64)
    # bincount converts its input to int64, so a part at a time.
    for first in range(0, len(dataset_index), COUNTED_AT_ONCE):
        counts += np.bincount(
            dataset_index[first : first + COUNTED_AT_ONCE], minlength=num_datasets
        )
    return counts


def draws_text(part: str, draws: Sequence[Draw], seq_length: int) -> str:
    """Return a table of samples, share and epochs of each corpus, or of those that are read most often.

    train data                           share asked      samples   share drawn     epochs
      web_text_document                       70.00%          700        70.00%       0.31
      books_text_document                     30.00%          300        30.00%       4.20
    """
    total = max(1, sum(draw.samples for draw in draws))
    epochs = {draw: draw.samples * seq_length / max(1, draw.tokens) for draw in draws}
    shown = draws
    if len(draws) > MOST_ROWS:
        shown = sorted(draws, key=epochs.__getitem__, reverse=True)[:MOST_ROWS]
    width = max(24, *(len(draw.name) for draw in shown))
    rows = [
        f"{part + ' data':<{width + 2}} share asked      samples  share drawn   epochs"
    ]
    for draw in shown:
        asked = "" if draw.share is None else f"{draw.share:.2%}"
        rows.append(
            f"  {draw.name:<{width}} {asked:>11} {draw.samples:>12,} {draw.samples / total:>12.2%} "
            f"{epochs[draw]:>8.2f}"
        )
    if len(shown) < len(draws):
        rows.append(
            f"  … the {len(shown)} of {len(draws)} corpora that are read most often"
        )
    return "\n".join(rows)


def _number(word: str | CorpusSlice) -> float | None:
    if isinstance(word, CorpusSlice):
        return None
    try:
        return float(word)
    except ValueError:
        return None
