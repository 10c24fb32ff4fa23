"""Rules about the run: batch, length, learning rate, number format, data, checkpoints."""

import re
from collections.abc import Iterator

from ..ramps import parse_batch_steps
from .run import RunConfig
from .say import divisors, either, flag, neighbours, say

MICRO, GLOBAL, STEPS = "train.micro_batch_size", "train.global_batch_size", "train.gradient_accumulation_steps"
RAMP, ITERS, SAMPLES = "train.rampup_batch_size", "train.train_iters", "train.train_samples"
SCHEDULE = "train.step_batch_size_schedule"


def batch(config: RunConfig) -> Iterator[str]:
    train, ranks = config.train, config.data_parallel_size
    micro, total, steps = train.micro_batch_size, train.global_batch_size, train.gradient_accumulation_steps
    if not ranks or not total or total < 1 or (micro is not None and micro < 1):
        return
    if micro is None and steps:
        yield (f"{say(config, GLOBAL)} is not a multiple of {say(config, STEPS)} × {ranks} data-parallel ranks = "
               f"{steps * ranks}. Use {flag(GLOBAL)} {neighbours(total, steps * ranks)}.")
    elif micro is not None and steps and micro * steps * ranks != total:
        yield (f"{say(config, GLOBAL)} is not {say(config, MICRO)} × {say(config, STEPS)} × {ranks} data-parallel ranks = "
               f"{micro * steps * ranks}. Leave out one of the three, best the accumulation steps.")
    elif train.decrease_batch_size_if_needed:
        if micro is not None and total < micro * ranks:
            yield (f"{say(config, GLOBAL)} is less than {say(config, MICRO)} × {ranks} data-parallel ranks = {micro * ranks}: "
                   f"rounded down nothing would be left. Use {flag(GLOBAL)} {micro * ranks} or more.")
    elif micro is not None and total % (micro * ranks):
        yield (f"{say(config, GLOBAL)} is not a multiple of {say(config, MICRO)} × {ranks} data-parallel ranks = "
               f"{micro * ranks}: every rank runs the same number of micro-batches. Use {flag(GLOBAL)} "
               f"{neighbours(total, micro * ranks)}"
               + (f", or {flag(MICRO)} {either(divisors(total // ranks))}." if total % ranks == 0 else "."))


def batch_ramp(config: RunConfig) -> Iterator[str]:
    train, ramp = config.train, config.train.rampup_batch_size
    if ramp is None or not train.global_batch_size or not train.micro_batch_size or not config.data_parallel_size:
        return
    start, increment, _ = ramp
    if train.train_iters is not None:
        yield (f"{say(config, RAMP)} with {say(config, ITERS)}: while the batch grows, an iteration has no fixed number of "
               "samples. Say the length with --train-samples.")
    if not 1 <= start <= train.global_batch_size:
        yield f"{say(config, RAMP)} starts at {start}; it must start between 1 and {say(config, GLOBAL)}."
    elif increment < 1 or (train.global_batch_size - start) % increment:
        grows = train.global_batch_size - start
        yield (f"{say(config, RAMP)} cannot grow from {start} to {train.global_batch_size} by {increment} each time. Use an "
               f"increment that divides {grows}{': ' + either(divisors(grows)[-8:]) if grows else ''}.")
    unit = train.micro_batch_size * config.data_parallel_size
    if train.decrease_batch_size_if_needed:
        if start < unit:
            yield f"{say(config, RAMP)} starts below {unit}, one micro-batch on every rank: rounded down nothing is left."
        return
    for word, number in (("start", start), ("increment", increment)):
        if number % unit:
            yield (f"{say(config, RAMP)}: the {word} {number} is not a multiple of {say(config, MICRO)} × "
                   f"{config.data_parallel_size} data-parallel ranks = {unit}. Use {neighbours(number, unit)}.")


