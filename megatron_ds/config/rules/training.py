"""Rules about the run: batch, length, learning rate, dtypes, checkpoints, recomputation, plans."""

from collections.abc import Iterator

from ...features import objectives
from ..messages import divisors, either, flag, neighbours
from ..options.cycle import ONE_CYCLE, RANGE_TEST
from ..options.training import DEEPSPEED_STYLES
from ..run import RunConfig, all_options
from ..training_schedule import counts_tokens, parse_batch_steps
from .optimizer import optimizer_options

WARMUP_STYLES = tuple(style for style in DEEPSPEED_STYLES if style.startswith("Warmup"))
# Styles that do not decay to an end.
WITHOUT_END = (
    "constant",
    "WarmupLR",
    "OneCycle",
    "LRRangeTest",
)


def batch(config: RunConfig) -> Iterator[str]:
    """Global batch = micro-batch × accumulation steps × data-parallel ranks."""
    # Missing or wrong numbers are reported elsewhere.
    train = config.train
    ranks = config.data_parallel_size
    micro = train.micro_batch_size
    total = train.global_batch_size
    steps = train.gradient_accumulation_steps
    if not ranks or not total or total < 1 or (micro is not None and micro < 1):
        return
    # The product of the three.
    if micro is None and steps:
        yield (
            f"[global_batch_size] is not a multiple of [gradient_accumulation_steps] × {ranks} "
            f"data-parallel ranks = {steps * ranks}. Use --global-batch-size "
            f"{neighbours(total, steps * ranks)}."
        )
    elif micro is not None and steps and micro * steps * ranks != total:
        yield (
            f"[global_batch_size] is not [micro_batch_size] × [gradient_accumulation_steps] × {ranks} "
            f"data-parallel ranks = {micro * steps * ranks}. Remove one of the three, preferably the "
            "accumulation steps."
        )
    # Without accumulation steps the batch is a multiple of the other two, or is rounded down.
    elif train.decrease_batch_size_if_needed:
        if micro is not None and total < micro * ranks:
            yield (
                f"[global_batch_size] is less than [micro_batch_size] × {ranks} data-parallel ranks = "
                f"{micro * ranks}: rounded down, it would be 0. Use --global-batch-size {micro * ranks} "
                "or more."
            )
    elif micro is not None and total % (micro * ranks):
        yield (
            f"[global_batch_size] is not a multiple of [micro_batch_size] × {ranks} data-parallel ranks = "
            f"{micro * ranks}: every rank runs the same number of micro-batches. Use --global-batch-size "
            f"{neighbours(total, micro * ranks)}"
            + (
                f", or --micro-batch-size {either(divisors(total // ranks))}."
                if total % ranks == 0
                else "."
            )
        )


def batch_ramp(config: RunConfig) -> Iterator[str]:
    """--rampup-batch-size reaches the global batch, in sizes that all ranks share evenly."""
    # Without the sizes nothing can be compared.
    train = config.train
    ramp = config.train.rampup_batch_size
    if ramp is None or not (
        train.global_batch_size and train.micro_batch_size and config.data_parallel_size
    ):
        return
    start, increment, _ = ramp
    # The ramp counts samples, and ends at the global batch.
    if train.train_iters is not None:
        yield (
            "[rampup_batch_size] with [train_iters]: while the batch grows, an iteration has no fixed "
            "number of samples. Use --train-samples or --train-tokens."
        )
    if not 1 <= start <= train.global_batch_size:
        yield (
            f"[rampup_batch_size] starts at {start}, outside 1 to [global_batch_size]. Use a start "
            "between these."
        )
    elif increment < 1 or (train.global_batch_size - start) % increment:
        grows = train.global_batch_size - start
        yield (
            f"[rampup_batch_size] cannot grow from {start} to {train.global_batch_size} by {increment} "
            "each time. Use an increment that divides "
            f"{grows}{': ' + either(divisors(grows)[-8:]) if grows else ''}."
        )
    # Each size is a multiple of a micro-batch on every rank, or is rounded down.
    unit = train.micro_batch_size * config.data_parallel_size
    if train.decrease_batch_size_if_needed:
        if start < unit:
            yield (
                f"[rampup_batch_size] starts below {unit}, one micro-batch on every rank: rounded down, "
                f"it would be 0. Start at {unit} or more."
            )
        return
    for what, number in (("start", start), ("increment", increment)):
        if number % unit:
            yield (
                f"[rampup_batch_size]: the {what} {number} is not a multiple of [micro_batch_size] × "
                f"{config.data_parallel_size} data-parallel ranks = {unit}. Use "
                f"{neighbours(number, unit)}."
            )


