"""Ramps: pure functions from `Progress` to the value of a setting at that point. A schedule has no state to store.

Learning rate and weight decay advance on *scheduled samples* (samples of steps that were not skipped) or, with spans in
tokens, on the tokens consumed (of all steps); batch size on samples consumed. A span in iterations is that many times the
global batch size, as in Megatron. A batch that grows has no fixed number of samples per iteration, so a batch ramp needs its
spans in samples or tokens.

Letters: n samples (or tokens) so far, w of warm-up, d after which the decay is over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeVar

from .progress import Progress

T = TypeVar("T")
Ramp = Callable[[Progress], T]


def scheduled_samples(progress: Progress) -> int:
    return progress.scheduled_samples


@dataclass(frozen=True)
class Tokens:
    """Tokens consumed, as Megatron-DeepSpeed counts them: after a curriculum shortened the sequences, and with random-LTD the
    mean over the layers of the tokens that each of them saw. layers: their number with random-LTD, else None.

    Tokens of skipped steps count. Megatron-DeepSpeed hands its schedule the tokens before the last step; here they include it,
    as its samples do.
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
    r"""Warm up linearly from `initial` to `highest`, then fall in `style` to `lowest`, which holds from `decay` on.

    With "WSD" (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395, section 4) the fall takes the last `final` samples
    of `decay` and has the shape `final_style`. "inverse-square-root" is Vaswani et al. 2017, equation 3, scaled to pass
    through `highest` at the end of the warm-up. count: what n is, the scheduled samples or `Tokens`.

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
    """DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, step for step; spans in steps of `batch` samples.

    They count i = steps done − 1, which is −1 at the first step: it runs at `initial` (WarmupCosineLR: at 0). The warm-up is
    at least two steps long. WarmupDecayLR falls back to `initial`, WarmupCosineLR to `lowest`.
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
        return self.lowest + (self.highest - self.lowest) * FALLS["cosine"](min(1.0, (i - self.steps + 1) / span))

    @property
    def steps(self) -> int:
        return max(2, self.warmup)


@dataclass(frozen=True)
class WeightDecay:
    """From `start` to `end` over a `span` of what `count` counts, constant, linear, or along half a cosine."""

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
        return self.start + (self.end - self.start) * (r if self.style == "linear" else FALLS["cosine"](1 - r))


class BatchRamp(Protocol):
    """Global batch size: a function of the samples consumed. `final` holds in the end, `smallest` is the least of all."""

    final: int
    smallest: int

    def __call__(self, progress: Progress) -> int: ...
    def at(self, n: int) -> int: ...

    def until(self, n: int) -> float:
        """Up to where the size at n holds, for sure."""


