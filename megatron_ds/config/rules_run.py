"""Rules about the run: batch, length, learning rate, dtypes, data, checkpoints."""

import re
from collections.abc import Iterator

from ..ramps import counts_tokens, parse_batch_steps
from .run import RunConfig, all_options
from .say import divisors, either, flag, neighbours, say

MICRO, GLOBAL, STEPS = "train.micro_batch_size", "train.global_batch_size", "train.gradient_accumulation_steps"
RAMP, SCHEDULE = "train.rampup_batch_size", "train.step_batch_size_schedule"
ITERS, SAMPLES, TOKENS = "train.train_iters", "train.train_samples", "train.train_tokens"


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
               f"{micro * steps * ranks}. Remove one of the three, preferably the accumulation steps.")
    elif train.decrease_batch_size_if_needed:
        if micro is not None and total < micro * ranks:
            yield (f"{say(config, GLOBAL)} is less than {say(config, MICRO)} × {ranks} data-parallel ranks = {micro * ranks}: "
                   f"rounded down, it would be 0. Use {flag(GLOBAL)} {micro * ranks} or more.")
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
               "samples. Use --train-samples or --train-tokens.")
    if not 1 <= start <= train.global_batch_size:
        yield f"{say(config, RAMP)} starts at {start}; it must start between 1 and {say(config, GLOBAL)}."
    elif increment < 1 or (train.global_batch_size - start) % increment:
        grows = train.global_batch_size - start
        yield (f"{say(config, RAMP)} cannot grow from {start} to {train.global_batch_size} by {increment} each time. Use an "
               f"increment that divides {grows}{': ' + either(divisors(grows)[-8:]) if grows else ''}.")
    unit = train.micro_batch_size * config.data_parallel_size
    if train.decrease_batch_size_if_needed:
        if start < unit:
            yield f"{say(config, RAMP)} starts below {unit}, one micro-batch on every rank: rounded down, it would be 0."
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
        yield f"{say(config, SCHEDULE)} and {say(config, RAMP)} both set how the batch grows. Give only one."
    if train.train_iters is not None:
        yield (f"{say(config, SCHEDULE)} with {say(config, ITERS)}: while the batch grows, an iteration has no fixed number "
               "of samples. Use --train-samples or --train-tokens.")
    if not config.model.seq_length:
        return
    try:
        steps = parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length)
    except ValueError as error:
        yield f"{say(config, SCHEDULE)} {error}."
        return
    if train.global_batch_size != steps[-1][1]:
        yield f"{say(config, SCHEDULE)} ends with {steps[-1][1]}, not with {say(config, GLOBAL)}. Remove {flag(GLOBAL)}."
    if not train.micro_batch_size or not config.data_parallel_size:
        return
    unit = train.micro_batch_size * config.data_parallel_size
    for size in dict.fromkeys(size for _, size in steps):
        if size < unit or size % unit and not train.decrease_batch_size_if_needed:
            yield (f"{say(config, SCHEDULE)}: {size} is not a multiple of {say(config, MICRO)} × {config.data_parallel_size} "
                   f"data-parallel ranks = {unit}. Use {neighbours(size, unit)}"
                   + (", or add --decrease-batch-size-if-needed." if size > unit else "."))