def batch_schedule(config: RunConfig) -> Iterator[str]:
    """--step-batch-size-schedule can be read, and all ranks share each size evenly."""
    # One way to grow, over samples.
    train = config.train
    if not train.step_batch_size_schedule:
        return
    if train.rampup_batch_size is not None:
        yield (
            "[step_batch_size_schedule] and [rampup_batch_size] both set how the batch grows. Give only "
            "one."
        )
    if train.train_iters is not None:
        yield (
            "[step_batch_size_schedule] with [train_iters]: while the batch grows, an iteration has no "
            "fixed number of samples. Use --train-samples or --train-tokens."
        )
    # The schedule can be read, and ends with the global batch.
    if not config.model.seq_length:
        return
    try:
        steps = parse_batch_steps(
            train.step_batch_size_schedule, config.model.seq_length
        )
    except ValueError as error:
        yield f"[step_batch_size_schedule] {error}."
        return
    if train.global_batch_size != steps[-1][1]:
        yield (
            f"[step_batch_size_schedule] ends with {steps[-1][1]}, not with [global_batch_size]. Remove "
            "--global-batch-size."
        )
    # Each size is a multiple of a micro-batch on every rank, or is rounded down.
    if not train.micro_batch_size or not config.data_parallel_size:
        return
    unit = train.micro_batch_size * config.data_parallel_size
    for size in dict.fromkeys(size for _, size in steps):
        if size < unit or size % unit and not train.decrease_batch_size_if_needed:
            yield (
                f"[step_batch_size_schedule]: {size} is not a multiple of [micro_batch_size] × "
                f"{config.data_parallel_size} data-parallel ranks = {unit}. Use {neighbours(size, unit)}"
                + (", or add --decrease-batch-size-if-needed." if size > unit else ".")
            )


def evaluation_batch(config: RunConfig) -> Iterator[str]:
    """Evaluations use the global batch size."""
    train = config.train
    if (
        train.eval_global_batch_size not in (None, train.global_batch_size)
        and train.global_batch_size
    ):
        yield (
            "[eval_global_batch_size] differs from [global_batch_size], whose batches evaluations use. "
            "Remove it; --eval-iters sets the number of batches."
        )


def length(config: RunConfig) -> Iterator[str]:
    """The training has one length, of at least a step; the learning rate is given in the same unit."""
    train = config.train
    if (
        train.train_iters is None
        and train.train_samples is None
        and train.train_tokens is None
    ):
        yield "missing: the length of training. Give --train-iters, --train-samples or --train-tokens."
    elif train.train_iters is not None and train.train_samples is not None:
        yield "[train_iters] and [train_samples] both set the length of training. Give only one."
        return
    first = _first_batch(config)
    if train.train_samples and first and train.train_samples < first:
        yield (
            f"[train_samples] is less than one global batch of {first}: training would have no step. Use "
            f"--train-samples {first} or more."
        )
    yield from _units(config)
    if config.optimizer.lr_warmup_fraction is not None:
        for unit in ("iters", "samples", "tokens"):
            if config.get(f"optimizer.lr_warmup_{unit}"):
                yield f"[lr_warmup_fraction] and [lr_warmup_{unit}] both set the warm-up. Give only one."


def _units(config: RunConfig) -> Iterator[str]:
    """The spans of the learning rate are in one unit: tokens, or that of the length of training."""
    # The unit, and why it is that.
    train = config.train
    rate = config.optimizer
    # `learning_rate` reports this case.
    if rate.lr_decay_style in DEEPSPEED_STYLES and train.train_iters is None:
        return
    if counts_tokens(config):
        unit = "tokens"
        why = "the other spans of the learning rate are in tokens"
        if (
            not rate.lr_decay_tokens
            and not train.train_tokens
            and rate.lr_decay_style != "constant"
        ):
            yield (
                "[lr_warmup_tokens] needs the end of the decay in tokens. Add --lr-decay-tokens or "
                "--train-tokens."
            )
    elif (
        train.train_iters is not None
        or train.train_samples is not None
        or train.train_tokens is not None
    ):
        unit = "iters" if train.train_iters is not None else "samples"
        why = f"the length of training is in {'iterations' if unit == 'iters' else 'samples'}"
        if train.train_tokens:
            why = (
                "--train-iters is not given"
                if unit == "samples"
                else "[train_iters] is given"
            )
        if (
            train.train_iters is None
            and train.train_samples is None
            and not rate.lr_decay_samples
        ):
            yield (
                "the learning rate is in samples, but [train_tokens] sets the end of its decay in tokens. "
                "Add --lr-decay-samples, or use --lr-warmup-tokens."
            )
    else:
        return
    # Spans in another unit.
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        for other in {"iters", "samples"} - {unit}:
            if config.get(path := f"optimizer.{name}_{other}"):
                yield f"[{path}], but {why}.{_in_unit(config, name, other, unit)}"


