"""The curriculum of a run: how long the sequences of a step are, and the order in which samples come."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import RunConfig
from ..config.curriculum import RESHAPE, length_difficulty, read_metric
from ..data.batch import Batch
from ..data.curriculum.curriculum_admission import order_by_difficulty
from ..data.curriculum.curriculum_order import CurriculumOrder
from ..data.curriculum.difficulty_analysis import identity
from ..data.curriculum.seqlen_curriculum import fold, truncate
from ..data.loading.cache import default_cache
from ..difficulty import Difficulty
from ..models import MODELS
from ..progress import Progress
from ..ramps import stated_batch_size
from .length import planned_steps


@dataclass(frozen=True)
class Lengths:
    """A ramp over batches: `lengths(progress, batch)` is the batch as long as its step wants it.

    difficulty: None for whole samples at every step.
    """

    difficulty: Difficulty | None
    shorten: Callable[[Batch, int], Batch] = truncate

    def __call__(self, progress: Progress, batch: Batch) -> Batch:
        return batch if self.difficulty is None else self.shorten(batch, self.difficulty.at(progress.step + 1))


def make_lengths(config: RunConfig) -> Lengths:
    """The curriculum over lengths that a config describes."""
    curriculum = config.curriculum
    if curriculum.curriculum_type is None:
        return Lengths(None)
    return Lengths(length_difficulty(curriculum, config.model.seq_length),
                   fold if curriculum.curriculum_type == RESHAPE else truncate)


def make_order(config: RunConfig, total: int) -> CurriculumOrder | None:
    """The order of the training samples, `total` an epoch; None without metrics. Reads files: raises DataError."""
    curriculum, data = config.curriculum, config.data
    if not curriculum.curriculum_metrics:
        return None
    metrics = [read_metric(text) for text in curriculum.curriculum_metrics]
    cache = curriculum.curriculum_cluster_path or data.data_cache_path or default_cache(metrics[0].index_to_sample_path)
    # As stated, not as rounded down for the ranks at hand: samples are the same on any number of them.
    batch_size = stated_batch_size(config)
    return order_by_difficulty(
        metrics, total, seed=curriculum.data_efficiency_seed, steps=planned_steps(config, batch_size), batch_at=batch_size.at,
        cache=Path(cache), identity=identity(config, MODELS[config.model.model].data, total))
