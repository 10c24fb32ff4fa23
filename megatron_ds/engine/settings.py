"""From DeepSpeed's JSON, a dict or a file, to the `RunConfig` of an engine.

The keys, their meaning and their errors are those of `--deepspeed_config`. What belongs to a program that owns the model and
the loop is refused by name. There are no flags, so a problem is told in the words of the JSON, and "auto" has nothing to be
taken from. Where the JSON is silent DeepSpeed's own defaults hold, not Megatron's: no weight decay, a constant learning
rate, a first loss scale of 2**16.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import RunConfig, Source
from ..config.deepspeed import load_json, read_block
from ..config.merge import merge
from ..config.problems import reject
from ..config.rules_layout import LAYOUT_RULES
from ..config.rules_run import batch, learning_rate, number_format
from ..config.run import all_options
from ..config.setting import Setting
from ..errors import ConfigError

# Beside all of the sections `optimizer` and `zero`.
TAKEN = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps", "logging.log_interval")
SECTIONS = ("optimizer.", "zero.")
# A constant rate has no span, but a ramp wants one.
DEFAULTS = {"optimizer.weight_decay": 0.0, "optimizer.lr_decay_style": "constant", "optimizer.lr_decay_iters": 1,
            "optimizer.initial_loss_scale": 2.0**16, "logging.log_interval": 0}
# Keys of the JSON for options that have none of their own.
KEYS = {"optimizer.lr_decay_iters": "scheduler.params.total_num_steps", "optimizer.loss_scale": "fp16.loss_scale",
        "optimizer.initial_loss_scale": "fp16.initial_scale_power", "optimizer.lr_decay_style": "scheduler.type",
        "optimizer.lr_warmup_iters": "scheduler.params.warmup_num_steps", "optimizer.min_lr": "scheduler.params.cos_min_ratio",
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
    reject(list(_missing(merged)))
    reject(list(_broken(merged)))
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


def _missing(config: RunConfig) -> Iterator[str]:
    rate = config.optimizer
    if config.train.global_batch_size is None and config.train.micro_batch_size is None:
        yield 'missing: the size of a batch. Give "train_batch_size" or "train_micro_batch_size_per_gpu".'
    if rate.lr is None:
        yield ('missing: the learning rate. Give "optimizer": {"type": "AdamW", "params": {"lr": …}}, or '
               '"scheduler.params.warmup_max_lr".')
    if rate.lr_decay_style in ENDS and config.sources["optimizer.lr_decay_iters"].kind == "script":
        yield f'missing: "scheduler.params.total_num_steps", the step at which {rate.lr_decay_style} ends.'


def _broken(config: RunConfig) -> Iterator[str]:
    """The rules that hold for a training script too. The length of training is the loop's affair; spans are in steps."""
    config = config.with_values({"train.train_iters": 1}, Source("script", "default"))
    for rule in (batch, learning_rate, number_format, *LAYOUT_RULES):
        yield from (in_words_of_json(problem) for problem in rule(config))


def in_words_of_json(problem: str) -> str:
    """A problem told in flags, with the keys of the JSON in their place."""
    keys = {option.flag: option.json or KEYS.get(path) for path, option in all_options().items()}
    return re.sub(r"--[a-z0-9-]+", lambda found: f'"{keys[found[0]]}"' if keys.get(found[0]) else found[0], problem)
