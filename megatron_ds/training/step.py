"""One optimizer step: forward and backward of all micro-batches, reduction of the metrics, update.

And evaluation: the mean loss over held-out samples, forward only, the same samples under every layout.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.batch import Batch
from ..config.options.training import DECOUPLED_RATE, MAIN_RATE
from ..errors import MegatronDSError
from ..features import Provided
from ..host import places
from ..mpu.host_reads import read_numbers
from ..progress.ramps import Progress
from ..zero.optimizer import StepResult
from .batches import BatchSource
from .build import Replica
from .moments import Computed, Drop
from .observer import Observer
from .step_metrics import StepMetrics, StepReport

# (layers by name, weights, function that runs the forward again, Mesh) -> the first value that is not finite.
LOCATOR: Provided[Any] = Provided("locator of values that are not finite")
logger = logging.getLogger(__name__)
NOT_OBSERVED = Observer()


class NonFiniteLossError(MegatronDSError):
    """The loss is NaN or infinite, and `check_for_nan` is "stop". Raised on all ranks together."""

    on_all_ranks = True


@dataclass(frozen=True, kw_only=True)
class StepOutcome(StepReport):
    """Result of one step.

    grad_norm                unscaled, before clipping; NaN where it is not finite
    decoupled_learning_rate  of word embeddings and output layers; None without --decoupled-lr
    num_zeros                elements of the gradient that are zero, with --log-num-zeros-in-grad
    dropped                  why an observer left the update out
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    learning_rate: float
    decoupled_learning_rate: float | None
    weight_decay: float
    seconds: float
    num_zeros: int | None = None
    dropped: Drop | None = None


def train_step(
    replica: Replica,
    batch: Batch,
    progress: Progress,
    *,
    learning_rate: float | Mapping[str, float],
    weight_decay: float,
    beta1: float | None = None,
    stop: bool = False,
    observer: Observer = NOT_OBSERVED,
) -> StepOutcome:
    """Train on `batch`, this rank's share of the global batch. Collective over the world.

    learning_rate: of all parameters, or by name as of `make_learning_rates`
    beta1: Adam's in this step; None: that of the configuration
    stop: whether this rank asks to end the run after this step; the outcome has whether any rank did
    observer: is called at the phases of the step, and may ask for another run of it, or for no update
    Raises NonFiniteLossError, on all ranks, when the loss is not finite and `check_for_nan` is "stop".
    """
    start = time.perf_counter()
    microbatches = batch.split(replica.config.train.micro_batch_size)
    loss_scale = replica.optimizer.loss_scale
    # A checkpoint that is written in the background learns in the metrics that other ranks are ready.
    saving = replica.saving
    votes = stop, saving is not None and saving.is_ready
    compute = lambda: _compute(replica, microbatches, progress, votes, observer)

    # The loss and the gradients, as often as it is asked for.
    computed = compute()
    while observer.computed(computed) is not None:
        computed = compute()
    report = computed.report
    if not report.is_finite:
        _report_nonfinite(replica, microbatches, report, progress)

    # The update. While it runs on the device, the host prepares the next step.
    result = _update(replica, computed, learning_rate, weight_decay, beta1, observer)
    rates = (
        learning_rate
        if isinstance(learning_rate, Mapping)
        else {MAIN_RATE: learning_rate}
    )
    counts = replica.config.logging.log_num_zeros_in_grad
    return StepOutcome(
        **vars(report),
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        loss_scale=loss_scale,
        weight_decay=weight_decay,
        seconds=time.perf_counter() - start,
        learning_rate=rates[MAIN_RATE],
        decoupled_learning_rate=rates.get(DECOUPLED_RATE),
        num_zeros=int(computed.gradient[2]) if counts else None,
        dropped=result.dropped,
    )


