"""Learning rate, weight decay, batch size and kept tokens of a run, as the options set them."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from ..progress.ramps import (
    BatchSize,
    DeepSpeedRate,
    LearningRate,
    Ramp,
    TokenCount,
    WeightDecay,
    scheduled_samples,
)
from .options.cycle import ONE_CYCLE, RANGE_TEST
from .options.training import (
    DECOUPLED_RATE,
    DEEPSPEED_STYLES,
    MAIN_RATE,
    OptimizerConfig,
    TrainConfig,
)
from .run import RunConfig

if TYPE_CHECKING:
    from ..progress.cycles import CycledBeta


def make_learning_rates(config: RunConfig) -> dict[str, Ramp[float]]:
    """Return the learning rates of a run by name: MAIN_RATE, and DECOUPLED_RATE with --decoupled-lr."""
    optimizer = config.optimizer
    rates = {MAIN_RATE: make_learning_rate(config)}
    if optimizer.decoupled_lr is not None:
        lowest = (
            optimizer.min_lr
            if optimizer.decoupled_min_lr is None
            else optimizer.decoupled_min_lr
        )
        rates[DECOUPLED_RATE] = make_learning_rate(
            config, (optimizer.decoupled_lr, lowest)
        )
    return rates


def make_learning_rate(
    config: RunConfig, limits: tuple[float, float] | None = None
) -> Ramp[float]:
    """Return the learning rate, over tokens (`counts_tokens`) or over samples of steps that were not skipped.

    limits: the highest and the lowest; None: --lr and --min-lr
    """
    optimizer = config.optimizer
    train = config.train
    style = optimizer.lr_decay_style
    batch = train.global_batch_size
    highest, lowest = limits or (optimizer.lr, optimizer.min_lr)
    if counts_tokens(config):
        # A constant rate needs none.
        decay = optimizer.lr_decay_tokens or train.train_tokens or 1
        warmup = _fraction(
            optimizer.lr_warmup_fraction, decay, optimizer.lr_warmup_tokens
        )
        return LearningRate(
            highest=highest,
            lowest=lowest,
            initial=optimizer.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=style,
            count=token_count(config),
        )
    if style in (ONE_CYCLE, RANGE_TEST):
        from .cycle_schedule import cycled_rate

        return cycled_rate(config, highest, lowest)
    # DeepSpeed's styles count steps of one batch, all others samples.
    decay = _span(
        optimizer.lr_decay_iters, optimizer.lr_decay_samples, batch
    ) or train_span(train)
    if style in DEEPSPEED_STYLES:
        return _deepspeed_rate(optimizer, (highest, lowest), decay, batch)
    warmup = _span(optimizer.lr_warmup_iters, optimizer.lr_warmup_samples, batch)
    final = _span(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples, batch)
    first = batch if optimizer.lr_warmup_style == "linear_from_one" else 0
    return LearningRate(
        highest=highest,
        lowest=lowest,
        initial=optimizer.lr_warmup_init,
        warmup=_fraction(optimizer.lr_warmup_fraction, decay, warmup),
        decay=decay,
        style=style,
        final=final,
        final_style=optimizer.lr_wsd_decay_style,
        first=first,
    )


def _deepspeed_rate(
    optimizer: OptimizerConfig, limits: tuple[float, float], decay: int, batch: int
) -> DeepSpeedRate:
    """Return the learning rate of DeepSpeed's WarmupLR and its kin.

    limits: the highest and the lowest; decay: in samples; batch: samples of a step
    """
    highest, lowest = limits
    warmup = optimizer.lr_warmup_iters
    if optimizer.lr_warmup_fraction is not None:
        warmup = int(optimizer.lr_warmup_fraction * decay / batch)
    return DeepSpeedRate(
        optimizer.lr_decay_style,
        highest=highest,
        lowest=lowest,
        initial=optimizer.lr_warmup_init,
        warmup=warmup,
        total=decay // batch,
        warmup_style=optimizer.lr_warmup_style,
        batch=batch,
    )


def make_beta1(config: RunConfig) -> "CycledBeta | None":
    """Adam's beta1, if it changes: with OneCycle, unless --no-cycle-momentum is given."""
    cycle = config.cycle
    if config.optimizer.lr_decay_style != ONE_CYCLE or not cycle.cycle_momentum:
        return None
    from .cycle_schedule import cycled_beta

    return cycled_beta(config)