def batch_schedule(config: RunConfig) -> Iterator[str]:
    train = config.train
    if not train.step_batch_size_schedule:
        return
    if train.rampup_batch_size is not None:
        yield f"{say(config, SCHEDULE)} and {say(config, RAMP)} say twice how the batch grows. Keep one."
    if train.train_iters is not None:
        yield (f"{say(config, SCHEDULE)} with {say(config, ITERS)}: while the batch grows, an iteration has no fixed number "
               "of samples. Say the length with --train-samples.")
    if not config.model.seq_length:
        return
    try:
        steps = parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length)
    except ValueError as error:
        yield f"{say(config, SCHEDULE)} {error}."
        return
    if train.global_batch_size != steps[-1][1]:
        yield f"{say(config, SCHEDULE)} ends with {steps[-1][1]}, not with {say(config, GLOBAL)}. Leave out {flag(GLOBAL)}."
    if not train.micro_batch_size or not config.data_parallel_size:
        return
    unit = train.micro_batch_size * config.data_parallel_size
    for size in dict.fromkeys(size for _, size in steps):
        if size < unit or size % unit and not train.decrease_batch_size_if_needed:
            yield (f"{say(config, SCHEDULE)}: {size} is not a multiple of {say(config, MICRO)} × {config.data_parallel_size} "
                   f"data-parallel ranks = {unit}. Use {neighbours(size, unit)}"
                   + (", or add --decrease-batch-size-if-needed." if size > unit else "."))


def length(config: RunConfig) -> Iterator[str]:
    train, rate = config.train, config.optimizer
    if train.train_iters is None and train.train_samples is None:
        yield f"missing: the length of training. Give {flag(ITERS)} or {flag(SAMPLES)}."
    elif train.train_iters is not None and train.train_samples is not None:
        yield f"{say(config, ITERS)} and {say(config, SAMPLES)} say the length of training twice. Keep one."
        return
    first = _first_batch(config)
    if train.train_samples and first and train.train_samples < first:
        yield (f"{say(config, SAMPLES)} is less than one global batch of {first}: there would be no step. Use {flag(SAMPLES)} "
               f"{first} or more.")
    unit, other = ("iters", "samples") if train.train_iters is not None else ("samples", "iters")
    counts_steps = rate.lr_decay_style.startswith("Warmup") and unit == "samples"          # told by `learning_rate`
    if (train.train_iters is not None or train.train_samples is not None) and not counts_steps:
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            path = f"optimizer.{name}_{other}"
            if config.get(path):
                yield (f"{say(config, path)} with {say(config, f'train.train_{unit}')}: the learning rate is counted in the "
                       f"unit of the length of training. Use {flag(f'optimizer.{name}_{unit}')}.")
    if rate.lr_warmup_fraction is not None:
        for path in ("optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples"):
            if config.get(path):
                yield f"{say(config, 'optimizer.lr_warmup_fraction')} and {say(config, path)} say the warm-up twice. Keep one."


def _first_batch(config: RunConfig) -> int | None:
    train = config.train
    if train.step_batch_size_schedule:
        try:
            return parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length or 1)[0][1]
        except ValueError:                                  # told by `batch_schedule`
            return None
    return train.rampup_batch_size[0] if train.rampup_batch_size else train.global_batch_size


