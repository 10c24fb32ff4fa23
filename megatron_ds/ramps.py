"""Ramps: pure functions from `Progress` to the value of a setting at that point. A schedule has no state to
store.

Learning rate and weight decay advance on *scheduled samples* (samples of steps that were not skipped) or,
with spans in tokens, on the tokens consumed (of all steps); batch size on samples consumed. A span in
iterations is that many times the global batch size, as in Megatron. A batch that grows has no fixed number of
samples per iteration, so a batch ramp needs its spans in samples or tokens.

Letters: n samples (or tokens) so far, w of warm-up, d after which the decay is over.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .progress import Progress

T = TypeVar("T")
Ramp = Callable[[Progress], T]


def scheduled_samples(progress: Progress) -> int:
    return progress.scheduled_samples


@dataclass(frozen=True)
class Tokens:
    """Tokens consumed, as Megatron-DeepSpeed counts them: after a curriculum shortened the sequences, and
    with random-LTD the mean over the layers of the tokens that each of them saw. layers: their number with
    random-LTD, else None.

    Tokens of skipped steps count. Megatron-DeepSpeed hands its schedule the tokens before the last step; here
    they include it, as its samples do.
    """

    layers: int | None = None

    def __call__(self, progress: Progress) -> int:
        return progress.tokens if self.layers is None else progress.layer_tokens // self.layers


# Shapes of a decay: the part of it that is over, r in [0, 1] → the part of the height that is left.
FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1),
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@dataclass(frozen=True)
class LearningRate:
    r"""Warm up linearly from `initial` to `highest`, then fall in `style` to `lowest`, which holds from
    `decay` on.

    With "WSD" (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395, section 4) the fall takes the last
    `final` samples of `decay` and has the shape `final_style`. "inverse-square-root" is Vaswani et al. 2017,
    equation 3, scaled to pass through `highest` at the end of the warm-up. count: what n is, the scheduled
    samples or `Tokens`.

        highest      ____                     ____________
                    /    \                   /            \
                   /      \  cosine, …      /              \  WSD
        initial   /        \______ lowest  /                \______
                  0  w     d               0  w     d-final  d
    """

    highest: float
    lowest: float = 0.0
    initial: float = 0.0
    warmup: float = 0
    decay: int = 1
    style: str = "linear"
    final: int = 0
    final_style: str = "exponential"
    count: Callable[[Progress], int] = scheduled_samples

    def __call__(self, progress: Progress) -> float:
        return self.at(self.count(progress))

    def at(self, n: int) -> float:
        if 0 < self.warmup and n <= self.warmup:
            return self.initial + (self.highest - self.initial) * n / self.warmup
        if self.style == "constant":
            return self.highest
        if n > self.decay:
            return self.lowest
        if self.style == "inverse-square-root":
            return max(self.lowest, self.highest * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)))
        return self.lowest + self._left(n) * (self.highest - self.lowest)

    def _left(self, n: int) -> float:
        """Part of the height that is left after n samples."""
        if self.style != "WSD":
            return FALLS[self.style]((n - self.warmup) / max(self.decay - self.warmup, 1))
        start = self.decay - self.final
        return 1.0 if n <= start else FALLS[self.final_style]((n - start) / self.final)


@dataclass(frozen=True)
class DeepSpeedRate:
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, step for step; spans in steps of `batch`
    samples.

    They count i = steps done − 1, which is −1 at the first step: it runs at `initial` (WarmupCosineLR: at 0).
    The warm-up is at least two steps long. WarmupDecayLR falls back to `initial`, WarmupCosineLR to `lowest`.
    """

    style: str
    highest: float
    batch: int
    lowest: float = 0.0
    initial: float = 0.0
    warmup: int = 1000
    total: int = 1
    warmup_style: str = "log"

    def __call__(self, progress: Progress) -> float:
        return self.at(progress.scheduled_samples // self.batch - 1)

    def at(self, i: int) -> float:
        if i < 0:
            return 0.0 if self.style == "WarmupCosineLR" else self.initial
        if i < self.steps:
            risen = math.log(i + 1) / math.log(self.steps) if self.warmup_style == "log" else i / self.steps
            return self.initial + (self.highest - self.initial) * risen
        if self.style == "WarmupLR":
            return self.highest
        span = max(1, self.total - self.steps)
        if self.style == "WarmupDecayLR":
            return self.initial + (self.highest - self.initial) * max(0.0, (self.total - i) / span)
        return self.lowest + (self.highest - self.lowest) * FALLS["cosine"](min(1.0,
                                                                                (i - self.steps + 1) / span))

    @property
    def steps(self) -> int:
        return max(2, self.warmup)


@dataclass(frozen=True)
class WeightDecay:
    """From `start` to `end` over a `span` of what `count` counts, constant, linear, or along half a cosine.
    """

    start: float
    end: float
    span: int = 1
    style: str = "constant"
    count: Callable[[Progress], int] = scheduled_samples

    def __call__(self, progress: Progress) -> float:
        return self.at(self.count(progress))

    def at(self, n: int) -> float:
        if self.style == "constant" or n > self.span:
            return self.end
        r = n / self.span
        return self.start + (self.end - self.start) * (r if self.style == "linear"
                                                       else FALLS["cosine"](1 - r))


@dataclass(frozen=True)
class BatchSize:
    """Global batch size: `steps` of (samples, size), each size from that many consumed samples on; the first
    from 0.

    Integers only, so that a run that is resumed where the size changes continues with the same sizes.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> "BatchSize":
        return cls(((0, size),))

    @classmethod
    def growing(cls, start: int, increment: int, final: int, span: int) -> "BatchSize":
        """From `start` by `increment` to `final`, which is reached after `span` samples; each size for an
        equal part of them.
        """
        increments = (final - start) // increment
        steps = {-(-i * span // increments): start + i * increment
                 for i in range(increments)} if increments else {0: start}
        return cls(tuple({**steps, span: final}.items()))

    def rounded_down(self, multiple: int) -> "BatchSize":
        """Each size rounded down to a multiple."""
        return BatchSize(tuple((samples, size // multiple * multiple) for samples, size in self.steps))

    def __call__(self, progress: Progress) -> int:
        return self.at(progress.samples)

    def at(self, n: int) -> int:
        return self.steps[bisect_right(self.steps, n, key=lambda step: step[0]) - 1][1]

    def until(self, n: int) -> float:
        """The number of samples at which the size at n ends; infinity for the last."""
        return next((samples for samples, _ in self.steps if samples > n), math.inf)

    @property
    def final(self) -> int:
        return self.steps[-1][1]

    @property
    def smallest(self) -> int:
        return min(size for _, size in self.steps)


def count_steps(batch_size: BatchSize, samples: int, consumed: int = 0) -> int:
    """Optimizer steps that fit into `samples` when `consumed` are gone; the last ones, too few for a batch,
    are left over.
    """
    steps, n = 0, consumed
    while n + (size := batch_size.at(n)) <= samples:
        held = min(batch_size.until(n), samples)
        alike = min(-((n - held) // size), (samples - n) // size)           # steps of this size
        steps, n = steps + alike, n + alike * size
    return steps
