"""From DeepSpeed's JSON, a dict or a file, to the `RunConfig` of an engine.

The keys, their meaning and their errors are those of `--deepspeed_config`. Keys of a program that owns the
model and the loop are refused by name. An engine has no flags, so messages name keys of the JSON; a value
that is still "auto" here could not be filled.

Keys that the JSON omits have DeepSpeed's defaults, not Megatron's: no weight decay, no momentum, a constant
learning rate, a first loss scale of 2**16.

Values that are "auto" are filled as Hugging Face's Trainer fills them, from the program's arguments and the
model:

    batch sizes, clipping, learning rate, …    arguments, under the names of Hugging Face's TrainingArguments
    numbers of steps                           arguments, else epochs over the training data
    bucket sizes of ZeRO                       the hidden size h of the model's config: h², 0.9 h² and 10 h
"""

import copy
import json
import math
import os
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...config import RunConfig, Source
from ...config.messages import problems_of
from ...config.rules.chosen import layout_rules
from ...config.rules.need import NEED_RULES
from ...config.rules.optimizer import optimizer_options
from ...config.rules.training import batch, learning_rate, number_format
from ...config.run import all_options
from ...config.sources.combine import merge
from ...config.sources.reading import Setting, reject
from ...errors import ArgumentError, ConfigError
from ...zero.unused import Rule
from ..config.deepspeed_json import auto_keys, load_json, with_autos
from ..config.deepspeed_spellings import loads
from ..config.targets import LEFT_OUT, reading_for
from ..config.unsupported import answer_to_key
from .agreed_tag import KEY as TAG_RULE
from .agreed_tag import tag_rule
from .decay_default import with_decay_default
from .forward_profile import BLOCK as PROFILE
from .forward_profile import profile_wish
from .gradient_sum import KEY as SUMS
from .gradient_sum import sums_gradients
from .log_level import KEY as LOG_LEVEL
from .log_level import log_level_of
from .number_formats import formats_of
from .pipeline_module import interval_of
from .tensor_parallel_keys import division_keys, without_division

# A constant rate has no span, but `make_learning_rate` needs one.
DEFAULTS = {
    "optimizer.weight_decay": 0.0,
    "optimizer.lr_decay_style": "constant",
    "optimizer.lr_decay_iters": 1,
    "optimizer.initial_loss_scale": 2.0**16,
    "logging.log_interval": 0,
}
# DeepSpeed's learning rates of optimizers whose "params" have none, by the type in lower case.
RATES = {
    "adam": 1e-3,
    "adamw": 1e-3,
    "fusedadam": 1e-3,
    "lamb": 1e-3,
    "lion": 1e-3,
    "sgd": 1e-3,
    "onebitadam": 1e-3,
    "zerooneadam": 1e-3,
    "onebitlamb": 1e-3,
    "adagrad": 1e-2,
}
# The key for the loader that `initialize` makes of training_data.
DROP_LAST = "dataloader_drop_last"
# of "zero_optimization"
UNUSED = "ignore_unused_parameters"
LEAVES = "leaf_module"
# The default, as accelerate writes it; an engine by itself never prints.
NEVER_PRINTS = (
    "steps_per_print",
    math.inf,
)
# Keys of the JSON for options that have none of their own.
KEYS = {
    "optimizer.optimizer": "optimizer.type",
    "optimizer.adam_eps": "optimizer.params.eps",
    "optimizer.adagrad_eps": "optimizer.params.eps",
    "optimizer.lr_decay_iters": "scheduler.params.total_num_steps",
    "optimizer.loss_scale": "fp16.loss_scale",
    "optimizer.initial_loss_scale": "fp16.initial_scale_power",
    "optimizer.lr_decay_style": "scheduler.type",
    "optimizer.lr_warmup_iters": "scheduler.params.warmup_num_steps",
    "optimizer.min_lr": "scheduler.params.cos_min_ratio",
    "logging.tensorboard_dir": "tensorboard.output_path",
    "logging.csv_monitor_dir": "csv_monitor.output_path",
    "optimizer.lr_warmup_init": "scheduler.params.warmup_min_lr",
}
# Schedulers that must know where the decay ends.
ENDS = (
    "WarmupDecayLR",
    "WarmupCosineLR",
)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, so that DeepSpeed's launch commands work unchanged."""
    group = parser.add_argument_group(
        "DeepSpeed", "flags of programs that were written for DeepSpeed"
    )
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="Has no effect of its own: programs read it to choose between two loops.",
    )
    group.add_argument(
        "--deepspeed_config",
        type=str,
        default=None,
        help="Path of the JSON with DeepSpeed's keys.",
    )
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help=SUPPRESS)
    return parser


