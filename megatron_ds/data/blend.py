"""Blending: one stream of samples from several datasets, in proportion to their weights, with Megatron's values.

At every step the dataset that lags farthest behind its share comes next: the one with the largest
weight · max(step, 1) − samples drawn so far; of equals, the first. At no time is a dataset far from its share, so any
stretch of the training sees the mixture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .native_index import extension, num_threads

MAX_DATASETS = np.iinfo(np.int16).max
SURPLUS = 0.005
SEGMENT = 1 << 16                                           # steps that a thread draws at a time, at least


@dataclass(frozen=True)
class Blend:
    """Prefixes of corpora, and their weights as given; None to draw each sample of each corpus once."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def shares(self) -> list[float]:
        """Weights summing to 1, by numpy as Megatron does it: another order of summation could break a tie elsewhere."""
        weights = np.array(self.weights, np.float64)
        return (weights / weights.sum()).tolist()


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """`["0.3", "a", "0.7", "b"]`, or prefixes alone. Raises ConfigError naming the flag that the words were given to."""
    weights = [_number(word) for word in words[0::2]]
    if weights[0] is None:
        return Blend(tuple(words), None)
    prefixes = tuple(words[1::2])
    if len(words) % 2 or None in weights:
        raise ConfigError(f"{flag} {' '.join(words)}: give either prefixes alone, or a weight before each of them.")
    if not all(0 < w < math.inf for w in weights):
        raise ConfigError(f"{flag} {' '.join(words)}: a weight must be a positive number. Leave out a corpus of weight 0.")
    if len(prefixes) > MAX_DATASETS:
        raise ConfigError(f"{flag} names {len(prefixes)} corpora; at most {MAX_DATASETS} can be blended. Merge some of them.")
    return Blend(prefixes, tuple(weights))


def samples_to_provide(num_samples: int, share: float) -> int:
    """Samples that a dataset is built with for its share of a blend of `num_samples`: half a percent more, as in Megatron.

    Half a percent matters because the number decides how often documents repeat and how they are shuffled. It is always
    enough: lags sum to 0, so the largest is not negative, so no dataset gets more than share · (num_samples − 1) + 1.
    """
    return math.ceil(math.ceil(num_samples * share) * (1 + SURPLUS))


def build_blend_index(shares: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(int16 [size] which dataset, int64 [size] which of its samples); shares sum to 1."""
    return _draw(np.asarray(shares, np.float64), size, None)


def build_exhaustive_index(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same for every sample of every dataset once; a dataset that is used up is passed over."""
    sizes = np.asarray(sizes, np.int64)
    return _draw(sizes / sizes.sum(), int(sizes.sum()), sizes)


def _draw(shares: np.ndarray, size: int, limits: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    if not extension():
        return plain_draw(shares, size, limits)
    threads = num_threads()
    segment = max(SEGMENT, 64 * len(shares), -(-size // (4 * threads))) if threads > 1 else size
    return extension().blend(shares, size, limits, segment, threads)


def plain_draw(shares: np.ndarray, size: int, limits: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Every lag at every step, by numpy. limits: samples of each dataset, None for any number."""
    which, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    drawn, lag = np.zeros(len(shares)), np.empty(len(shares))
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

    def __init__(self, datasets: Sequence, dataset_index: np.ndarray, sample_index: np.ndarray):
        self.datasets, self.dataset_index, self.sample_index = datasets, dataset_index, sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.datasets[self.dataset_index[i]][int(self.sample_index[i])]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
