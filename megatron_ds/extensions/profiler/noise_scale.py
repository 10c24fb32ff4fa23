"""The gradient noise scale: about the batch size from which a larger batch saves few steps.

McCandlish et al. 2018 (arXiv:1812.06162), section 2.2: B = tr(Σ) / |G|², for the gradient G of the expected
loss and the covariance Σ of the gradients of single samples. The mean gradient of b samples has

    E |G_b|² = |G|² + tr(Σ) / b

so two batch sizes give both unknowns (appendix A.1). The small batch is the first micro-batch of every
data-parallel rank, in a forward and backward of its own; the large one is the global batch that contains it.
Numerator and denominator are averaged over steps before they are divided, as single ones are noisy.
"""

import math
from dataclasses import dataclass

from ...batch.batch import Batch
from ...mpu.host_reads import read_numbers
from ...training.build import Replica
from ...training.moments import Numbers, RunStart, StepEnd
from ...training.observer import LAST, Observer, due
from .options import ProfilerConfig

KEPT = 0.9  # weight of the earlier measurements at each new one


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates. signal: |G|²; noise: tr(Σ), of single samples."""

    signal: float
    noise: float


def estimate(
    small_square: float, large_square: float, small: float, large: float
) -> Estimate:
    """From the squared norms of the mean gradients of `small` and of `large` samples; small < large."""
    return Estimate(
        (large * large_square - small * small_square) / (large - small),
        (small_square - large_square) / (1 / small - 1 / large),
    )


class NoiseScale:
    """The running estimate, over the measurements of this process. last: the newest measurement."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self.last: Estimate | None = None

    def add(
        self, small_square: float, large_square: float, small: float, large: float
    ) -> None:
        """Count a measurement, unless a gradient is not finite. Arguments of `estimate`."""
        if math.isfinite(small_square) and math.isfinite(large_square):
            one = self.last = estimate(small_square, large_square, small, large)
            self._signal = KEPT * self._signal + (1 - KEPT) * one.signal
            self._noise = KEPT * self._noise + (1 - KEPT) * one.noise

    def tags(self) -> dict[str, float]:
        """Return the parts of the last measurement, for TensorBoard."""
        return (
            {}
            if self.last is None
            else {
                "grad-noise-scale/signal": self.last.signal,
                "grad-noise-scale/noise": self.last.noise,
            }
        )

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None before the first measurement, and while the estimate of |G|² is
        not positive, which noise may cause."""
        return max(self._noise, 0.0) / self._signal if self._signal > 0 else None


def first_square(replica: Replica, batch: Batch) -> float:
    """Return the squared norm of the mean gradient of the first micro-batch of every data-parallel rank.

    batch: this rank's share of the next global batch. Weights, optimizer state and routers stay as they are;
    the gradients are discarded when the step begins. The host waits for the device. Collective over the
    world.
    """
    config = replica.config
    optimizer = replica.optimizer
    per_token = config.train.calculate_per_token_loss
    scale = optimizer.loss_scale
    optimizer.begin_step()
    losses = replica.executor.run(
        batch.split(config.train.micro_batch_size)[:1],
        scale if per_token else scale / replica.mesh.samples.size,
    )
    square = read_numbers(optimizer.measure(), replica.mesh.group("world"))[0]
    tokens = (
        replica.metrics.reduce(losses, replica.executor.entries).tokens
        if per_token
        else 1.0
    )
    replica.step_state.forget()
    return square / (scale * max(tokens, 1.0)) ** 2


class GradientNoise(Observer):
    """--grad-noise-scale: about the batch size from which a larger batch saves few steps."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Begin the running estimate."""
        self._replica = start.replica
        self._wanted = start.config.of(ProfilerConfig).grad_noise_scale_interval
        self._micro = start.config.train.micro_batch_size
        self._scale = NoiseScale()
        self._square: float | None = None
        self._parts = 1

    def batch_read(self, step: int, batch: Batch) -> None:
        """Measure the gradient of the first micro-batches, if it is due. Collective over the world."""
        self._square = None
        self._parts = batch.size // (batch.rows_per_sample * self._micro)
        if due(self._wanted, step) and self._parts > 1:
            self._square = first_square(self._replica, batch)

    def step_ended(self, end: StepEnd) -> None:
        """Compare it with the gradient of the whole batch."""
        if self._square is not None:
            small = end.size / self._parts
            self._scale.add(self._square, end.grad_norm**2, small, end.size)

    def numbers(self) -> Numbers:
        """Return the estimate."""
        return Numbers({"grad_noise_scale": self._scale.samples}, self._scale.tags())