def learning_rate(config: RunConfig) -> Iterator[str]:
    rate, train = config.optimizer, config.train
    for path in ("optimizer.min_lr", "optimizer.lr_warmup_init"):
        if rate.lr is not None and config.get(path) > rate.lr:
            yield f"{say(config, path)} is above {say(config, 'optimizer.lr')}, which is the highest learning rate."
    unit = "iters" if train.train_iters is not None else "samples"
    decay_path = f"optimizer.lr_decay_{unit}" if config.get(f"optimizer.lr_decay_{unit}") else f"train.train_{unit}"
    decay, warmup = config.get(decay_path), config.get(f"optimizer.lr_warmup_{unit}")
    final = config.get(f"optimizer.lr_wsd_decay_{unit}")
    if decay and warmup and warmup >= decay and rate.lr_decay_style != "constant" and rate.lr_decay_style != "WarmupLR":
        yield (f"{say(config, f'optimizer.lr_warmup_{unit}')} leaves nothing of {say(config, decay_path)} for the decay. "
               f"Use a warm-up below {decay}, or --lr-decay-style constant.")
    if rate.lr_decay_style == "WSD" and decay:
        if not final:
            yield f"--lr-decay-style WSD needs the length of its last phase. Add {flag(f'optimizer.lr_wsd_decay_{unit}')}."
        elif final + warmup > decay:
            yield (f"{say(config, f'optimizer.lr_wsd_decay_{unit}')} and a warm-up of {warmup} are longer than "
                   f"{say(config, decay_path)} together. Use at most {max(decay - warmup, 0)}.")
    elif final and rate.lr_decay_style != "WSD":
        yield (f"{say(config, f'optimizer.lr_wsd_decay_{unit}')} means nothing to "
               f"{say(config, 'optimizer.lr_decay_style')}. Remove it, or use --lr-decay-style WSD.")
    if rate.lr_warmup_style == "log" and not rate.lr_decay_style.startswith("Warmup"):
        yield (f"{say(config, 'optimizer.lr_warmup_style')} means nothing to {say(config, 'optimizer.lr_decay_style')}, "
               "whose warm-up is linear. Remove it, or use --lr-decay-style WarmupLR, WarmupDecayLR or WarmupCosineLR.")
    if rate.lr_decay_style.startswith("Warmup") and train.train_samples is not None:
        yield (f"{say(config, 'optimizer.lr_decay_style')} counts steps, but {say(config, SAMPLES)} counts samples. Say the "
               "length with --train-iters.")


def weight_decay(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    ends = [path for path in ("optimizer.start_weight_decay", "optimizer.end_weight_decay") if config.get(path) is not None]
    if optimizer.weight_decay_incr_style == "constant" and ends:
        yield (f"{' and '.join(say(config, path) for path in ends)} would change nothing, since the weight decay is "
               "constant. Add --weight-decay-incr-style linear or cosine, or say --weight-decay alone.")
    elif optimizer.weight_decay_incr_style != "constant" and len(ends) < 2:
        yield (f"{say(config, 'optimizer.weight_decay_incr_style')} needs both ends of the path. Give --start-weight-decay "
               "and --end-weight-decay.")


def number_format(config: RunConfig) -> Iterator[str]:
    if config.optimizer.fp16 and config.optimizer.bf16:
        yield (f"{say(config, 'optimizer.fp16')} and {say(config, 'optimizer.bf16')}: weights have one format. Keep one; "
               "bf16 needs no loss scaling.")
    elif not config.optimizer.fp16 and config.optimizer.loss_scale is not None:
        yield f"{say(config, 'optimizer.loss_scale')} means nothing without --fp16: nothing else scales the loss. Remove it."
    if config.optimizer.min_loss_scale > config.optimizer.initial_loss_scale:
        yield f"{say(config, 'optimizer.min_loss_scale')} is above {say(config, 'optimizer.initial_loss_scale')}."


def corpus(config: RunConfig) -> Iterator[str]:
    data = config.data
    paths = [path for path in ("data.train_data_path", "data.valid_data_path", "data.test_data_path") if config.get(path)]
    given = [say(config, path) for path in (("data.mock_data",) if data.mock_data else ()) + (
        ("data.data_path",) if data.data_path else ()) + tuple(paths[:1]) + tuple(
        path for path in ("data.data_args_path", "data.per_split_data_args_path") if config.get(path))]
    if not given and not config.plan.is_dry:                          # a plan can come before its data
        yield "missing: the data. Give --data-path PREFIX, or --train-data-path and its like, or --mock-data to try without."
    elif len(given) > 1:
        yield f"{' and '.join(given)} say the data twice. Keep one."
    if data.split is not None and not data.is_divided_by_split:
        yield (f"{say(config, 'data.split')} divides a --data-path, and there is none. Remove it"
               f"{', since each split has a path of its own' if paths or data.per_split_data_args_path else ''}.")
    elif data.split is not None and not _is_split(data.split):
        yield (f"{say(config, 'data.split')} is not a list of up to three proportions, none negative and not all zero. Write "
               "for instance 969,30,1, or 98,2,0 to have no test part.")
    if paths and not data.train_data_path:
        yield f"{say(config, paths[0])} without --train-data-path: there is nothing to train on."
    words = next(filter(None, (data.data_path, data.train_data_path)), ())
    if data.blend_weights == "epochs" and (data.mock_data or words and not _is_number(words[0])):
        yield f"{say(config, 'data.blend_weights')} without numbers before the prefixes: nothing says how often. Add them."
    if given and not data.mock_data and data.tokenizer_type is None:
        yield "missing: --tokenizer-type, the tokenizer that the corpus was made with (NullTokenizer for bare ids)."
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        yield f"missing: --vocab-size, which {say(config, 'data.tokenizer_type')} cannot know."


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


def _is_split(text: str) -> bool:
    """Up to three numbers between commas, blanks or slashes; as `data/split.py` reads them."""
    numbers = re.split(r"[\s,/]+", text.strip(" ,/"))
    return (len(numbers) <= 3 and all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in numbers)
            and any(float(n) for n in numbers))


