"""Mean loss over held-out samples, forward only. The same samples under every layout."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .batches import BatchSource
from .build import Engine, objective_terms
from .report import share


@dataclass(frozen=True)
class Evaluation:
    """Means over the global batches. terms: other parts of the objective. stop: a rank asked to end the
    run."""

    loss: float
    terms: dict[str, float]
    seconds: float
    stop: bool


def evaluate(engine: Engine, loader: BatchSource, *, first_sample: int, iterations: int,
             global_batch_size: int, should_stop: Callable[[], bool] = lambda: False,
             after_batch: Callable[[], None] = lambda: None) -> Evaluation:
    """Over `iterations` global batches; `after_batch()` is called after each.

    Collective over the world. A request to stop ends the evaluation after the current batch; its mean is then
    over fewer.
    """
    names = objective_terms(engine.config)
    start, total, terms, done, stop = time.perf_counter(), 0.0, dict.fromkeys(names, 0.0), 0, False
    train = engine.config.train
    while done < iterations and not stop:
        batch = engine.batches.evaluation(loader, first_sample + done * global_batch_size, global_batch_size)
        microbatches = batch.split(train.micro_batch_size)
        losses = engine.executor.forward(microbatches)
        report = share(losses, engine.mesh, should_stop(), train.calculate_per_token_loss, names)
        total, done, stop = total + report.loss, done + 1, report.stop
        terms = {name: terms[name] + report.terms[name] for name in names}
        after_batch()
    mean = lambda x: x / max(done, 1)
    means = {name: mean(x) for name, x in terms.items()}
    return Evaluation(mean(total), means, time.perf_counter() - start, stop)
