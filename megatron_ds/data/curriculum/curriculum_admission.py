"""From the index files and schedules of metrics to a `CurriculumOrder`: the samples admitted at each step.

    by value        the samples whose value is at most the difficulty
    by percentile   the difficulty · (n // max_difficulty) easiest of n samples; all at the maximum

With several metrics a sample is admitted once each metric admits it. It stays admitted even if a schedule
falls.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...config.data_efficiency_options import Metric
from ...errors import DataError
from ..loading.cache import cached_arrays
from .curriculum_order import CurriculumOrder, Stage
from .difficulty_analysis import describes, read_description
from .metric_index import ListFile

logger = logging.getLogger(__name__)


class MetricIndex:
    """The samples of a dataset, sorted by one metric, and the number that each difficulty admits."""

    def __init__(self, metric: Metric, total: int, identity: dict | None = None):
        """total: samples of the dataset.  identity: its `difficulty_analysis.identity`.  Raises DataError."""
        self.metric = metric
        index = ListFile(metric.index_to_sample_path)
        self.easiest_first = index.flat
        self._check(total, identity)
        if metric.difficulty_type == "value":
            values = ListFile(metric.index_to_metric_path)
            is_ascending = bool((values.flat[1:] > values.flat[:-1]).all())
            if not len(values) == len(index) == len(values.flat) or not is_ascending:
                raise DataError(f"{self} {values.idx_path} does not hold one value, in ascending order, for "
                                f"each of the {len(index)} rows of {index.idx_path}: the two do not belong "
                                "together. Name the index_to_metric and the index_to_sample (not the "
                                "percentile_merged) of one analysis.")
            self.values, self.bounds = values.flat, index.bounds

    def admitted(self, difficulty: int) -> int:
        """The number of samples that this difficulty admits."""
        if self.metric.difficulty_type == "value":
            return int(self.bounds[np.searchsorted(self.values, difficulty, side="right")])
        total, most = len(self.easiest_first), self.metric.difficulty.maximum
        return total if difficulty == most else total // most * difficulty

    def smallest(self) -> str:
        """The lowest difficulty that admits a sample, for messages."""
        if self.metric.difficulty_type == "value":
            return f"{self.metric.name}: the smallest value is {self.values[0]}"
        parts = self.metric.difficulty.maximum
        return f"{self.metric.name}: {len(self.easiest_first)} samples are divided into {parts} parts"

    def fingerprint(self) -> str:
        """MD5 of evenly spaced blocks of the sorted samples."""
        blocks = [self.easiest_first[start:start + 4096] for start in
                  np.linspace(0, max(0, len(self.easiest_first) - 4096), 64).astype(np.int64).tolist()]
        return hashlib.md5(np.concatenate(blocks).tobytes(), usedforsecurity=False).hexdigest()

    def __str__(self) -> str:
        return f"curriculum metric {self.metric.name}:"

    def _check(self, total: int, identity: dict | None) -> None:
        path, found = self.metric.index_to_sample_path, len(self.easiest_first)
        description = read_description(Path(path).parent)
        if description is None:
            logger.info("%s %s has no analysis.json next to it (DeepSpeed writes none): only its size is "
                        "checked", self, path)
        elif identity is not None and (differing := describes(description, identity)):
            raise DataError(f"{self} {path} was made from other data: {differing}. Give the flags of the "
                            "analysis, or run tools/analyze_data.py again with the flags of the training.")
        if found != total:
            raise DataError(f"{self} {path} sorts {found} samples, and an epoch of the training data has "
                            f"{total}: it was made from other data. Run tools/analyze_data.py with the flags "
                            "of the training.")


def order_by_difficulty(metrics: Sequence[Metric], total: int, *, seed: int, steps: int,
                        batch_at: Callable[[int], int], cache: Path,
                        identity: dict | None = None) -> CurriculumOrder:
    """The order of a run over `total` samples.

    steps     of the whole training
    batch_at  consumed samples → size of the next global batch
    cache     folder for the order by several metrics; one metric needs none

    Raises DataError for index files that are damaged or of other data, and if the first step admits no
    sample.
    """
    indexes = [MetricIndex(metric, total, identity) for metric in metrics]
    moments = list(_moments(indexes, steps, batch_at))
    starts = [start for start, _ in moments]
    counts = np.array([count for _, count in moments], np.int64)                            # [k, m]
    if len(indexes) == 1:
        easiest_first, admitted = indexes[0].easiest_first, counts[:, 0]
    else:
        key = {"class": "Curriculum", "indexes": [index.fingerprint() for index in indexes],
               "counts": counts.tolist()}
        arrays = cached_arrays(cache, "Curriculum-train", key, ("easiest_first", "admitted"),
                               lambda: dict(zip(("easiest_first", "admitted"),
                                                intersect(indexes, counts, total))))
        easiest_first, admitted = arrays["easiest_first"], arrays["admitted"]
    stages: list[Stage] = []
    for start, count in zip(starts, admitted.tolist(), strict=True):
        if not count:
            raise DataError("the curriculum admits no sample at step 1 "
                            f"({'; '.join(i.smallest() for i in indexes)}). Raise min_difficulty.")
        if not stages or count > stages[-1].admitted:
            stages.append(Stage(start, count))
    logger.info("curriculum over %d samples in %d clusters: %d samples at first, %d from sample %d of the "
                "run on", total,
                len(stages), stages[0].admitted, stages[-1].admitted, stages[-1].start)
    return CurriculumOrder(easiest_first, stages, seed)


def intersect(indexes: Sequence[MetricIndex], counts: np.ndarray,
              total: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples by the step at which all metrics admit them, samples admitted by then).  counts: [k, m]."""
    level = np.zeros(total, np.int32)                 # of each sample: the first row of counts that admits it
    for index, by_moment in zip(indexes, counts.T, strict=True):
        first = np.searchsorted(by_moment, np.arange(total), side="right").astype(np.int32)
        level[index.easiest_first] = np.maximum(level[index.easiest_first], first)
    admitted = np.cumsum(np.bincount(level, minlength=len(counts) + 1)[:len(counts)])
    dtype = np.uint32 if total <= np.iinfo(np.uint32).max else np.int64
    return np.argsort(level, kind="stable")[:admitted[-1]].astype(dtype), admitted


def _moments(indexes: Sequence[MetricIndex], steps: int,
             batch_at: Callable[[int], int]) -> Iterator[tuple[int, list[int]]]:
    """(stream position, samples that each metric admits) of each step at which one of them admits more."""
    position, last = 0, None
    for step in range(1, max(steps, 1) + 1):
        now = [index.admitted(index.metric.difficulty.at(step)) for index in indexes]
        counts = now if last is None else [max(pair) for pair in zip(now, last)]
        if counts != last:
            yield position, counts
        if all(count == len(index.easiest_first) for count, index in zip(counts, indexes)):
            return
        position, last = position + batch_at(position), counts
