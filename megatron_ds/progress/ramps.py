r"""`Progress`, the counters of a run; and ramps, pure functions from `Progress` to the value of a setting.
Ramps have no state, so checkpoints store none.

Learning rate and weight decay advance on *scheduled samples* (samples of steps that were not skipped) or, if
their spans are in tokens, on all consumed tokens. The batch size advances on consumed samples. A span in
iterations is that many times the global batch size, as in Megatron. While the batch grows an iteration has no
fixed number of samples; then spans must be in samples or tokens.

Letters: n samples (or tokens) consumed so far, w end of the warm-up, d end of the decay.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of a run, immutable: each step makes a new one.

    step               optimizer steps, including skipped ones ("iteration" in Megatron's log line)
    samples            sequences consumed, over all data-parallel ranks
    tokens             tokens consumed
    scheduled_samples  samples of steps that were not skipped: learning rate and weight decay advance on
                       these, as in Megatron
    skipped_steps      steps skipped because a gradient was not finite, or was a spike (--skip-spikes)
    nan_steps          steps whose loss was not finite
    layer_tokens       tokens consumed, counted once for each block that processed them
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    scheduled_samples: int = 0
    skipped_steps: int = 0
    nan_steps: int = 0
    layer_tokens: int = 0

    def after(
        self,
        samples: int,
        tokens: int,
        *,
        skipped: bool = False,
        nan: bool = False,
        layer_tokens: int = 0,
    ) -> "Progress":
        """Return the progress after one more step that consumed `samples` sequences and `tokens` tokens."""
        return Progress(
            step=self.step + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            scheduled_samples=self.scheduled_samples + (0 if skipped else samples),
            skipped_steps=self.skipped_steps + skipped,
            nan_steps=self.nan_steps + nan,
            layer_tokens=self.layer_tokens + layer_tokens,
        )

    def to_dict(self) -> dict[str, int]:
        """Return plain values for run.json."""
        return asdict(self)


T = TypeVar("T")
Ramp = Callable[[Progress], T]


def scheduled_samples(progress: Progress) -> int:
    """Return the samples of the steps that were not skipped."""
    return progress.scheduled_samples


@dataclass(frozen=True)
class TokenCount:
    """Consumed tokens, as Megatron-DeepSpeed counts them: those that were trained on, and where blocks process
    a part of them the mean over the layers of the tokens that each layer processed.

    layers: their number, where there are such blocks, else None. Tokens of skipped steps count. Megatron-DeepSpeed
    leaves out the tokens of the last step; here they count, as samples do.
    """

    layers: int | None = None

    def __call__(self, progress: Progress) -> int:
        return (
            progress.tokens
            if self.layers is None
            else progress.layer_tokens // self.layers
        )


# Shapes of a decay: elapsed fraction r in [0, 1] → fraction of the height that is left.
FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1),
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@dataclass(frozen=True)
class LearningRate:
    r"""Linear warm-up from `initial` to `highest`, then a decay in `style` to `lowest`.

    "WSD" (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395, section 4) decays during the last `final`
    samples before `decay`, in the shape `final_style`. "inverse-square-root" is Vaswani et al. 2017, equation
    3, scaled to pass through `highest` at the end of the warm-up. The warm-up has at least the rate after
    `first` samples. count: progress → n.

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
    first: int = 0
    count: Callable[[Progress], int] = scheduled_samples

    def __call__(self, progress: Progress) -> float:
        return self.at(self.count(progress))

    def at(self, n: int) -> float:
        """Return the learning rate after n samples or tokens."""
        if 0 < self.warmup and n <= self.warmup:
            risen = min(max(n, self.first), self.warmup) / self.warmup
            return self.initial + (self.highest - self.initial) * risen
        if self.style == "constant":
            return self.highest
        if n > self.decay:
            return self.lowest
        if self.style == "inverse-square-root":
            return max(
                self.lowest,
                self.highest * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)),
            )
        return self.lowest + self._left(n) * (self.highest - self.lowest)

    def _left(self, n: int) -> float:
        """Return the fraction of the height that is left after n."""
        if self.style != "WSD":
            return FALLS[self.style](
                (n - self.warmup) / max(self.decay - self.warmup, 1)
            )
        start = self.decay - self.final
        return 1.0 if n <= start else FALLS[self.final_style]((n - start) / self.final)