def length(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.train_iters is None and train.train_samples is None and train.train_tokens is None:
        yield f"missing: the length of training. Give {flag(ITERS)}, {flag(SAMPLES)} or {flag(TOKENS)}."
    elif train.train_iters is not None and train.train_samples is not None:
        yield f"{say(config, ITERS)} and {say(config, SAMPLES)} both set the length of training. Give only one."
        return
    first = _first_batch(config)
    if train.train_samples and first and train.train_samples < first:
        yield (f"{say(config, SAMPLES)} is less than one global batch of {first}: there would be no step. Use {flag(SAMPLES)} "
               f"{first} or more.")
    yield from _units(config)
    if config.optimizer.lr_warmup_fraction is not None:
        for path in ("optimizer.lr_warmup_iters", "optimizer.lr_warmup_samples", "optimizer.lr_warmup_tokens"):
            if config.get(path):
                yield (f"{say(config, 'optimizer.lr_warmup_fraction')} and {say(config, path)} both set the warm-up. "
                       "Give only "
                       "one.")


def _units(config: RunConfig) -> Iterator[str]:
    """The spans of the learning rate are in one unit: tokens, or that of the length of training."""
    train, rate = config.train, config.optimizer
    if rate.lr_decay_style.startswith("Warmup") and train.train_iters is None:           # reported by `learning_rate`
        return
    if counts_tokens(config):
        unit, why = "tokens", "the other spans of the learning rate are in tokens"
        if not rate.lr_decay_tokens and not train.train_tokens and rate.lr_decay_style != "constant":
            yield (f"{say(config, 'optimizer.lr_warmup_tokens')} without the end of the decay in tokens. Add "
                   f"{flag('optimizer.lr_decay_tokens')} or {flag(TOKENS)}.")
    elif train.train_iters is not None or train.train_samples is not None or train.train_tokens is not None:
        unit = "iters" if train.train_iters is not None else "samples"
        why = f"the length of training is in {'iterations' if unit == 'iters' else 'samples'}" if not train.train_tokens else (
            f"there is no {flag(ITERS)}" if unit == "samples" else f"there is {say(config, ITERS)}")
        if train.train_iters is None and train.train_samples is None and not rate.lr_decay_samples:
            yield (f"a learning rate in samples needs the end of its decay, since {say(config, TOKENS)} gives none in that "
                   f"unit. Add {flag('optimizer.lr_decay_samples')}, or use {flag('optimizer.lr_warmup_tokens')}.")
    else:
        return
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        for other in {"iters", "samples"} - {unit}:
            if config.get(path := f"optimizer.{name}_{other}"):
                yield f"{say(config, path)}, but {why}.{_in_unit(config, name, other, unit)}"


def _in_unit(config: RunConfig, name: str, other: str, unit: str) -> str:
    """Advice: the span under its flag of the other unit, with the number where it can be worked out."""
    if f"optimizer.{name}_{unit}" not in all_options():
        return f" Remove it; {config.optimizer.lr_decay_style} cannot count {unit}."
    number, size, length = config.get(f"optimizer.{name}_{other}"), config.train.global_batch_size, config.model.seq_length
    in_samples = number if other == "samples" else number * size if size else None
    converted = {"samples": in_samples, "tokens": in_samples and length and in_samples * length,
                 "iters": size and in_samples and -(-in_samples // size)}[unit]
    shown = f" {converted}" if converted and not config.curriculum.curriculum_type else ""
    return f" Use {flag(f'optimizer.{name}_{unit}')}{shown}."


def _first_batch(config: RunConfig) -> int | None:
    train = config.train
    if train.step_batch_size_schedule:
        try:
            return parse_batch_steps(train.step_batch_size_schedule, config.model.seq_length or 1)[0][1]
        except ValueError:                                  # reported by `batch_schedule`
            return None
    return train.rampup_batch_size[0] if train.rampup_batch_size else train.global_batch_size


def learning_rate(config: RunConfig) -> Iterator[str]:
    rate, train = config.optimizer, config.train
    for path in ("optimizer.min_lr", "optimizer.lr_warmup_init"):
        if rate.lr is not None and config.get(path) > rate.lr:
            yield f"{say(config, path)} is above {say(config, 'optimizer.lr')}, which is the highest learning rate."
    tokens = counts_tokens(config)
    unit = "tokens" if tokens else "iters" if train.train_iters is not None else "samples"
    decay_path = f"optimizer.lr_decay_{unit}" if config.get(f"optimizer.lr_decay_{unit}") else f"train.train_{unit}"
    decay, warmup = config.get(decay_path), config.get(f"optimizer.lr_warmup_{unit}")
    final = None if tokens else config.get(f"optimizer.lr_wsd_decay_{unit}")
    if decay and warmup and warmup >= decay and rate.lr_decay_style != "constant" and rate.lr_decay_style != "WarmupLR":
        yield (f"{say(config, f'optimizer.lr_warmup_{unit}')} leaves nothing of {say(config, decay_path)} for the decay. "
               f"Use a warm-up below {decay}, or --lr-decay-style constant.")
    if rate.lr_decay_style == "WSD" and tokens:
        yield (f"{say(config, 'optimizer.lr_decay_style')} has no final phase in tokens. Set its spans with "
               f"{flag('optimizer.lr_decay_samples')}, {flag('optimizer.lr_warmup_samples')} and "
               f"{flag('optimizer.lr_wsd_decay_samples')}.")
    elif rate.lr_decay_style == "WSD" and decay:
        if not final:
            yield f"--lr-decay-style WSD needs the length of its last phase. Add {flag(f'optimizer.lr_wsd_decay_{unit}')}."
        elif final + warmup > decay:
            yield (f"{say(config, f'optimizer.lr_wsd_decay_{unit}')} and a warm-up of {warmup} are longer than "
                   f"{say(config, decay_path)} together. Use at most {max(decay - warmup, 0)}.")
    elif final and rate.lr_decay_style != "WSD":
        yield (f"{say(config, f'optimizer.lr_wsd_decay_{unit}')} has no effect with "
               f"{say(config, 'optimizer.lr_decay_style')}. Remove it, or use --lr-decay-style WSD.")
    if rate.lr_warmup_style == "log" and not rate.lr_decay_style.startswith("Warmup"):
        yield (f"{say(config, 'optimizer.lr_warmup_style')} has no effect with {say(config, 'optimizer.lr_decay_style')}, "
               "whose warm-up is linear. Remove it, or use --lr-decay-style WarmupLR, WarmupDecayLR or WarmupCosineLR.")
    if rate.lr_decay_style.startswith("Warmup"):
        yield from _deepspeed_style(config)


def _deepspeed_style(config: RunConfig) -> Iterator[str]:
    """DeepSpeed's schedulers count steps."""
    named = next((path for path in ("optimizer.lr_decay_tokens", "optimizer.lr_warmup_tokens", SAMPLES, TOKENS)
                  if config.get(path)), None)
    if named is not None and (named.startswith("optimizer.") or config.train.train_iters is None):
        unit = "samples" if named == SAMPLES else "tokens"
        yield (f"{say(config, 'optimizer.lr_decay_style')} counts steps, but {say(config, named)} counts {unit}. Use "
               f"{flag(ITERS)} and spans in iterations.")


def weight_decay(config: RunConfig) -> Iterator[str]:
    optimizer = config.optimizer
    ends = [path for path in ("optimizer.start_weight_decay", "optimizer.end_weight_decay") if config.get(path) is not None]
    if optimizer.weight_decay_incr_style == "constant" and ends:
        yield (f"{' and '.join(say(config, path) for path in ends)} would have no effect, because the weight decay is "
               "constant. Add --weight-decay-incr-style linear or cosine, or give only --weight-decay.")
    elif optimizer.weight_decay_incr_style != "constant" and len(ends) < 2:
        yield (f"{say(config, 'optimizer.weight_decay_incr_style')} needs its first and last value. Give --start-weight-decay "
               "and --end-weight-decay.")


def number_format(config: RunConfig) -> Iterator[str]:
    if config.optimizer.fp16 and config.optimizer.bf16:
        yield (f"{say(config, 'optimizer.fp16')} and {say(config, 'optimizer.bf16')}: weights have one dtype. Give only one; "
               "bf16 needs no loss scaling.")
    elif not config.optimizer.fp16 and config.optimizer.loss_scale is not None:
        yield f"{say(config, 'optimizer.loss_scale')} has no effect without --fp16: only fp16 scales the loss. Remove it."
    if config.optimizer.min_loss_scale > config.optimizer.initial_loss_scale:
        yield f"{say(config, 'optimizer.min_loss_scale')} is above {say(config, 'optimizer.initial_loss_scale')}."


def corpus(config: RunConfig) -> Iterator[str]:
    data = config.data
    paths = [path for path in ("data.train_data_path", "data.valid_data_path", "data.test_data_path") if config.get(path)]
    given = [say(config, path) for path in (("data.mock_data",) if data.mock_data else ()) + (
        ("data.data_path",) if data.data_path else ()) + tuple(paths[:1]) + tuple(
        path for path in ("data.data_args_path", "data.per_split_data_args_path") if config.get(path))]
    if not given and not config.plan.is_dry:                          # a plan can come before its data
        yield ("missing: the data. Give --data-path PREFIX, or --train-data-path and so on for each split, or --mock-data to "
               "train on random tokens.")
    elif len(given) > 1:
        yield (f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} specify the data. Give only one"
               f"{'; --mock-data as a flag replaces the others' * data.mock_data}.")
    if data.split is not None and not data.is_divided_by_split:
        yield (f"{say(config, 'data.split')} divides a --data-path, and there is none. Remove it"
               f"{', because each split has its own path' if paths or data.per_split_data_args_path else ''}.")
    elif data.split is not None and not _is_split(data.split):
        yield (f"{say(config, 'data.split')} is not a list of up to three proportions, none negative and not all zero. Use "
               "for instance 969,30,1, or 98,2,0 for no test set.")
    if paths and not data.train_data_path:
        yield f"{say(config, paths[0])} without --train-data-path: there is nothing to train on."
    words = next(filter(None, (data.data_path, data.train_data_path)), ())
    if data.blend_weights == "epochs" and (data.mock_data or words and not _is_number(words[0])):
        yield (f"{say(config, 'data.blend_weights')} without weights before the prefixes, which are the numbers of "
               "epochs. Add them.")
    if given and not data.mock_data and data.tokenizer_type is None:
        yield "missing: --tokenizer-type, the tokenizer that the corpus was tokenized with (NullTokenizer for bare ids)."
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        yield f"missing: --vocab-size. {say(config, 'data.tokenizer_type')} has no vocabulary file to read it from."


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


def _is_split(text: str) -> bool:
    """Up to three numbers between commas, blanks or slashes; as `data/loading/data_paths.py` reads them."""
    numbers = re.split(r"[\s,/]+", text.strip(" ,/"))
    return (len(numbers) <= 3 and all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in numbers)
            and any(float(n) for n in numbers))


def checkpoints(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.overwrite_save and config.checkpoint.save is None:
        yield f"{say(config, 'checkpoint.overwrite_save')} without --save: there is no folder to save in. Add --save DIR."
    for path in ("checkpoint.no_load_optim", "checkpoint.finetune", "checkpoint.exit_on_missing_checkpoint"):
        if config.get(path) and config.checkpoint.load is None:
            yield f"{say(config, path)} without --load: there is nothing to load. Add --load DIR, or remove it."


def planning(config: RunConfig) -> Iterator[str]:
    for path, least in (("plan.world_size", None), ("plan.rank", 0)):
        if config.get(path) != least and not config.plan.is_dry:
            yield f"{say(config, path)}: in a real run the launcher sets it. Remove it, or add --dry-run to plan such a run."
    if config.plan.is_dry and config.plan.rank >= config.world_size:
        yield (f"{say(config, 'plan.rank')} is not one of {config.world_size} rank{'s' * (config.world_size > 1)}. Use "
               f"{flag('plan.rank')} {either(range(min(config.world_size, 2)))}"
               f"{f' … {config.world_size - 1}' * (config.world_size > 2)}, or a larger --world-size.")


def recomputation(config: RunConfig) -> Iterator[str]:
    train = config.train
    for path in ("train.recompute_method", "train.recompute_num_layers"):
        if config.get(path) is not None and train.recompute_granularity != "full":
            yield f"{say(config, path)} has no effect without --recompute-granularity full. Add that, or remove it."
    if train.recompute_method == "uniform" and (train.recompute_num_layers or 1) > 1:
        yield (f"{say(config, 'train.recompute_num_layers')} with --recompute-method uniform: layers are recomputed one by "
               "one. Use 1, or --recompute-method block, which recomputes that many layers of each stage.")
    if train.recompute_method == "block" and train.recompute_num_layers is None:
        yield "--recompute-method block needs the number of layers. Add --recompute-num-layers N."


def traces(config: RunConfig) -> Iterator[str]:
    steps = config.logging.trace_steps
    if steps and config.logging.trace is None:
        yield f"{say(config, 'logging.trace_steps')} without --trace: nothing is recorded. Add --trace DIR, or remove it."
    elif steps and steps[0] > steps[1]:
        yield f"{say(config, 'logging.trace_steps')} ends before it begins. Give the first step, then the last."


RUN_RULES = (batch, batch_ramp, batch_schedule, length, learning_rate, weight_decay, number_format, corpus, checkpoints,
             recomputation, traces, planning)
