"""A DeepSpeed JSON (`--deepspeed_config`) → settings.

Most keys are declared with their option (`option(json="gradient_clipping")`); those that need arithmetic are below. "auto"
means "take it from the flags". A key that would change nothing here is refused by name, with the reason (`refused.py`). Of a
block that is switched off (`"fp16": {"enabled": false, …}`) the values are left alone; the names are checked all the same.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from . import deepspeed_curriculum
from .coerce import coerce, shown
from .deepspeed_routing import LTD, ROUTING_KEYS, random_ltd_is_off, translate_random_ltd
from .option import Option
from .problems import reject
from .refused import REFUSED_KEYS
from .run import Source, all_options
from .setting import PartOf, Setting
from .yaml_file import text_of

# Keys that the functions below translate → what the value is.
_FLOAT, _INT, _TEXT = Option(None, "", kind=float), Option(None, "", kind=int), Option(None, "", kind=str)
TRANSLATED: Mapping[str, Option] = {
    "fp16.loss_scale": Option(None, "", kind=float, at_least=0), "fp16.initial_scale_power": _INT,
    "optimizer.type": _TEXT, "optimizer.params.betas": Option(None, "", kind=float, is_list=True, count=2),
    "tensorboard.enabled": Option(None, "", kind=bool), "tensorboard.output_path": _TEXT, "tensorboard.job_name": _TEXT,
    "scheduler.type": _TEXT, "scheduler.params.warmup_type": Option(None, "", kind=str, choices=("log", "linear")),
    "scheduler.params.warmup_min_lr": _FLOAT, "scheduler.params.warmup_max_lr": _FLOAT,
    "scheduler.params.warmup_num_steps": _INT, "scheduler.params.total_num_steps": _INT,
    "scheduler.params.warmup_min_ratio": _FLOAT, "scheduler.params.cos_min_ratio": _FLOAT, **deepspeed_curriculum.KEYS,
    **ROUTING_KEYS}

OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
OPTIMIZER_PARAMS = {"adam": {"lr", "betas", "eps", "weight_decay"}, "sgd": {"lr", "momentum", "weight_decay"}}
_WARMUP = {"warmup_num_steps", "warmup_type"}
SCHEDULER_PARAMS = {"WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
                    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
                    "WarmupCosineLR": _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"}}


def read_deepspeed(path: str) -> list[Setting]:
    """Raises one ConfigError with everything that is wrong."""
    return read_block(path, load_json(path, "--deepspeed_config"))


def read_block(path: str, block: Mapping[str, Any]) -> list[Setting]:
    """The settings of a file's block, however it came here; `path` names it in messages."""
    document = _Document(path)
    document.walk("", block)
    for translate in (_declared, _fp16, _optimizer, _scheduler, _tensorboard, deepspeed_curriculum.translate,
                      translate_random_ltd):
        translate(document)
    reject(document.wrong)
    return document.settings


class _Document:
    """The known keys of one file, {dotted key: value}, what they mean so far, and what is wrong with them."""

    def __init__(self, path: str):
        self.path = path
        self.keys: dict[str, Any] = {}
        self.settings: list[Setting] = []
        self.wrong: list[str] = []

    def walk(self, prefix: str, block: Mapping[str, Any]) -> None:
        """Collect the known keys; report the others."""
        for name, value in block.items():
            key = prefix + name
            is_block = any(known.startswith(key + ".") for known in known_keys())
            if is_block and isinstance(value, dict):
                self.walk(key + ".", value)
            elif is_block:
                self.wrong.append(f'{self.path}: "{key}" is a block {{ … }}, not {shown(value)}.')
            elif key in known_keys():
                self.keys[key] = value
            else:
                self.wrong.append(_unknown(self.path, key))

    def take(self, key: str, option: Option | None = None) -> Any:
        """The value of a key, None when it is absent, "auto", or wrong (which is noted)."""
        value = self.keys.get(key)
        if value is None or value == "auto":
            return None
        try:
            return coerce(option or known_keys()[key], value, f'{self.path}: "{key}"')
        except ConfigError as error:
            self.wrong.append(str(error))
            return None

    def give(self, path: str, value: Any, key: str) -> None:
        if value is not None:
            self.settings.append(Setting(path, value, Source("deepspeed", f"{self.path} {key}")))

    def is_auto(self, key: str) -> bool:
        return self.keys.get(key) == "auto"

    def refuse_params(self, block: str, kind: str, allowed: set[str]) -> None:
        """Report the `params` that a type does not have."""
        for key in self.keys:
            name = key.removeprefix(f"{block}.params.")
            if name != key and name not in allowed:
                self.wrong.append(f'{self.path}: "{key}" means nothing to the {block} {kind}, which has '
                                  f"{', '.join(sorted(allowed))}. Remove it.")


def _declared(document: _Document) -> None:
    """Keys that are an option each."""
    off = {block + "." for block in ("fp16", "bf16") if document.keys.get(block + ".enabled", False) is False}
    off |= {LTD + "."} if random_ltd_is_off(document.keys) else set()
    for key, option in declared_keys().items():
        if not key.startswith(tuple(off)) or key.endswith(".enabled"):
            document.give(option.path, document.take(key, option), key)