def _in_unit(config: RunConfig, name: str, other: str, unit: str) -> str:
    """Advice: the flag of the other unit, with the converted number where it can be computed."""
    if f"optimizer.{name}_{unit}" not in all_options():
        return f" Remove it; {config.optimizer.lr_decay_style} cannot count {unit}."
    number = config.get(f"optimizer.{name}_{other}")
    size = config.train.global_batch_size
    length = config.model.seq_length
    if other == "samples":
        in_samples = number
    else:
        in_samples = number * size if size else None
    converted = {
        "samples": in_samples,
        "tokens": in_samples and length and in_samples * length,
        "iters": size and in_samples and -(-in_samples // size),
    }[unit]
    shown = f" {converted}" if converted and config.changed_lengths is None else ""
    return f" Use {flag(f'optimizer.{name}_{unit}')}{shown}."


def _first_batch(config: RunConfig) -> int | None:
    """Global batch size of the first step, if it is known."""
    train = config.train
    if train.step_batch_size_schedule:
        try:
            return parse_batch_steps(
                train.step_batch_size_schedule, config.model.seq_length or 1
            )[0][1]
        except ValueError:  # reported by `batch_schedule`
            return None
    return (
        train.rampup_batch_size[0]
        if train.rampup_batch_size
        else train.global_batch_size
    )


def learning_rate(config: RunConfig) -> Iterator[str]:
    """Rates are in order, warm-up and decay fit into the run, and the decay style uses all spans given."""
    rate = config.optimizer
    train = config.train
    yield from _decoupled(config)
    for path in ("optimizer.min_lr", "optimizer.lr_warmup_init"):
        if rate.lr is not None and config.get(path) > rate.lr:
            yield f"[{path}] is above [lr], which is the highest learning rate."
    tokens = counts_tokens(config)
    # The spans, all in the unit of the length of training.
    if tokens:
        unit = "tokens"
    else:
        unit = "iters" if train.train_iters is not None else "samples"
    own = f"optimizer.lr_decay_{unit}"
    whole = f"train.train_{unit}"
    decay_path = own if config.get(own) else whole
    decay = config.get(decay_path)
    warmup = config.get(f"optimizer.lr_warmup_{unit}")
    final = None if tokens else config.get(f"optimizer.lr_wsd_decay_{unit}")
    # The warm-up and the final decay fit into the run.
    if decay and warmup and warmup >= decay and rate.lr_decay_style not in WITHOUT_END:
        yield (
            f"[lr_warmup_{unit}] leaves nothing of [{decay_path}] for the decay. Use a warm-up below "
            f"{decay}, or --lr-decay-style constant."
        )
    if rate.lr_decay_style == "WSD" and tokens:
        yield (
            "[lr_decay_style] cannot count its final decay in tokens. Set its spans with "
            "--lr-decay-samples, --lr-warmup-samples and --lr-wsd-decay-samples."
        )
    elif rate.lr_decay_style == "WSD" and decay:
        if not final:
            yield f"--lr-decay-style WSD needs the length of its final decay. Add --lr-wsd-decay-{unit}."
        elif final + warmup > decay:
            yield (
                f"[lr_wsd_decay_{unit}] and a warm-up of {warmup} are longer than [{decay_path}] "
                f"together. Use at most {max(decay - warmup, 0)}."
            )
    # The style of the warm-up is one that the style of the decay has.
    if rate.lr_warmup_style == "linear_from_one" and (
        tokens or rate.lr_decay_style in DEEPSPEED_STYLES
    ):
        yield (
            "[lr_warmup_style] is for warm-ups in iterations or samples of Megatron's styles. Use "
            "--lr-warmup-style linear."
        )
    if rate.lr_warmup_style == "log" and rate.lr_decay_style not in WARMUP_STYLES:
        yield (
            "[lr_warmup_style] has no effect with [lr_decay_style], whose warm-up is linear. Remove it, "
            "or use --lr-decay-style WarmupLR, WarmupDecayLR or WarmupCosineLR."
        )
    if rate.lr_decay_style in DEEPSPEED_STYLES:
        yield from _deepspeed_style(config)
    if config.optimizer.lr_decay_style in (ONE_CYCLE, RANGE_TEST):
        from .cycle import cycles

        yield from cycles(config)


def _decoupled(config: RunConfig) -> Iterator[str]:
    """The learning rate of embeddings and output layers is the highest of its own."""
    rate = config.optimizer
    if rate.decoupled_lr is None:
        return
    lowest = "decoupled_min_lr" if rate.decoupled_min_lr is not None else "min_lr"
    for name in (lowest, "lr_warmup_init"):
        if getattr(rate, name) > rate.decoupled_lr:
            advice = " Give --decoupled-min-lr." if name == "min_lr" else ""
            yield (
                f"[{name}] is above [decoupled_lr], the highest learning rate of the word embedding and "
                f"the output layer.{advice or ' Lower it.'}"
            )


def _deepspeed_style(config: RunConfig) -> Iterator[str]:
    """DeepSpeed's schedulers count steps."""
    spans = (
        "optimizer.lr_decay_tokens",
        "optimizer.lr_warmup_tokens",
        "train.train_samples",
        "train.train_tokens",
    )
    span = next((path for path in spans if config.get(path)), None)
    if span is not None and (
        span.startswith("optimizer.") or config.train.train_iters is None
    ):
        yield (
            f"[lr_decay_style] counts steps, but [{span}] counts {span.rpartition('_')[2]}. Use "
            "--train-iters and spans in iterations."
        )


def weight_decay(config: RunConfig) -> Iterator[str]:
    """A weight decay that changes has a first and a last value."""
    optimizer = config.optimizer
    both = ("optimizer.start_weight_decay", "optimizer.end_weight_decay")
    ends = [f"[{path}]" for path in both if config.get(path) is not None]
    if optimizer.weight_decay_incr_style != "constant" and len(ends) < 2:
        yield (
            "[weight_decay_incr_style] needs the first and the last value. Give both --start-weight-decay "
            "and --end-weight-decay."
        )


def number_format(config: RunConfig) -> Iterator[str]:
    """Weights have one dtype, and only fp16 scales the loss."""
    if config.optimizer.fp16 and config.optimizer.bf16:
        yield "[fp16] and [bf16]: weights have one dtype. Give only one; bf16 needs no loss scaling."
    if config.optimizer.min_loss_scale > config.optimizer.initial_loss_scale:
        yield "[min_loss_scale] is above [initial_loss_scale], the first scale. Lower the minimum."


def planning(config: RunConfig) -> Iterator[str]:
    """World size and rank are options of a plan only."""
    ranks = config.world_size
    for path in ("plan.world_size", "plan.rank"):
        if not config.plan.is_dry and not config.is_default(path):
            yield (
                f"[{path}]: outside of a plan the launcher sets it. Remove it, or add --dry-run to plan "
                "such a run."
            )
    if config.plan.is_dry and config.plan.rank >= ranks:
        valid = either(range(min(ranks, 2))) + (f" … {ranks - 1}" if ranks > 2 else "")
        yield (
            f"[rank] is not one of {ranks} rank{'s' if ranks > 1 else ''}. Use --rank {valid}, or a larger "
            "--world-size."
        )


def recomputation(config: RunConfig) -> Iterator[str]:
    """The choice of layers applies to full recomputation."""
    train = config.train
    if train.recompute_method == "uniform" and (train.recompute_num_layers or 1) > 1:
        yield (
            "[recompute_num_layers] with --recompute-method uniform: layers are recomputed one by one. "
            "Use 1, or --recompute-method block, which recomputes that many layers of each stage."
        )
    if train.recompute_method == "block" and train.recompute_num_layers is None:
        yield "--recompute-method block needs the number of layers. Add --recompute-num-layers N."


def tiles(config: RunConfig) -> Iterator[str]:
    """Tiles of the feed-forward are of dense ones."""
    if config.train.tiled_mlp != 1 and config.model.num_experts is not None:
        yield (
            "[tiled_mlp] applies to dense feed-forwards, but [num_experts] gives layers experts, which "
            "compute the rows of all tokens of an expert at once. Remove --tiled-mlp, or --num-experts."
        )


def one_objective(config: RunConfig) -> Iterator[str]:
    """At most one feature replaces the loss of the model."""
    names = [*objectives(config)]
    if len(names) > 1:
        yield (
            f"the features {' and '.join(names)} each replace the loss of the model, and a run has one loss. Train "
            "with one after the other."
        )


TRAINING_RULES = (
    batch,
    evaluation_batch,
    batch_ramp,
    batch_schedule,
    length,
    learning_rate,
    weight_decay,
    optimizer_options,
    number_format,
    recomputation,
    tiles,
    planning,
    one_objective,
)
