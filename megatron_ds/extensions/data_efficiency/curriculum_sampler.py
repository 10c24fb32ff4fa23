"""`CurriculumSampler`: the samples of each global batch of an engine's curriculum, those of DeepSpeed's sampler.

    sampler.draw(size)     numbers of the samples of the next global batch

`curriculum_order` has the order of training scripts, a pure function of the position. Programs for DeepSpeed
expect the numbers of its generator, numpy's, which has a state: it shuffles each new cluster, draws how many
samples of a batch come from each cluster, and shuffles the batch. Here batches are drawn one after another on
every rank, from the same seed, without communication. A resumed run draws those before its position again, and goes
on with the same samples, which DeepSpeed's does not.

Clusters are those of `curriculum_order`: samples that a rise of a difficulty admits. Of several metrics that
choose samples, a sample is admitted once all admit it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import ConfigError, DataError
from .curricula import METRIC_KEYS, Metric, read_metric
from .curriculum_order import MetricIndex
from .difficulty import Custom, make_difficulty

SINGLE = "single_cluster"
Schedule = Callable[[int], int]


class CurriculumSampler:
    """metrics: name → block of "curriculum_metrics"; total: samples of the dataset; seed: of the generator

    Raises ConfigError for wrong blocks, and DataError for index files that are damaged or of other data.
    """

    def __init__(self, metrics: Mapping[str, Mapping[str, Any]], total: int, seed: int):
        self.total = total
        self.seed = seed
        self.schedules: dict[str, Schedule] = {}
        self._indexes: dict[str, MetricIndex] = {}
        for name, block in metrics.items():
            self._add(name, block)
        self.restart()

    def set_schedules(self, functions: Mapping[str, Schedule]) -> None:
        """Set the functions, from the step counted from 1, of metrics whose schedule_type is custom.

        Raises ConfigError for another name.
        """
        for name, function in functions.items():
            if name not in self.schedules:
                raise ConfigError(
                    f"set_custom_curriculum_learning_schedule: there is no metric {name!r}; the config has "
                    f"{', '.join(self.schedules)}."
                )
            self.schedules[name] = function

    def difficulties(self, step: int) -> dict[str, int]:
        """Return the difficulty of each metric at a step, counted from 1."""
        return {name: schedule(step) for name, schedule in self.schedules.items()}

    def restart(self) -> None:
        """Go back to the first batch."""
        self._random = np.random.default_rng(self.seed)
        self._step = 0
        self._admitted: dict[str, int] = {}
        self._difficulties: dict[str, int] = {}
        self._clusters: list[np.ndarray] = []
        self._places: list[int] = []

    def draw(self, size: int) -> list[int]:
        """Return the samples of the next global batch; fewer where a cluster is smaller than its share.

        Raises DataError where no sample is admitted yet.
        """
        self._step += 1
        # Clusters.
        difficulties = self.difficulties(self._step)
        if difficulties != self._difficulties:
            self._difficulties = difficulties
            self._admit()
        sizes = [len(cluster) for cluster in self._clusters]
        if not sizes:
            raise DataError(
                f"the curriculum admits no sample at step {self._step}, with the difficulties {difficulties}. "
                "Raise min_difficulty."
            )
        # How many of each, which ones, and in which order.
        weights = [count / sum(sizes) for count in sizes]
        chosen = self._random.choice(len(sizes), size, replace=True, p=weights)
        batch: list[int] = []
        for number, count in enumerate(np.bincount(chosen, minlength=len(sizes))):
            batch += self._take(number, int(count))
        self._random.shuffle(batch)
        return batch

    def _add(self, name: str, block: Mapping[str, Any]) -> None:
        """Read a metric. One of a single cluster has a difficulty, but chooses no samples."""
        where = f"curriculum metric {name}"
        block = dict(block)
        is_free = block.get(
            "schedule_type"
        ) == "custom" and "function" not in block.get("schedule_config", {})
        if is_free:
            # The program gives the function later; until then it is missing.
            block["schedule_type"] = "fixed_discrete"
            top = block.get("max_difficulty")
            block["schedule_config"] = {"difficulty": [top, top], "max_step": [1]}
        if block.get("clustering_type") == SINGLE:
            unknown = sorted(block.keys() - METRIC_KEYS)
            if unknown:
                raise ConfigError(f"{where}: unknown {', '.join(unknown)}.")
            difficulty = make_difficulty(block, where)
        else:
            metric = read_metric(json.dumps(block | {"name": name}))
            difficulty = metric.difficulty
            if is_free:
                metric = _with_maximum(metric, block)
            self._indexes[name] = MetricIndex(metric, self.total)
        self.schedules[name] = _missing(where) if is_free else difficulty.at

    def _admit(self) -> None:
        """Add a cluster of the samples that are admitted now and were not before."""
        before = self._admitted
        now = {
            name: max(index.admitted(self._difficulties[name]), before.get(name, 0))
            for name, index in self._indexes.items()
        }
        self._admitted = now
        if not self._indexes:
            new = np.arange(0 if self._clusters else self.total)
        elif len(self._indexes) == 1:
            ((name, index),) = self._indexes.items()
            new = index.easiest_first[before.get(name, 0) : now[name]].copy()
        else:
            new = self._of_all(now)
        if len(new):
            self._random.shuffle(new)
            self._clusters.append(new)
            self._places.append(0)

    def _of_all(self, admitted: Mapping[str, int]) -> np.ndarray:
        """Samples that all metrics admit and no cluster has, in their order in the dataset."""
        counts = np.zeros(self.total, np.int64)
        for name, index in self._indexes.items():
            counts[index.easiest_first[: admitted[name]]] += 1
        is_new = counts == len(self._indexes)
        for cluster in self._clusters:
            is_new[cluster] = False
        return np.flatnonzero(is_new)

    def _take(self, number: int, count: int) -> list[int]:
        """Return the next samples of a cluster, which is shuffled again at its end."""
        place = self._places[number]
        taken = self._clusters[number][place : place + count].tolist()
        self._places[number] += count
        rest = count - len(taken)
        if rest:
            again = self._clusters[number].copy()
            self._random.shuffle(again)
            self._clusters[number] = again
            taken += again[:rest].tolist()
            self._places[number] = rest
        return taken


def _with_maximum(metric: Metric, block: Mapping[str, Any]) -> Metric:
    """Return the metric with a difficulty of which the maximum is read: parts of a hundred are counted by it."""
    return replace(metric, difficulty=Custom(lambda step: 1, block["max_difficulty"]))


def _missing(where: str) -> Schedule:
    def schedule(step: int) -> int:
        raise ConfigError(
            f"{where}: its schedule_type is custom, and no function is set. Call "
            "engine.set_custom_curriculum_learning_schedule before the first batch."
        )

    return schedule