@dataclass(frozen=True)
class DeepSpeedRate:
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, equal at every step (others: cycles.py).

    These schedulers count i = completed steps − 1, which is −1 at the first step: its rate is `initial`, or 0
    for WarmupCosineLR. The warm-up is at least two steps long. WarmupDecayLR decays to `initial`,
    WarmupCosineLR to `lowest`. batch: samples of a step, which convert samples to steps; warmup and total are
    in steps.
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
        """Return the learning rate of the step that follows i + 1 completed steps."""
        if i < 0:
            return 0.0 if self.style == "WarmupCosineLR" else self.initial
        if i < self.steps:
            risen = (
                math.log(i + 1) / math.log(self.steps)
                if self.warmup_style == "log"
                else i / self.steps
            )
            return self.initial + (self.highest - self.initial) * risen
        if self.style == "WarmupLR":
            return self.highest
        span = max(1, self.total - self.steps)
        if self.style == "WarmupDecayLR":
            return self.initial + (self.highest - self.initial) * max(
                0.0, (self.total - i) / span
            )
        fallen = min(1.0, (i - self.steps + 1) / span)
        return self.lowest + (self.highest - self.lowest) * FALLS["cosine"](fallen)

    @property
    def steps(self) -> int:
        """Steps of the warm-up."""
        return max(2, self.warmup)


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that goes from `start` to `end` over `span` samples or tokens: constant, linear, or along
    half a period of a cosine.
    """

    start: float
    end: float
    span: int = 1
    style: str = "constant"
    count: Callable[[Progress], int] = scheduled_samples

    def __call__(self, progress: Progress) -> float:
        return self.at(self.count(progress))

    def at(self, n: int) -> float:
        """Return the weight decay after n samples or tokens."""
        if self.style == "constant" or n > self.span:
            return self.end
        r = n / self.span
        return self.start + (self.end - self.start) * (
            r if self.style == "linear" else FALLS["cosine"](1 - r)
        )


@dataclass(frozen=True)
class BatchSize:
    """Global batch size, as a table of steps.

    steps: (samples, size) in rising order: `size` applies from that number of consumed samples on. The first
    begins at 0. All numbers are integers, so a resumed run has the same sizes.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> "BatchSize":
        """Return one size for the whole run."""
        return cls(((0, size),))

    @classmethod
    def growing(cls, start: int, increment: int, final: int, span: int) -> "BatchSize":
        """Return sizes that grow from `start` to `final` by `increment`. All sizes below `final` share `span`
        samples equally."""
        increments = (final - start) // increment
        steps = {
            -(-i * span // increments): start + i * increment for i in range(increments)
        }
        return cls(tuple({**(steps or {0: start}), span: final}.items()))

    def rounded_down(self, multiple: int) -> "BatchSize":
        """Return each size rounded down to a multiple."""
        return BatchSize(
            tuple(
                (samples, size // multiple * multiple) for samples, size in self.steps
            )
        )

    def __call__(self, progress: Progress) -> int:
        return self.at(progress.samples)

    def at(self, n: int) -> int:
        """Return the size after n consumed samples."""
        return self.steps[bisect_right(self.steps, n, key=lambda step: step[0]) - 1][1]

    def until(self, n: int) -> float:
        """Return the number of consumed samples at which the size at n ends; infinity for the last size."""
        return next((samples for samples, _ in self.steps if samples > n), math.inf)

    @property
    def final(self) -> int:
        """The last size."""
        return self.steps[-1][1]

    @property
    def smallest(self) -> int:
        """The least of all sizes."""
        return min(size for _, size in self.steps)


def count_steps(batch_size: BatchSize, samples: int, consumed: int = 0) -> int:
    """Return the number of steps until `samples` are consumed, after `consumed` ones. A remainder below a batch is
    not used."""
    steps = 0
    n = consumed
    while n + (size := batch_size.at(n)) <= samples:
        end = int(min(batch_size.until(n), samples))
        alike = min(-((n - end) // size), (samples - n) // size)  # steps of this size
        steps = steps + alike
        n = n + alike * size
    return steps