def _compute(
    replica: Replica,
    microbatches: Sequence[Batch],
    progress: Progress,
    votes: tuple[bool, bool],
    observer: Observer,
) -> Computed:
    """Forward and backward of all micro-batches, and the numbers of all ranks. Collective over the world.

    votes: (stop, is_ready) of `StepMetrics.queue`
    """
    optimizer = replica.optimizer
    executor = replica.executor
    world = replica.mesh.group("world")
    # Gradients are summed over micro-batches and ranks, so each micro-batch has its share of the global
    # batch as weight.
    optimizer.begin_step()
    replica.step_state.forget()
    scale = optimizer.loss_scale
    if not replica.config.train.calculate_per_token_loss:
        # Ranks along other axes than dp work on the same micro-batches.
        scale /= len(microbatches) * replica.mesh.samples.size
    with observer.phase("forward-backward"):
        losses = executor.run(microbatches, scale)

    # Metrics of all ranks, and the norm of the gradient: read together, the one wait for the device in a
    # step.
    sums = replica.metrics.queue(losses, executor.entries, *votes)
    measured = optimizer.measure(replica.config.logging.log_num_zeros_in_grad)
    with executor.place_named():
        numbers = read_numbers(torch.cat([sums, measured]), world)
    report = replica.metrics.report(numbers[: len(sums)], losses, executor.entries)
    gradient = numbers[len(sums) :]
    norm = math.sqrt(gradient[0]) / (optimizer.loss_scale * _divisor(replica, report))
    drop = observer.update_checked(norm)
    return Computed(progress, report, gradient, norm, drop)


def _update(
    replica: Replica,
    computed: Computed,
    learning_rate: float | Mapping[str, float],
    weight_decay: float,
    beta1: float | None,
    observer: Observer,
) -> StepResult:
    """Update the weights, unless the step is skipped. Collective over the world. beta1: as of `train_step`."""
    optimizer = replica.optimizer
    if beta1 is not None:
        optimizer.set_beta1(beta1)
    if replica.saving is not None:
        replica.saving.before_update()
    with observer.phase("optimizer"):
        result = optimizer.update(
            computed.gradient,
            learning_rate,
            weight_decay,
            _divisor(replica, computed.report),
            observer.update_checked,
        )
    replica.step_state.after_step(applied=not result.skipped)
    return result


def _divisor(replica: Replica, report: StepReport) -> float:
    """Return what gradients are divided by besides the loss scale."""
    per_token = replica.config.train.calculate_per_token_loss
    return max(report.tokens, 1) if per_token else 1.0


def _report_nonfinite(
    replica: Replica,
    microbatches: Sequence[Batch],
    report: StepReport,
    progress: Progress,
) -> None:
    """Locate the first NaN, then raise or warn. Collective over the world."""
    if replica.seeks_loss_scale:
        return
    weights = [
        (p.spec.name, p.tensor)
        for p in replica.optimizer.pieces()
        if p.kind == "weight"
    ]
    rerun = lambda: replica.executor.forward(microbatches)
    locate = LOCATOR.find()
    where = ""
    if locate is not None:
        where = f", {locate(replica.layers, weights, rerun, replica.mesh)}"
    also = "".join(
        f", {name} {mean}"
        for name, mean in report.named.items()
        if name in report.terms or not math.isfinite(mean)
    )
    message = f"loss is {report.loss}{also} at iteration {progress.step + 1}{where}"
    if replica.config.train.check_for_nan == "stop":
        raise NonFiniteLossError(
            f"{message}. The step was not applied; the last checkpoint is not affected. Lower the learning "
            "rate or check the data; use --check-for-nan continue to skip such steps."
        )
    if replica.mesh.rank == 0:
        logger.warning("%s. The step is skipped (--check-for-nan continue).", message)


@dataclass(frozen=True)
class Evaluation:
    """Means over the global batches. metrics: what layers added; stop: a rank asked to end the run."""

    loss: float
    metrics: dict[str, float]
    seconds: float
    stop: bool


def evaluate(
    replica: Replica,
    loader: BatchSource,
    *,
    first_sample: int,
    iterations: int,
    global_batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
    after_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Over `iterations` global batches; `after_batch()` is called after each.

    Collective over the world. A request to stop ends the evaluation after the current batch; its mean is then
    over fewer.
    """
    start = time.perf_counter()
    total = 0.0
    done = 0
    stop = False
    metrics: dict[str, list[float]] = {}
    train = replica.config.train
    reduction = StepMetrics(replica.mesh, train.calculate_per_token_loss)
    # All ranks learn in each batch whether one of them was asked to stop.
    while done < iterations and not stop:
        with places.phase(places.READING):
            batch = replica.batches.evaluation(
                loader, first_sample + done * global_batch_size, global_batch_size
            )
        microbatches = batch.split(train.micro_batch_size)
        losses = replica.executor.forward(microbatches)
        report = reduction.reduce(losses, replica.executor.entries, should_stop())
        total = total + report.loss
        done = done + 1
        stop = report.stop
        for name, value in report.named.items():
            metrics.setdefault(name, []).append(value)
        after_batch()
    # Means over the batches that were computed.
    means = {name: sum(values) / len(values) for name, values in metrics.items()}
    return Evaluation(total / max(done, 1), means, time.perf_counter() - start, stop)