def counts_tokens(config: RunConfig) -> bool:
    """Return whether the learning rate counts tokens: because a span is in tokens, or because only the length of
    training is given, in tokens."""
    optimizer = config.optimizer
    spans = ("lr_decay", "lr_warmup", "lr_wsd_decay")
    if optimizer.lr_decay_tokens or optimizer.lr_warmup_tokens:
        return True
    in_steps = any(getattr(optimizer, f"{span}_iters") for span in spans)
    in_samples = any(getattr(optimizer, f"{span}_samples") for span in spans)
    is_of_deepspeed = optimizer.lr_decay_style in DEEPSPEED_STYLES
    return (
        bool(config.train.train_tokens)
        and not in_steps
        and not in_samples
        and not is_of_deepspeed
    )


def token_count(config: RunConfig) -> TokenCount:
    """Return the tokens that a run counts: the mean over the layers, where some process a part of each sequence."""
    return TokenCount(None if config.kept_tokens is None else config.model.num_layers)


def make_weight_decay(config: RunConfig) -> Ramp[float]:
    """Return the weight decay of a run, over tokens if its length is in tokens."""
    optimizer = config.optimizer
    tokens = config.train.train_tokens
    start = optimizer.start_weight_decay
    end = optimizer.end_weight_decay
    return WeightDecay(
        start=optimizer.weight_decay if start is None else start,
        end=optimizer.weight_decay if end is None else end,
        span=tokens or train_span(config.train),
        style=optimizer.weight_decay_incr_style,
        count=token_count(config) if tokens else scheduled_samples,
    )


def make_batch_size(config: RunConfig) -> BatchSize:
    """Return the global batch size of a run as a function of the consumed samples, valid on its number of ranks."""
    ramp = stated_batch_size(config)
    if config.train.decrease_batch_size_if_needed:
        return ramp.rounded_down(
            config.train.micro_batch_size * config.data_parallel_size
        )
    return ramp


def stated_batch_size(config: RunConfig) -> BatchSize:
    """Return the batch size without --decrease-batch-size-if-needed, which depends on the number of ranks."""
    train = config.train
    if train.step_batch_size_schedule:
        return BatchSize(
            parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length)
        )
    if train.rampup_batch_size is None:
        return BatchSize.constant(train.global_batch_size)
    start, increment, span = train.rampup_batch_size
    return BatchSize.growing(start, increment, train.global_batch_size, span)


def parse_batch_steps(
    words: Sequence[str], seq_length: int
) -> tuple[tuple[int, int], ...]:
    """TOKENS:SIZE pairs, as in "0:768 250B:1536", as ((samples, size), …) in rising order.

    As in Megatron, the suffixes K, M, B, T are powers of a thousand, and tokens become samples by integer
    division. Raises ValueError whose message continues "--step-batch-size-schedule …".
    """
    pairs = [pair.split(":") for pair in " ".join(words).replace(",", " ").split()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError("is not a list of TOKENS:SIZE, such as 0:256 2B:512")
    steps = sorted(
        (_count(tokens) // seq_length, _count(size)) for tokens, size in pairs
    )
    if steps[0][0] != 0:
        raise ValueError(
            f"begins after {steps[0][0]} samples; the first size must begin at 0 tokens"
        )
    for (samples, _), (after, _) in zip(steps, steps[1:]):
        if samples == after:
            raise ValueError(
                f"has two sizes from {samples} samples on (tokens / {seq_length})"
            )
    return tuple(steps)


def _count(text: str) -> int:
    suffix = text[-1:].upper()
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(suffix, 1)
    try:
        number = Fraction(text[:-1] if unit > 1 else text) * unit
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"has {text!r}, which is not a number like 200000, 200K or 1.5B"
        ) from None
    if number < 0 or number.denominator != 1:
        raise ValueError(f"has {text!r}, which is not a whole number of at least 0")
    return int(number)


def train_span(train: TrainConfig) -> int:
    """Return the samples of the whole training, whose length is in samples or iterations."""
    if train.train_samples:
        return train.train_samples
    assert train.train_iters is not None, (
        "the rules refuse it: a length in tokens alone"
    )
    return train.train_iters * train.global_batch_size


def _span(iterations: int | None, samples: int | None, batch: int) -> int:
    """Return a span in samples, given in one of the two units."""
    return samples or (iterations or 0) * batch


def _fraction(fraction: float | None, whole: float, span: float) -> float:
    """Return the span, or the fraction of a whole that replaces it."""
    return span if fraction is None else fraction * whole
