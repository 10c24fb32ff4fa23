"""One optimizer step: forward and backward of all micro-batches, reduction of the metrics, update."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..data.batch import Batch
from ..errors import MegatronDSError
from ..ramps import Progress
from .build import Engine
from .nan_locator import locate_nonfinite
from .step_metrics import StepReport

logger = logging.getLogger(__name__)


class NonFiniteLossError(MegatronDSError):
    """The loss is NaN or infinite, and `check_for_nan` is "stop". Raised on all ranks together."""

    on_all_ranks = True


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step.

    grad_norm  before clipping, of the unscaled gradient; NaN where it is not finite
    is_finite  the loss and the loss terms of layers are
    metrics    loss terms and metrics that layers added, by name
    """

    loss: float
    tokens: float
    grad_norm: float
    loss_scale: float
    learning_rate: float
    weight_decay: float
    skipped: bool
    stop: bool
    seconds: float
    is_finite: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


def train_step(engine: Engine, batch: Batch, progress: Progress, *, learning_rate: float, weight_decay: float,
               stop: bool = False) -> StepOutcome:
    """Train on `batch`, this rank's share of the global batch. Collective over the world.

    stop: whether this rank asks to end the run after this step; the outcome has whether any rank did.
    Raises NonFiniteLossError, on all ranks, when the loss is not finite and `check_for_nan` is "stop".
    """
    start = time.perf_counter()
    config, optimizer, executor = engine.config, engine.optimizer, engine.executor
    microbatches = batch.split(config.train.micro_batch_size)
    per_token = config.train.calculate_per_token_loss
    loss_scale = optimizer.loss_scale

    # Gradients are summed over micro-batches and ranks, so each micro-batch has its share of the global
    # batch as weight.
    optimizer.begin_step()
    # Ranks along other axes than dp work on the same micro-batches.
    global_microbatches = len(microbatches) * engine.mesh.samples.size
    losses = executor.run(microbatches, loss_scale if per_token else loss_scale / global_microbatches)

    # Metrics of all ranks; the first wait for the device in a step.
    report = engine.metrics.reduce(losses, executor.entries, stop)
    if not report.is_finite:
        _report_nonfinite(engine, microbatches, report, progress)

    result = optimizer.step(learning_rate, weight_decay, max(report.tokens, 1) if per_token else 1.0)
    return StepOutcome(report.loss, report.tokens, result.grad_norm, loss_scale, learning_rate, weight_decay,
                       result.skipped, report.stop, time.perf_counter() - start, report.is_finite,
                       {**report.terms, **report.metrics})


def _report_nonfinite(
    engine: Engine, microbatches: Sequence[Batch], report: StepReport, progress: Progress
) -> None:
    """Locate the first NaN, then raise or warn. Collective over the world."""
    if engine.optimizer.loss_scale != 1.0 and engine.config.optimizer.loss_scale is None:
        return  # dynamic loss scaling: an overflow is part of finding the scale, the optimizer skips the step
    weights = [(p.spec.name, p.tensor) for p in engine.optimizer.pieces() if p.kind == "weight"]
    where = locate_nonfinite(
        engine.layers, weights, lambda: engine.executor.forward(microbatches), engine.mesh
    )
    also = "".join(f", {name} {mean}" for name, mean in report.terms.items())
    message = f"loss is {report.loss}{also} at iteration {progress.step + 1}, {where}"
    if engine.config.train.check_for_nan == "stop":
        raise NonFiniteLossError(
            f"{message}. The step was not applied; the last checkpoint is not affected. Lower the "
            f"learning rate or check "
            "the data; use --check-for-nan continue to skip such steps."
        )
    if engine.mesh.rank == 0:
        logger.warning("%s. The step is skipped (--check-for-nan continue).", message)
