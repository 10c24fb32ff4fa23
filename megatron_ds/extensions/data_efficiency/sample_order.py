"""The order of the training samples of a run whose curriculum has metrics."""

from functools import partial
from pathlib import Path

from ...config import RunConfig
from ...config.sample_order import SampleOrder
from ...config.training_schedule import stated_batch_size
from ...data.loading.cache import default_cache
from ...models import MODELS
from ...planning.training_length import planned_steps
from .curricula import identity_of, index_prefixes, read_metric
from .curriculum_order import CurriculumOrder, order_by_difficulty
from .difficulty_analysis import identity
from .options import CurriculumConfig


def order_of(config: RunConfig) -> SampleOrder | None:
    """Return the order of the samples of one epoch; None without metrics."""
    curriculum = config.of(CurriculumConfig)
    if not curriculum.orders_samples:
        return None
    return SampleOrder(
        identity_of(curriculum),
        tuple(index_prefixes(curriculum)),
        partial(make_order, config),
    )


def make_order(config: RunConfig, total: int) -> CurriculumOrder:
    """Return the order of the training samples, `total` an epoch. Raises DataError."""
    curriculum = config.of(CurriculumConfig)
    data = config.data
    metrics = [read_metric(text) for text in curriculum.curriculum_metrics]
    cache = (
        curriculum.curriculum_cluster_path
        or data.data_cache_path
        or default_cache(metrics[0].index_to_sample_path)
    )
    # The batch size as configured, not as rounded down: the order is the same on any number of ranks.
    batch_size = stated_batch_size(config)
    return order_by_difficulty(
        metrics,
        total,
        seed=curriculum.data_efficiency_seed,
        steps=planned_steps(config, batch_size),
        batch_at=batch_size.at,
        cache=Path(cache),
        identity=identity(config, MODELS[config.model.model].data, total),
    )
