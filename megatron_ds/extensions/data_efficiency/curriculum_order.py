"""The order of a curriculum: easy samples first, as a pure function of the position in the stream of the run.

The index files and schedules of the metrics give the samples that are *admitted* at each step:

    by value        the samples whose value is at most the difficulty
    by percentile   the difficulty · (n // max_difficulty) easiest of n samples; all at the maximum

With several metrics a sample is admitted once each metric admits it. It stays admitted even if a schedule
falls.

Samples are sorted by difficulty. When the number of admitted samples grows, the new ones are a *cluster*. A
*stage* is the part of the stream between two changes. As in DeepSpeed, a stage draws from all clusters in
proportion to their sizes, reads each cluster without repetition, and shuffles it again after its end.

    sorted by difficulty   | cluster 0 | cluster 1 |  cluster 2   | not yet |
    stage 0 draws from      ~~~~~~~~~~~
    stage 1                 ~~~~~~~~~~~~~~~~~~~~~~~
    stage 2                 ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~

DeepSpeed's random generator loses its state on resume. Here all numbers are pure in (seed, position):

  cluster    position j of a stage with T samples maps to x = (a·j + b) mod T, with a prime to T and near T /
             golden ratio; the cluster that holds x is drawn. Consecutive positions are spread evenly, and T
             of them reach each x once. The number of draws from a cluster before j is a sum of floors,
             computed in O(log j) steps.
  sample     the k-th draw from a cluster is item k mod size of its pass k // size, in an order given by a
             permutation that is computed at single points without being stored (`shuffled`).

So resuming is free, and the order depends neither on the layout nor on the batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np

from ...data.loading.cache import cached_arrays
from ...errors import DataError
from ...host.content_hash import content_hash
from .curricula import Metric
from .difficulty_analysis import describes, read_description
from .difficulty_metrics import ListFile

logger = logging.getLogger(__name__)
MOST_SAMPLES = 1 << 31  # products of two such numbers fit 64 bits
MOST_STAGES = 2048  # a table of its square is kept: 32 MiB
GOLDEN = (5**0.5 - 1) / 2
ROUNDS = 6  # of the Feistel network; 4 look random already


class MetricIndex:
    """The samples of a dataset, sorted by one metric, and the number that each difficulty admits.

    easiest_first  integers [n]: numbers of samples, mapped from the index file
    """

    def __init__(self, metric: Metric, total: int, identity: dict | None = None):
        """total     number of samples of the dataset
        identity  `difficulty_analysis.identity` of the dataset

        Raises DataError if the index was made from other data.
        """
        self.metric = metric
        index = ListFile(metric.index_to_sample_path)
        self.easiest_first = index.flat
        self._check(total, identity)
        if metric.difficulty_type == "value":
            path = metric.index_to_metric_path
            assert path is not None, "read_metric requires it of values"
            values = ListFile(path)
            is_ascending = bool((values.flat[1:] > values.flat[:-1]).all())
            if not len(values) == len(index) == len(values.flat) or not is_ascending:
                raise DataError(
                    f"{self} {values.idx_path} does not hold one value, "
                    f"in ascending order, for each of the {len(index)} rows of "
                    f"{index.idx_path}: the two do not belong together. "
                    "Name the index_to_metric and the index_to_sample (not the "
                    "percentile_merged) of one analysis."
                )
            self.values = values.flat
            self.bounds = index.bounds

    def admitted(self, difficulty: int) -> int:
        """Return the number of samples that this difficulty admits."""
        if self.metric.difficulty_type == "value":
            row = np.searchsorted(self.values, difficulty, side="right")
            return int(self.bounds[row])
        # By percentile; the rest of the division is admitted at the maximum.
        total = len(self.easiest_first)
        most = self.metric.difficulty.maximum
        if difficulty == most:
            return total
        return total // most * difficulty

    def smallest(self) -> str:
        """Return the lowest difficulty that admits a sample, for messages."""
        name = self.metric.name
        if self.metric.difficulty_type == "value":
            return f"{name}: the smallest value is {self.values[0]}"
        parts = self.metric.difficulty.maximum
        count = len(self.easiest_first)
        return f"{name}: {count} samples are divided into {parts} parts"

    def fingerprint(self) -> str:
        """Return a hash of the sorted samples."""
        return content_hash([self.easiest_first])

    def __str__(self) -> str:
        return f"curriculum metric {self.metric.name}:"

    def _check(self, total: int, identity: dict | None) -> None:
        """Raises DataError unless the index was made from the data of this training."""
        path = self.metric.index_to_sample_path
        found = len(self.easiest_first)
        description = read_description(Path(path).parent)
        if description is None:
            logger.info(
                "%s %s has no analysis.json next to it (DeepSpeed writes none): "
                "only its size is checked",
                self,
                path,
            )
        elif identity is not None and (differing := describes(description, identity)):
            raise DataError(
                f"{self} {path} was made from other data: {differing}. "
                "Give the flags of the analysis, or run megatron-ds analyze again "
                "with the flags of the training."
            )
        if found != total:
            raise DataError(
                f"{self} {path} sorts {found} samples, and an epoch of the "
                f"training data has {total}: it was made from other data. "
                "Run megatron-ds analyze with the flags of the training."
            )


def order_by_difficulty(
    metrics: Sequence[Metric],
    total: int,
    *,
    seed: int,
    steps: int,
    batch_at: Callable[[int], int],
    cache: Path,
    identity: dict | None = None,
) -> CurriculumOrder:
    """Return the order of a run over `total` samples.

    steps     of the whole training
    batch_at  consumed samples → size of the next global batch
    cache     folder for the order by several metrics; one metric needs none

    Raises DataError for index files that are damaged or of other data, and if the first step admits no
    sample.
    """
    # Numbers of admitted samples by metric, at each step that raises one of them.
    indexes = [MetricIndex(metric, total, identity) for metric in metrics]
    moments = list(_moments(indexes, steps, batch_at))
    starts = [start for start, _ in moments]
    counts = np.array([count for _, count in moments], np.int64)  # [k, m]
    # One metric orders the samples by itself; several need a stored intersection.
    if len(indexes) == 1:
        easiest_first = indexes[0].easiest_first
        admitted = counts[:, 0]
    else:
        key = {
            "class": "Curriculum",
            "indexes": [index.fingerprint() for index in indexes],
            "counts": counts.tolist(),
        }
        names = ("easiest_first", "admitted")
        build = lambda: dict(zip(names, intersect(indexes, counts, total)))
        arrays = cached_arrays(cache, "Curriculum-train", key, names, build)
        easiest_first, admitted = (arrays[name] for name in names)
    # A stage begins wherever more samples are admitted; the first step must admit some.
    stages: list[Phase] = []
    for start, count in zip(starts, admitted.tolist(), strict=True):
        if not count:
            raise DataError(
                "the curriculum admits no sample at step 1 "
                f"({'; '.join(i.smallest() for i in indexes)}). Raise min_difficulty."
            )
        if not stages or count > stages[-1].admitted:
            stages.append(Phase(start, count))
    logger.info(
        "curriculum over %d samples, which are admitted in %d groups: "
        "the run draws from the %d easiest samples at first, "
        "and from %d after %d consumed samples",
        total,
        len(stages),
        stages[0].admitted,
        stages[-1].admitted,
        stages[-1].start,
    )
    return CurriculumOrder(easiest_first, stages, seed)


def intersect(
    indexes: Sequence[MetricIndex], counts: np.ndarray, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """(samples by the step at which all metrics admit them, samples admitted by then).  counts: [k, m]."""
    # The level of a sample is the first row of counts that admits it, by the last of the metrics.
    level = np.zeros(total, np.int32)
    places = np.arange(total)
    for index, by_moment in zip(indexes, counts.T, strict=True):
        first = np.searchsorted(by_moment, places, side="right").astype(np.int32)
        samples = index.easiest_first
        level[samples] = np.maximum(level[samples], first)
    # Samples of the level len(counts) are never admitted.
    moments = len(counts)
    at_level = np.bincount(level, minlength=moments + 1)[:moments]
    admitted = np.cumsum(at_level)
    dtype = np.uint32 if total <= np.iinfo(np.uint32).max else np.int64
    easiest_first = np.argsort(level, kind="stable")[: admitted[-1]]
    return easiest_first.astype(dtype), admitted


def _moments(
    indexes: Sequence[MetricIndex], steps: int, batch_at: Callable[[int], int]
) -> Iterator[tuple[int, list[int]]]:
    """(stream position, samples that each metric admits) of each step at which one of them admits more."""
    totals = [len(index.easiest_first) for index in indexes]
    position = 0
    last = None
    for step in range(1, max(steps, 1) + 1):
        # What is admitted stays admitted.
        counts = [index.admitted(index.metric.difficulty.at(step)) for index in indexes]
        if last is not None:
            counts = list(map(max, counts, last))
        if counts != last:
            yield position, counts
        # Nothing changes after the step that admits all samples.
        if counts == totals:
            return
        position = position + batch_at(position)
        last = counts


@dataclass(frozen=True)
class Phase:
    """A part of the run: from its sample number `start` on, it draws from the `admitted` easiest samples."""

    start: int
    admitted: int


class CurriculumOrder:
    """order(positions, total) → indices of the samples there; a `loader.Order`.

    easiest_first   integers [n], the samples sorted by difficulty; may be a memory map
    stages          ascending in start, the first at 0, and in admitted samples
    """

    def __init__(self, easiest_first: np.ndarray, stages: Sequence[Phase], seed: int):
        # Stages ascend, and are few enough for the arithmetic and for a table of their square.
        assert stages and stages[0].start == 0 and stages[0].admitted > 0, (
            f"invalid first stage {stages[:1]}"
        )
        pairs = zip(stages, stages[1:])
        assert all(a.start < b.start and a.admitted < b.admitted for a, b in pairs), (
            "stages must ascend"
        )
        assert stages[-1].admitted <= len(easiest_first)
        if stages[-1].admitted >= MOST_SAMPLES:
            raise DataError(
                f"a curriculum over {stages[-1].admitted} samples: "
                f"at most {MOST_SAMPLES - 1} can be numbered. "
                "Use a longer --seq-length, or several runs."
            )
        if len(stages) > MOST_STAGES:
            raise DataError(
                f"the curriculum admits more samples {len(stages)} times; "
                f"at most {MOST_STAGES} are possible. Use a larger "
                "difficulty_step, or percentiles."
            )
        self.easiest_first = easiest_first
        self.seed = seed
        sizes = [stage.admitted for stage in stages]
        self.starts = np.array([stage.start for stage in stages], np.int64)
        # cluster c is bounds[c : c + 2]
        self.bounds = np.array([0, *sizes], np.int64)
        # a and b of each stage
        self.steps = np.array([_step(size) for size in sizes], np.int64)
        offsets = [_mixed(seed, k)[0] % size for k, size in enumerate(sizes)]
        self.offsets = np.array(offsets, np.int64)
        self._before = self._drawn_before_stages()

    def __call__(self, positions: np.ndarray, total: int) -> np.ndarray:
        # The stage of each position, its point there, and the cluster that holds the point.
        positions = np.asarray(positions, np.int64)
        stage = np.searchsorted(self.starts, positions, side="right") - 1
        j = positions - self.starts[stage]
        size = self.bounds[stage + 1]
        point = (self.steps[stage] * (j % size) + self.offsets[stage]) % size
        cluster = np.searchsorted(self.bounds, point, side="right") - 1
        # The number of draws from the cluster before this one.
        low = self.bounds[cluster]
        high = self.bounds[cluster + 1]
        k = (
            self._before[stage, cluster]
            + self._drawn(j, stage, high)
            - self._drawn(j, stage, low)
        )
        # The place of the draw in the shuffled cluster.
        width = high - low
        key = _mixed(self.seed, cluster, k // width)
        place = shuffled(k % width, width, key)
        samples = self.easiest_first[low + place].astype(np.int64)
        if len(samples) and samples.max() >= total:
            raise DataError(
                f"the index of the curriculum names sample {samples.max()}, "
                f"and the dataset has {total}: it was made from other data. "
                "Make it again with megatron-ds analyze."
            )
        return samples

    def _drawn(self, j: np.ndarray, stage: np.ndarray, bound: np.ndarray) -> np.ndarray:
        """Return how many of the first j positions of a stage have a point x below `bound`."""
        size = self.bounds[stage + 1]
        step = self.steps[stage]
        offset = self.offsets[stage]
        rounds, rest = np.divmod(j, size)
        # (y mod T < m) is floor(y / T) − floor((y − m) / T); adding T to y − m keeps it positive and the
        # difference one less.
        shifted = _floor_sum(rest, size, step, offset + size - bound)
        partial = _floor_sum(rest, size, step, offset) - shifted + rest
        return rounds * bound + partial

    def _drawn_before_stages(self) -> np.ndarray:
        """int64 [stages, clusters]: draws from each cluster before each stage begins."""
        count = len(self.starts)
        before = np.zeros((count, count), np.int64)
        # A stage draws what the one before it drew, and what that adds by its end.
        for stage in range(1, count):
            length = self.starts[stage] - self.starts[stage - 1]
            here = np.arange(stage + 1)
            below = self._drawn(
                np.full(stage + 1, length),
                np.full(stage + 1, stage - 1),
                self.bounds[here],
            )
            before[stage] = before[stage - 1]
            before[stage, :stage] += np.diff(below)
        return before


def shuffled(place: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the image of `place` under the permutation of range(size) with this key; all [n], size from 1 to 2^31.

    A Feistel network over the smallest 2^(2h) ≥ size, applied until the result is below `size` (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking): a permutation for any round
    function.
    """
    place, size, key = (np.asarray(v).astype(np.uint64) for v in (place, size, key))
    bits = np.log2(np.maximum(size, 2).astype(np.float64))
    half = np.ceil(bits / 2).astype(np.uint64)
    # Images outside of the range are mapped again.
    outside = np.ones(len(place), bool)
    while outside.any():
        place[outside] = _feistel(place[outside], half[outside], key[outside])
        outside = place >= size
    return place.astype(np.int64)


