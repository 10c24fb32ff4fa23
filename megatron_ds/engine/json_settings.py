"""From DeepSpeed's JSON, a dict or a file, to the `RunConfig` of an engine.

The keys, their meaning and their errors are those of `--deepspeed_config`. Keys of a program that owns the
model and the loop are refused by name. An engine has no flags, so messages name keys of the JSON; a value
that is still "auto" here could not be filled (auto_values.py).

Keys that the JSON omits have DeepSpeed's defaults, not Megatron's: no weight decay, no momentum, a constant
learning rate, a first loss scale of 2**16.
"""

import json
import os
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import RunConfig, Source
from ..config.combine import merge
from ..config.deepspeed_json import auto_keys, load_json, reading_of
from ..config.layout_rules import LAYOUT_RULES
from ..config.reading import Setting, reject
from ..config.run import all_options
from ..config.training_rules import batch, learning_rate, number_format
from ..errors import ConfigError
from .auto_values import source_of

# Accepted options beside those of SECTIONS.
TAKEN = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps",
         "logging.log_interval", "logging.tensorboard_dir")
SECTIONS = ("optimizer.", "zero.")
# A constant rate has no span, but `make_learning_rate` needs one.
DEFAULTS = {"optimizer.weight_decay": 0.0, "optimizer.lr_decay_style": "constant",
            "optimizer.lr_decay_iters": 1, "optimizer.initial_loss_scale": 2.0**16,
            "optimizer.sgd_momentum": 0.0, "logging.log_interval": 0}
LOADER_KEYS = ("dataloader_drop_last",)               # of the loader that `initialize` makes of training_data
# Keys of the JSON for options that have none of their own.
KEYS = {"optimizer.lr_decay_iters": "scheduler.params.total_num_steps",
        "optimizer.loss_scale": "fp16.loss_scale",
        "optimizer.initial_loss_scale": "fp16.initial_scale_power",
        "optimizer.lr_decay_style": "scheduler.type",
        "optimizer.lr_warmup_iters": "scheduler.params.warmup_num_steps",
        "optimizer.min_lr": "scheduler.params.cos_min_ratio",
        "optimizer.lr_warmup_init": "scheduler.params.warmup_min_lr"}
ENDS = ("WarmupDecayLR", "WarmupCosineLR")              # schedulers that must know where the decay ends


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, so that DeepSpeed's launch commands work unchanged."""
    group = parser.add_argument_group("DeepSpeed", "flags of programs that were written for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true",
                       help="Has no effect of its own: programs read it to choose between two loops.")
    group.add_argument("--deepspeed_config", type=str, default=None,
                       help="Path of the JSON with DeepSpeed's keys.")
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help=SUPPRESS)
    return parser


def config_of(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | os.PathLike:
    """The configuration: `config`, its former name `config_params`, or the file that `args.deepspeed_config`
    names.

    Raises ConfigError where there is none, or more than one.
    """
    given = {"config": config, "config_params": config_params,
             "args.deepspeed_config": getattr(args, "deepspeed_config", None)}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"the configuration is given {len(named)} times, as {' and as '.join(named)}. Keep "
                          "one of them.")
    if not named:
        raise ConfigError("there is no configuration. Give config=, a dict of DeepSpeed's keys or the path "
                          "of a JSON file, or args= with --deepspeed_config (see "
                          "megatron_ds.add_config_arguments).")
    return given[named[0]]


def read_settings(config: Mapping[str, Any] | str | os.PathLike, data_parallel_size: int,
                  client_lr: float | None = None, name: str | None = None) -> RunConfig:
    """The settings of an engine; `model` stays at its defaults. Raises one ConfigError with everything that
    is wrong.

    client_lr  the learning rate of an optimizer that is not the JSON's
    name       of the config in messages
    """
    found, block = block_of(config)
    name = name or found
    drops_last(name, block)
    block = {key: value for key, value in block.items() if key not in LOADER_KEYS}
    reading = reading_of(name, block)
    settings = reading.settings_or_error()
    strange = [s for s in settings if s.path not in TAKEN and not s.path.startswith(SECTIONS)]
    reject([*_autos(name, block), *(
        f"{s.source} is refused here: it is for pretrain_gpt.py, which has its own loop and log. Remove it."
        for s in strange)])
    needs_no_lr = client_lr is not None or "optimizer" not in block
    defaults = DEFAULTS | ({"optimizer.lr": client_lr or 1.0} if needs_no_lr else {})
    scripted = [Setting(path, value, Source("script", "default")) for path, value in defaults.items()]
    merged = merge(settings, [], data_parallel_size, scripted)
    reject(list(_missing(merged)))
    reject(list(_broken(merged)))
    return merged.with_notes(reading.without_effect)


def block_of(config: Any) -> tuple[str, Mapping[str, Any]]:
    """(its name in messages, its keys) of a dict, a path, or the text of a JSON block."""
    if isinstance(config, Mapping):
        return "config", config
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return "config", _parsed(config)
    if isinstance(config, str | os.PathLike):
        return os.fspath(config), load_json(os.fspath(config), "config")
    raise ConfigError(f"config is {type(config).__name__}: give a dict of DeepSpeed's keys, or the path of a "
                      "JSON file.")


def drops_last(name: str, block: Mapping[str, Any]) -> bool:
    """The key "dataloader_drop_last". Raises ConfigError where it is neither true nor false."""
    value = block.get("dataloader_drop_last", False)
    if not isinstance(value, bool):
        raise ConfigError(f'{name}: "dataloader_drop_last" is {value!r}: it is true or false.')
    return value


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"config is a text that begins with {{ but is not JSON: {error.msg.lower()} at line "
            f"{error.lineno}. Give a dict, the path of a JSON file, or valid JSON.") from None


def _autos(name: str, block: Mapping[str, Any]) -> Iterator[str]:
    for key in auto_keys(block):
        source = source_of(key)
        reason = f"no value for it was given as {source}" if source else "nothing fills this key"
        yield f'{name}: "{key}" is "auto", and {reason}. Write the value, or leave the key out.'


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
    """Problems by the rules of training scripts, except for the length of training, which is the user's."""
    config = config.with_values({"train.train_iters": 1}, Source("script", "default"))
    for rule in (batch, learning_rate, number_format, *LAYOUT_RULES):
        yield from (in_words_of_json(problem) for problem in rule(config))


def in_words_of_json(problem: str) -> str:
    """A problem's message with keys of the JSON in place of flags."""
    keys = {option.flag: option.json or KEYS.get(path) for path, option in all_options().items()}
    key_or_flag = lambda found: f'"{keys[found[0]]}"' if keys.get(found[0]) else found[0]
    return re.sub(r"--[a-z0-9-]+", key_or_flag, problem)
