"""From DeepSpeed's JSON, a dict or a file, to the `RunConfig` of an engine.

The keys, their meaning and their errors are those of `--deepspeed_config`. What belongs to a program that owns the model and
the loop is refused by name. There are no flags, so a problem is told in the words of the JSON, and "auto" has nothing to be
taken from. Where the JSON is silent DeepSpeed's own defaults hold, not Megatron's: no weight decay, a constant learning
rate, a first loss scale of 2**16.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import RunConfig, Source
from ..config.deepspeed import load_json, read_block
from ..config.merge import merge
from ..config.problems import reject
from ..config.run import all_options
from ..config.say import neighbours
from ..config.setting import Setting
from ..errors import ConfigError

BATCH = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps")
TAKEN = (*BATCH, "logging.log_interval")                # beside all of the sections `optimizer` and `zero`
SECTIONS = ("optimizer.", "zero.")
# A constant rate has no span, but a ramp wants one.
DEFAULTS = {"optimizer.weight_decay": 0.0, "optimizer.lr_decay_style": "constant", "optimizer.lr_decay_iters": 1,
            "optimizer.initial_loss_scale": 2.0**16, "logging.log_interval": 0}
# Keys of the JSON for options that have none of their own.
KEYS = {"optimizer.lr_decay_iters": "scheduler.params.total_num_steps", "optimizer.loss_scale": "fp16.loss_scale",
        "optimizer.initial_loss_scale": "fp16.initial_scale_power", "optimizer.optimizer": "optimizer.type",
        "optimizer.lr_warmup_iters": "scheduler.params.warmup_num_steps",
        "optimizer.lr_warmup_init": "scheduler.params.warmup_min_lr"}
ENDS = ("WarmupDecayLR", "WarmupCosineLR")              # schedulers that must know where the decay ends


def read_settings(config: Mapping[str, Any] | str | os.PathLike, data_parallel_size: int) -> RunConfig:
    """Raises one ConfigError with everything that is wrong. Says nothing of a model: `config.model` stays empty."""
    name, block = _block_of(config)
    settings = read_block(name, block)
    strange = [s for s in settings if s.path not in TAKEN and not s.path.startswith(SECTIONS)]
    reject([*_autos(name, block), *(f"{s.source} is refused here: it belongs to pretrain_gpt.py, where the loop and the log "
                                    "are not yours. Remove it." for s in strange)])
    scripted = [Setting(path, value, Source("script", "default")) for path, value in DEFAULTS.items()]
    merged = merge(settings, [], data_parallel_size, scripted)
    reject([problem for rule in (_batch, _rate, _format, _stage) for problem in rule(merged)])
    return merged


def _block_of(config: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "config", config
    if isinstance(config, str | os.PathLike):
        return os.fspath(config), load_json(os.fspath(config), "config")
    raise ConfigError(f"config is {type(config).__name__}: give a dict of DeepSpeed's keys, or the path of a JSON file.")


def _autos(name: str, block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in block.items():
        if isinstance(value, Mapping):
            yield from _autos(name, value, f"{prefix}{key}.")
        elif value == "auto":
            yield (f'{name}: "{prefix}{key}" is "auto", which means: take it from the flags. There are none here. Write the '
                   "value, or leave the key out.")


def _batch(config: RunConfig) -> Iterator[str]:
    """train_batch_size = micro-batch × accumulation steps × data-parallel ranks."""
    ranks = config.data_parallel_size
    total, micro, steps = (config.get(path) for path in BATCH)
    words = ", ".join(_say(config, path) for path in BATCH if config.get(path) is not None)
    if total is None and micro is None:
        yield (f'missing: the size of a batch{f" (there is {words})" if words else ""}. Give "train_batch_size" or '
               '"train_micro_batch_size_per_gpu".')
    elif micro is None or total != micro * ranks * (steps or total // (micro * ranks) or 1):
        unit = ranks * (micro or 1) * (steps or 1)
        yield (f"{words} on {ranks} data-parallel rank{'s' * (ranks > 1)} do not work out: train_batch_size must be "
               f"train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks, a multiple of {unit} here. Use "
               f'"train_batch_size" {neighbours(total, unit)}, or leave out one of the three.')


def _rate(config: RunConfig) -> Iterator[str]:
    rate = config.optimizer
    if rate.lr is None:
        yield ('missing: the learning rate. Give "optimizer": {"type": "AdamW", "params": {"lr": …}}, or '
               '"scheduler.params.warmup_max_lr".')
    elif rate.lr_warmup_init > rate.lr:
        yield f"{_say(config, 'optimizer.lr_warmup_init')} is above {_say(config, 'optimizer.lr')}, the highest learning rate."
    if rate.lr_decay_style in ENDS:
        told = config.sources["optimizer.lr_decay_iters"].kind == "deepspeed"
        if not told:
            yield f'missing: "scheduler.params.total_num_steps", the step at which {rate.lr_decay_style} ends.'
        elif rate.lr_warmup_iters >= rate.lr_decay_iters:
            yield (f"{_say(config, 'optimizer.lr_warmup_iters')} leaves nothing of "
                   f"{_say(config, 'optimizer.lr_decay_iters')} for the decay. Use fewer steps of warm-up.")


def _format(config: RunConfig) -> Iterator[str]:
    o = config.optimizer
    if o.fp16 and o.bf16:
        yield "the blocks fp16 and bf16 are both enabled, and weights have one format. Keep one; bf16 needs no loss scaling."
    if o.fp16 and o.min_loss_scale > o.initial_loss_scale:
        yield f"{_say(config, 'optimizer.min_loss_scale')} is above {_say(config, 'optimizer.initial_loss_scale')}."
    if o.gradient_dtype not in ("float32", o.params_dtype):
        yield (f"{_say(config, 'optimizer.main_grads_dtype')}, but the weights are {o.params_dtype}: gradients accumulate in "
               'fp32 or in the format of the weights. Use "fp32".')


def _stage(config: RunConfig) -> Iterator[str]:
    for path in ("zero.param_persistence_threshold", "zero.prefetch_bucket_size"):
        if config.get(path) is not None and config.zero.stage < 3:
            yield f"{_say(config, path)} tunes ZeRO stage 3, but {_say(config, 'zero.stage')}. Remove it, or use stage 3."


def _say(config: RunConfig, path: str) -> str:
    """`ds.json train_batch_size is 33`, or the key with its default."""
    source, value = config.sources.get(path), config.get(path)
    if source is None or source.kind == "script":
        return f'"{KEYS.get(path) or all_options()[path].json}" is {value} (default)'
    return f"{source} is {value}"