def _feistel(x: np.ndarray, half: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return a permutation of the numbers of 2 half bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = x >> half
    right = x & mask
    for round in range(ROUNDS):
        key_of_round = _mix(key + np.uint64(round))
        mixed = _mix(right ^ key_of_round) & mask
        left, right = right, left ^ mixed
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom numbers")."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _mixed(*keys) -> np.ndarray:
    """Return a pseudorandom 63-bit number for each combination of keys (integers or arrays of them), as int64."""
    # One bit is dropped, since int64 has a sign.
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mix(state ^ np.asarray(key, np.int64).astype(np.uint64))
    return (state >> np.uint64(1)).astype(np.int64)


def _step(size: int) -> int:
    """Return the first number from size / golden ratio on that is prime to size: its multiples are spread evenly."""
    step = max(1, round(size * GOLDEN))
    while gcd(step, size) != 1:
        step += 1
    return step


def _floor_sum(
    n: np.ndarray, m: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Return the sum of floor((a·i + b) / m) over 0 ≤ i < n, elementwise, in O(log) steps of Euclid's algorithm.

    All [k], 0 ≤ n ≤ m < 2^31, 0 ≤ a < m, 0 ≤ b < 2m, as Graham, Knuth and Patashnik reduce it in "Concrete
    Mathematics", section 3.5: take whole multiples of m out of a and b, then exchange the roles of a and m.
    """
    n, m, a, b = (np.array(v, np.int64) for v in np.broadcast_arrays(n, m, a, b))
    total = np.zeros(n.shape, np.int64)
    while (n > 0).any():
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a = a % m
        b = b % m
        top = a * n + b
        # As in the algorithm of Euclid, the divisor takes the place of the factor.
        divisor = np.where(a > 0, a, 1)
        n = top // m
        b = top % m
        a = m
        m = divisor
    return total