def config_of(
    args: Any, config: Any, config_params: Any
) -> Mapping[str, Any] | str | os.PathLike:
    """Return the one of config, args.deepspeed_config and their former names. Raises ConfigError."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(
            f"the configuration is given {len(named)} times, as {' and as '.join(named)}. Keep "
            "one of them."
        )
    if not named:
        raise ArgumentError(
            "there is no configuration. Give config=, a dict of DeepSpeed's keys or the path "
            "of a JSON file, or args= with --deepspeed_config (see "
            "megatron_ds.add_config_arguments)."
        )
    return given[named[0]]


def read_settings(
    config: Mapping[str, Any] | str | os.PathLike,
    data_parallel_size: int,
    client_lr: float | None = None,
    name: str | None = None,
) -> RunConfig:
    """Return the settings of an engine; `model` stays at its defaults. Raises one ConfigError with all problems.

    client_lr  the learning rate of an optimizer that is not the JSON's
    name       of the config in messages
    """
    # Keys of the engine itself.
    found, block = block_of(config)
    name = name or found
    drops_last(name, block)
    unused_rule(name, block)
    profile_wish(name, block)
    sums_gradients(name, block)
    log_level_of(name, block)
    interval_of(name, block)
    tag_rule(name, block)
    division_keys(name, block)
    block = with_decay_default(_without_engine_keys(name, block))
    # Keys that are options, and "auto" values.
    reading = reading_for(block, "engine", name)
    settings = reading.settings_or_error()
    reject(list(_autos(name, block)))
    # Defaults of DeepSpeed below them.
    rate = _rate_of(block) if client_lr is None else client_lr or 1.0
    defaults = DEFAULTS | ({} if rate is None else {"optimizer.lr": rate})
    scripted = [
        Setting(path, value, Source("script", "default"))
        for path, value in defaults.items()
    ]
    merged = merge(settings, [], data_parallel_size, scripted)
    reject(list(_missing(merged)))
    reject(list(_broken(merged)))
    return merged.with_notes(reading.without_effect)


def _rate_of(block: Mapping[str, Any]) -> float | None:
    """DeepSpeed's learning rate for a JSON that has none; any number where it has no optimizer."""
    optimizer = block.get("optimizer")
    if optimizer is None:
        return 1.0
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    return RATES.get(str(kind).lower())


def block_of(config: Any) -> tuple[str, Mapping[str, Any]]:
    """(its name in messages, its keys) of a dict, a path, or the text of a JSON block."""
    if isinstance(config, Mapping):
        return "config", config
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            return "config", loads(config)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"config is a text that begins with {{ but is not JSON: {error.msg.lower()} at line "
                f"{error.lineno}. Give a dict, the path of a JSON file, or valid JSON."
            ) from None
    if isinstance(config, str | os.PathLike):
        return os.fspath(config), load_json(os.fspath(config), "config")
    raise ConfigError(
        f"config is {type(config).__name__}: give a dict of DeepSpeed's keys, or the path of a "
        "JSON file."
    )


def drops_last(name: str, block: Mapping[str, Any]) -> bool:
    """Return the value of DROP_LAST. Raises ConfigError where it is neither true nor false."""
    value = block.get(DROP_LAST, False)
    if not isinstance(value, bool):
        raise ConfigError(f'{name}: "{DROP_LAST}" is {value!r}: it is true or false.')
    return value


def unused_rule(name: str, block: Mapping[str, Any]) -> Rule:
    """Return what an update does with parameters that a rank has not used. Raises ConfigError for a wrong value."""
    zero = block.get("zero_optimization")
    value = zero.get(UNUSED, True) if isinstance(zero, Mapping) else True
    if not isinstance(value, bool):
        raise ConfigError(
            f'{name}: "zero_optimization.{UNUSED}" is {value!r}: it is true or false.'
        )
    return "zeros" if value else "refused"