@dataclass(frozen=True)
class BatchSize:
    """Global batch size: from `start` in steps of `increment` to `final`, reached after `span` samples.

    Each size serves for the same number of samples, span / number of increments. Integers only, so that a run resumed at a
    border decides as the first one did.
    """

    final: int
    start: int
    increment: int
    span: int

    def __call__(self, progress: Progress) -> int:
        return self.at(progress.samples)

    def at(self, n: int) -> int:
        if n >= self.span:
            return self.final
        return self.start + n * self._increments // self.span * self.increment

    def until(self, n: int) -> float:
        if n >= self.span:
            return math.inf
        passed = n * self._increments // self.span
        return -(-(passed + 1) * self.span // self._increments) if self._increments else self.span

    @property
    def smallest(self) -> int:
        return self.start

    @property
    def _increments(self) -> int:
        return (self.final - self.start) // self.increment


@dataclass(frozen=True)
class BatchSteps:
    """Global batch size: `steps` of (samples, size), each size from so many samples on; the first from 0."""

    steps: tuple[tuple[int, int], ...]

    def __call__(self, progress: Progress) -> int:
        return self.at(progress.samples)

    def at(self, n: int) -> int:
        return next(size for samples, size in reversed(self.steps) if n >= samples)

    def until(self, n: int) -> float:
        return next((samples for samples, _ in self.steps if samples > n), math.inf)

    @property
    def final(self) -> int:
        return self.steps[-1][1]

    @property
    def smallest(self) -> int:
        return min(size for _, size in self.steps)


@dataclass(frozen=True)
class RoundedDown:
    """Another batch ramp, each size rounded down to a multiple of what all ranks take at once."""

    ramp: BatchRamp
    multiple: int

    def __call__(self, progress: Progress) -> int:
        return self.at(progress.samples)

    def at(self, n: int) -> int:
        return self._rounded(self.ramp.at(n))

    def until(self, n: int) -> float:
        return self.ramp.until(n)

    @property
    def final(self) -> int:
        return self._rounded(self.ramp.final)

    @property
    def smallest(self) -> int:
        return self._rounded(self.ramp.smallest)

    def _rounded(self, size: int) -> int:
        return size // self.multiple * self.multiple


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: Any

    def __call__(self, progress: Progress) -> Any:
        return self.value

    def at(self, n: int) -> Any:
        return self.value

    def until(self, n: int) -> float:
        return math.inf

    @property
    def final(self) -> Any:
        return self.value

    @property
    def smallest(self) -> Any:
        return self.value


def make_learning_rate(config: Any) -> Ramp[float]:
    """The learning rate that a `RunConfig` describes."""
    optimizer, train = config.optimizer, config.train
    batch = train.global_batch_size
    if counts_tokens(config):
        decay = optimizer.lr_decay_tokens or train.train_tokens or 1          # none is needed for a constant rate
        warmup = optimizer.lr_warmup_tokens
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        return LearningRate(highest=optimizer.lr, lowest=optimizer.min_lr, initial=optimizer.lr_warmup_init, warmup=warmup,
                            decay=decay, style=optimizer.lr_decay_style, count=token_count(config))
    decay = _span(optimizer.lr_decay_iters, optimizer.lr_decay_samples, batch) or train_span(train)
    if optimizer.lr_decay_style.startswith("Warmup"):
        warmup = optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is not None:
            warmup = int(optimizer.lr_warmup_fraction * decay / batch)
        return DeepSpeedRate(
            optimizer.lr_decay_style, highest=optimizer.lr, lowest=optimizer.min_lr, initial=optimizer.lr_warmup_init,
            warmup=warmup, total=decay // batch, warmup_style=optimizer.lr_warmup_style, batch=batch)
    warmup = _span(optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, batch)
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    final = _span(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples, batch)
    return LearningRate(
        highest=optimizer.lr, lowest=optimizer.min_lr, initial=optimizer.lr_warmup_init, warmup=warmup, decay=decay,
        style=optimizer.lr_decay_style, final=final, final_style=optimizer.lr_wsd_decay_style)


def counts_tokens(config: Any) -> bool:
    """Whether the learning rate is a function of tokens: a span in tokens is given, or the training is and no span is."""
    optimizer, spans = config.optimizer, ("lr_decay", "lr_warmup", "lr_wsd_decay")
    if optimizer.lr_decay_tokens or optimizer.lr_warmup_tokens:
        return True
    others = any(getattr(optimizer, f"{span}_{unit}") for span in spans for unit in ("iters", "samples"))
    return bool(config.train.train_tokens) and not others and not optimizer.lr_decay_style.startswith("Warmup")


def token_count(config: Any) -> Tokens:
    """How a run counts its tokens."""
    return Tokens(config.model.num_layers if config.routing.random_ltd else None)


def make_weight_decay(config: Any) -> Ramp[float]:
    """The weight decay that a `RunConfig` describes."""
    optimizer, tokens = config.optimizer, config.train.train_tokens
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return WeightDecay(
        start=optimizer.weight_decay if start is None else start, end=optimizer.weight_decay if end is None else end,
        span=tokens or train_span(config.train), style=optimizer.weight_decay_incr_style,
        count=token_count(config) if tokens else scheduled_samples)


def make_batch_size(config: Any) -> BatchRamp:
    """The global batch size that a `RunConfig` describes."""
    ramp = stated_batch_size(config)
    if config.train.decrease_batch_size_if_needed:
        return RoundedDown(ramp, config.train.micro_batch_size * config.data_parallel_size)
    return ramp


def stated_batch_size(config: Any) -> BatchRamp:
    """The same without --decrease-batch-size-if-needed: it does not depend on the number of ranks."""
    train = config.train
    if train.step_batch_size_schedule:
        return BatchSteps(parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length))
    if train.rampup_batch_size is None:
        return Constant(train.global_batch_size)
    start, increment, span = train.rampup_batch_size
    return BatchSize(final=train.global_batch_size, start=start, increment=increment, span=span)


def parse_batch_steps(words: Sequence[str], seq_length: int) -> tuple[tuple[int, int], ...]:
    """`0:768 250B:1536`, TOKENS:SIZE from tokens on, as ((samples, size), …), in the order of the samples.

    Megatron's rule: suffixes K, M, B, T are powers of a thousand, and tokens become samples by whole division.
    Raises ValueError, with words for the user, for anything else.
    """
    pairs = [pair.split(":") for pair in " ".join(words).replace(",", " ").split()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError("is not a list of TOKENS:SIZE, such as 0:256 2B:512")
    steps = sorted((_count(tokens) // seq_length, _count(size)) for tokens, size in pairs)
    if steps[0][0] != 0:
        raise ValueError(f"begins after {steps[0][0]} samples; the first size must hold from 0 on")
    for (samples, _), (after, _) in zip(steps, steps[1:]):
        if samples == after:
            raise ValueError(f"has two sizes from {samples} samples on (tokens / {seq_length})")
    return tuple(steps)


def _count(text: str) -> int:
    suffix = text[-1:].upper()
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(suffix, 1)
    try:
        number = Fraction(text[:-1] if unit > 1 else text) * unit
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"has {text!r}, which is not a number like 200000, 200K or 1.5B") from None
    if number < 0 or number.denominator != 1:
        raise ValueError(f"has {text!r}, which is not a whole number of at least 0")
    return int(number)


def train_span(train: Any) -> int:
    """Samples of the whole training, where it has a length in samples or iterations."""
    return train.train_samples or train.train_iters * train.global_batch_size


def count_steps(batch_size: BatchRamp, samples: int, consumed: int = 0) -> int:
    """Optimizer steps that fit into `samples` when `consumed` are gone; the last ones, too few for a batch, are left over."""
    steps, n = 0, consumed
    while n + (size := batch_size.at(n)) <= samples:
        held = min(batch_size.until(n), samples)
        alike = min(-((n - held) // size), (samples - n) // size)           # steps of this size
        steps, n = steps + alike, n + alike * size
    return steps


def _span(iterations: int | None, samples: int | None, batch: int) -> int:
    """The span in samples, given in one of the two units."""
    return samples or (iterations or 0) * batch