def checkpoints(config: RunConfig) -> Iterator[str]:
    for path in ("checkpoint.save_total_limit", "checkpoint.no_save_optim", "checkpoint.overwrite_save"):
        if config.get(path) and config.checkpoint.save is None:
            yield f"{say(config, path)} without --save: there is no directory to save in. Add --save DIR, or remove it."
    for path in ("checkpoint.no_load_optim", "checkpoint.finetune", "checkpoint.exit_on_missing_checkpoint"):
        if config.get(path) and config.checkpoint.load is None:
            yield f"{say(config, path)} without --load: there is nothing to load. Add --load DIR, or remove it."


def planning(config: RunConfig) -> Iterator[str]:
    for path, least in (("plan.world_size", None), ("plan.rank", 0)):
        if config.get(path) != least and not config.plan.is_dry:
            yield f"{say(config, path)}: the launcher says it. Remove it, or add --dry-run, which plans such a run."
    if config.plan.is_dry and config.plan.rank >= config.world_size:
        yield (f"{say(config, 'plan.rank')} is not one of {config.world_size} rank{'s' * (config.world_size > 1)}. Use "
               f"{flag('plan.rank')} {either(range(min(config.world_size, 2)))}"
               f"{f' … {config.world_size - 1}' * (config.world_size > 2)}, or a larger --world-size.")


def recomputation(config: RunConfig) -> Iterator[str]:
    train = config.train
    for path in ("train.recompute_method", "train.recompute_num_layers"):
        if config.get(path) is not None and train.recompute_granularity != "full":
            yield f"{say(config, path)} means nothing without --recompute-granularity full. Add that, or remove it."
    if train.recompute_method == "uniform" and (train.recompute_num_layers or 1) > 1:
        yield (f"{say(config, 'train.recompute_num_layers')} with --recompute-method uniform: layers are recomputed one by "
               "one. Use 1, or --recompute-method block, which recomputes that many layers of each stage.")
    if train.recompute_method == "block" and train.recompute_num_layers is None:
        yield "--recompute-method block needs to know how many layers. Add --recompute-num-layers N."


def traces(config: RunConfig) -> Iterator[str]:
    steps = config.logging.trace_steps
    if steps and config.logging.trace is None:
        yield f"{say(config, 'logging.trace_steps')} without --trace: nothing is recorded. Add --trace DIR, or remove it."
    elif steps and steps[0] > steps[1]:
        yield f"{say(config, 'logging.trace_steps')} ends before it begins. Write the first step, then the last."


RUN_RULES = (batch, batch_ramp, batch_schedule, length, learning_rate, weight_decay, number_format, corpus, checkpoints,
             recomputation, traces, planning)