def _fp16(document: _Document) -> None:
    if document.take("fp16.enabled") is False or "fp16.enabled" not in document.keys:
        return
    document.give("optimizer.loss_scale", document.take("fp16.loss_scale") or None, "fp16.loss_scale")    # 0 is dynamic
    power = document.take("fp16.initial_scale_power")
    document.give("optimizer.initial_loss_scale", None if power is None else 2.0**power, "fp16.initial_scale_power")


def _optimizer(document: _Document) -> None:
    kind = document.take("optimizer.type")
    if kind is not None and kind.lower() not in OPTIMIZERS:
        document.wrong.append(f'{document.path}: "optimizer.type" is {kind!r}, which is not available. Available: Adam, AdamW '
                              "(both with decoupled weight decay), SGD.")
    elif kind is not None:
        name = OPTIMIZERS[kind.lower()]
        document.give("optimizer.optimizer", name, "optimizer.type")
        document.refuse_params("optimizer", kind, OPTIMIZER_PARAMS[name])
    for number, beta in enumerate(document.take("optimizer.params.betas") or (), 1):
        document.give(f"optimizer.adam_beta{number}", beta, "optimizer.params.betas")


def _scheduler(document: _Document) -> None:
    """DeepSpeed's own defaults where the file is silent: 1000 steps of logarithmic warm-up, cosine down to 1e-4 of the top."""
    kind = document.take("scheduler.type")
    if kind is None:
        return
    if kind not in SCHEDULER_PARAMS:
        near = did_you_mean(kind, list(SCHEDULER_PARAMS)) or "."
        document.wrong.append(f'{document.path}: "scheduler.type" is {kind!r}, which is not available{near} '
                              f"Available: {', '.join(SCHEDULER_PARAMS)}; or say --lr-decay-style instead.")
        return
    document.refuse_params("scheduler", kind, SCHEDULER_PARAMS[kind])
    document.give("optimizer.lr_decay_style", kind, "scheduler.type")

    def give(path: str, name: str, default: Any = None, meaning: Callable[[Any], Any] = lambda value: value) -> None:
        key = f"scheduler.params.{name}"
        value = document.take(key)
        if value is None and default is not None and name in SCHEDULER_PARAMS[kind] and key not in document.keys:
            document.give(path, meaning(default), "scheduler.type, as DeepSpeed's default")
        elif value is not None:
            document.give(path, meaning(value), key)

    give("optimizer.lr_warmup_iters", "warmup_num_steps", 1000)
    give("optimizer.lr_warmup_style", "warmup_type", "log")
    give("optimizer.lr_warmup_init", "warmup_min_lr")
    give("optimizer.lr", "warmup_max_lr")
    give("optimizer.lr_decay_iters", "total_num_steps")
    give("optimizer.lr_warmup_init", "warmup_min_ratio", None, lambda part: PartOf("optimizer.lr", part))
    give("optimizer.min_lr", "cos_min_ratio", 1e-4, lambda part: PartOf("optimizer.lr", part))


def _tensorboard(document: _Document) -> None:
    if not document.take("tensorboard.enabled"):
        return
    folder = document.take("tensorboard.output_path")
    if folder is None and not document.is_auto("tensorboard.output_path"):
        document.wrong.append(f'{document.path}: "tensorboard" is enabled without "output_path", the directory for the '
                              "events. Add it, or disable the block and write --tensorboard-dir.")
    elif folder is not None:
        folder = os.path.join(folder, document.take("tensorboard.job_name") or "DeepSpeedJobName")
        document.give("logging.tensorboard_dir", folder, "tensorboard.output_path")


def load_json(path: str, flag: str) -> dict[str, Any]:
    """The block that a file holds. flag: what named the file, for messages."""
    text = text_of(path, flag)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{path}: {', '.join(map(repr, twice))} stands twice in one block, and JSON would keep only "
                              "the last. Keep one.")
        return dict(pairs)

    try:
        document = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: this is not JSON: {error.msg.lower()} at column {error.colno}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is not a file of settings: its brackets are nested too deep.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no block {{ … }} of keys.")
    return document


def _unknown(path: str, key: str) -> str:
    for refused, reason in REFUSED_KEYS.items():
        if key == refused or key.startswith(refused + "."):
            return f'{path}: "{key}" is refused: {reason}'
    parent, _, name = key.rpartition(".")
    candidates = [*known_keys(), *REFUSED_KEYS]
    siblings = {other.rpartition(".")[2]: other for other in candidates if other.rpartition(".")[0] == parent}
    near = did_you_mean(name, list(siblings)) or did_you_mean(key, candidates)
    return f'{path}: unknown key "{key}"{near or "."} docs/flags.md lists the known ones, and the refused ones.'


@cache
def declared_keys() -> Mapping[str, Option]:
    """Dotted key → the option that declares it."""
    return {option.json: option for option in all_options().values() if option.json}


@cache
def known_keys() -> Mapping[str, Option]:
    return {**declared_keys(), **TRANSLATED}