def _without_engine_keys(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block without the keys that the engine reads itself. Raises ConfigError for a wrong value."""
    _, block = formats_of(name, without_division(block))
    rest = {
        key: value
        for key, value in block.items()
        if key not in (DROP_LAST, PROFILE, SUMS, LOG_LEVEL)
        and (key, value) != NEVER_PRINTS
    }
    if isinstance(zero := rest.get("zero_optimization"), Mapping):
        rest["zero_optimization"] = {
            key: value for key, value in zero.items() if key not in (UNUSED, LEAVES)
        }
    if isinstance(checkpoint := rest.get("checkpoint"), Mapping):
        rest["checkpoint"] = {
            key: value for key, value in checkpoint.items() if key != TAG_RULE
        }
    return rest


def _autos(name: str, block: Mapping[str, Any]) -> Iterator[str]:
    for key in auto_keys(block):
        source = source_of(key)
        answer = answer_to_key(key)
        if key.partition(".")[0] in LEFT_OUT or answer and answer[1].accepts("auto"):
            continue
        reason = (
            f"no value for it was given as {source}"
            if source
            else "nothing fills this key"
        )
        yield f'{name}: "{key}" is "auto", and {reason}. Write the value, or leave the key out.'


def _missing(config: RunConfig) -> Iterator[str]:
    rate = config.optimizer
    if config.train.global_batch_size is None and config.train.micro_batch_size is None:
        yield 'missing: the size of a batch. Give "train_batch_size" or "train_micro_batch_size_per_gpu".'
    if rate.lr is None:
        yield (
            'missing: the learning rate. Give "optimizer": {"type": "AdamW", "params": {"lr": …}}, or '
            '"scheduler.params.warmup_max_lr".'
        )
    if (
        rate.lr_decay_style in ENDS
        and config.sources["optimizer.lr_decay_iters"].kind == "script"
    ):
        yield f'missing: "scheduler.params.total_num_steps", the step at which {rate.lr_decay_style} ends.'


def _broken(config: RunConfig) -> Iterator[str]:
    """Problems by the rules of training scripts, except for the length of training, which is the user's."""
    config = config.with_values({"train.train_iters": 1}, Source("script", "default"))
    rules = (
        *NEED_RULES,
        batch,
        learning_rate,
        optimizer_options,
        number_format,
        *layout_rules(config),
    )
    yield from map(in_words_of_json, problems_of(rules, config))


def in_words_of_json(problem: str) -> str:
    """Return a problem's message with keys of the JSON in place of flags."""
    keys = {
        option.flag: option.json or KEYS.get(path)
        for path, option in all_options().items()
    }
    key_or_flag = lambda found: (
        f'"{keys[found[0]]}"' if keys.get(found[0]) else found[0]
    )
    return re.sub(r"--[a-z0-9-]+", key_or_flag, problem)


# ---------------------------------------------------------------------------------------------------- "auto"
# Arguments that a key is taken from: the first that `args` has.
NAMES: Mapping[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "micro_batch_size",
    ),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm", "gradient_clipping"),
    "optimizer.params.lr": ("learning_rate", "lr"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
}
STEPS = ("max_steps", "max_train_steps", "num_training_steps")
WARMUP = ("warmup_steps", "num_warmup_steps")
EPOCHS = ("num_train_epochs", "epochs")
HIDDEN_SIZE = "the model's config.hidden_size"


@dataclass(frozen=True)
class Sources:
    """Objects that supply values for "auto" in the JSON.

    args     any object with attributes
    samples  number of training samples on all ranks; None without training data
    """

    args: Any
    model: nn.Module
    data_parallel_size: int
    samples: int | None = None

    def argument(self, *names: str) -> Any | None:
        """Return the first of these arguments that there is."""
        return next(
            (
                value
                for name in names
                if (value := getattr(self.args, name, None)) is not None
            ),
            None,
        )

    @property
    def hidden_size(self) -> int | None:
        """The hidden size in a model's config like that of Hugging Face; the largest of several."""
        config = getattr(self.model, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            sizes = getattr(part, "hidden_size", None) or getattr(
                part, "hidden_sizes", None
            )
            if sizes:
                return max(sizes) if isinstance(sizes, list | tuple) else sizes
        return None


def fill_autos(block: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Return a copy with a value for every "auto" that can be filled; those of stage 3 are left out at others."""
    filled: Mapping[str, Any] = copy.deepcopy(dict(block))
    zero = filled.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") != 3:
        kept = {
            key: value
            for key, value in zero.items()
            if value != "auto" or not key.startswith("stage3_")
        }
        filled = {**filled, "zero_optimization": kept}
    for _ in range(2):  # the second time with the batch sizes that the first has filled
        for key in auto_keys(filled):
            value = _value(key, filled, sources)
            if value is not None:
                filled = with_autos(filled, {key: value})
    return dict(filled)


def source_of(key: str) -> str | None:
    """Return what would fill a key, for messages; None where nothing does."""
    if key in DERIVED:
        return DERIVED[key][1]
    return f"args.{NAMES[key][0]}" if key in NAMES else None


def _value(key: str, block: Mapping[str, Any], sources: Sources) -> Any | None:
    if key in DERIVED:
        return DERIVED[key][0](block, sources)
    value = sources.argument(*NAMES.get(key, ()))
    if value is None and key in ("fp16.enabled", "bf16.enabled"):
        wanted = torch.float16 if key.startswith("fp16") else torch.bfloat16
        return all(p.dtype == wanted for p in sources.model.parameters())
    return value


def _accumulation(block: Mapping[str, Any], sources: Sources) -> int | None:
    """Return the argument, else the steps that follow from the two batch sizes."""
    total = block.get("train_batch_size")
    micro = block.get("train_micro_batch_size_per_gpu")
    once = micro * sources.data_parallel_size if isinstance(micro, int) else 0
    given = sources.argument(*NAMES["gradient_accumulation_steps"])
    if given or not isinstance(total, int) or not once or total % once:
        return given or None
    return total // once


def _train_batch(block: Mapping[str, Any], sources: Sources) -> int | None:
    micro = block.get("train_micro_batch_size_per_gpu")
    steps = block.get("gradient_accumulation_steps", 1)
    whole = isinstance(micro, int) and isinstance(steps, int)
    return micro * steps * sources.data_parallel_size if whole else None


def _betas(block: Mapping[str, Any], sources: Sources) -> list[float] | None:
    first = sources.argument("adam_beta1")
    second = sources.argument("adam_beta2")
    return None if first is None or second is None else [first, second]


def _total_steps(block: Mapping[str, Any], sources: Sources) -> int | None:
    steps = sources.argument(*STEPS)
    epochs = sources.argument(*EPOCHS)
    # TrainingArguments has -1 where the epochs count.
    if steps is not None and steps > 0:
        return steps
    batch = _train_batch(block, sources)
    if epochs is None or sources.samples is None or not batch:
        return None
    return math.ceil(epochs * max(1, math.ceil(sources.samples / batch)))


def _warmup_steps(block: Mapping[str, Any], sources: Sources) -> int | None:
    steps = sources.argument(*WARMUP)
    ratio = sources.argument("warmup_ratio")
    if steps is None or not steps and ratio:
        total = _total_steps(block, sources)
        return None if ratio is None or total is None else math.ceil(ratio * total)
    if 0 < steps < 1:  # a part of training, as newer TrainingArguments have it
        total = _total_steps(block, sources)
        return None if total is None else math.ceil(steps * total)
    return int(steps)


def _of_hidden_size(
    size: Callable[[int], int],
) -> Callable[[Mapping[str, Any], Sources], int | None]:
    return lambda block, sources: (
        None if sources.hidden_size is None else size(sources.hidden_size)
    )


# What takes more than a look at one argument: the function, and what it needs.
DERIVED: Mapping[str, tuple[Callable[[Mapping[str, Any], Sources], Any], str]] = {
    "gradient_accumulation_steps": (_accumulation, "args.gradient_accumulation_steps"),
    "train_batch_size": (_train_batch, "args.per_device_train_batch_size"),
    "optimizer.params.betas": (_betas, "args.adam_beta1 and args.adam_beta2"),
    "scheduler.params.warmup_min_lr": (lambda block, sources: 0.0, ""),
    "scheduler.params.total_num_steps": (
        _total_steps,
        "args.max_steps, or args.num_train_epochs and training_data",
    ),
    "scheduler.params.warmup_num_steps": (_warmup_steps, "args.warmup_steps"),
    "zero_optimization.reduce_bucket_size": (
        _of_hidden_size(lambda h: h * h),
        HIDDEN_SIZE,
    ),
    "zero_optimization.stage3_prefetch_bucket_size": (
        _of_hidden_size(lambda h: int(0.9 * h * h)),
        HIDDEN_SIZE,
    ),
    "zero_optimization.stage3_param_persistence_threshold": (
        _of_hidden_size(lambda h: 10 * h),
        HIDDEN_SIZE,
    ),
}
