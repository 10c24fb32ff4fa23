"""Mean loss over held-out samples, forward only. The same samples under every layout."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .batches import BatchSource
from .build import Engine
from .step_metrics import StepMetrics


@dataclass(frozen=True)
class Evaluation:
    """Means over the global batches; metrics: what layers added, by name. stop: a rank asked to end the run
    meanwhile."""

    loss: float
    metrics: dict[str, float]
    seconds: float
    stop: bool


def evaluate(engine: Engine, loader: BatchSource, *, first_sample: int, iterations: int,
             global_batch_size: int, should_stop: Callable[[], bool] = lambda: False,
             after_batch: Callable[[], None] = lambda: None) -> Evaluation:
    """Over `iterations` global batches; `after_batch()` is called after each.

    Collective over the world. A request to stop ends the evaluation after the current batch; its mean is then
    over fewer.
    """
    start, total, done, stop = time.perf_counter(), 0.0, 0, False
    metrics: dict[str, list[float]] = {}
    train = engine.config.train
    reduction = StepMetrics(engine.mesh, train.calculate_per_token_loss)
    while done < iterations and not stop:
        batch = engine.batches.evaluation(loader, first_sample + done * global_batch_size, global_batch_size)
        microbatches = batch.split(train.micro_batch_size)
        losses = engine.executor.forward(microbatches)
        report = reduction.reduce(losses, engine.executor.entries, should_stop())
        total, done, stop = total + report.loss, done + 1, report.stop
        for name, value in {**report.terms, **report.metrics}.items():
            metrics.setdefault(name, []).append(value)
        after_batch()
    means = {name: sum(values) / len(values) for name, values in metrics.items()}
    return Evaluation(total / max(done, 1), means, time.perf_counter() - start, stop)
