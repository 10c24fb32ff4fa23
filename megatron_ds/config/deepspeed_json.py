"""A DeepSpeed JSON (`--deepspeed_config`) → settings.

Most keys are declared with their option (`option(json="gradient_clipping")`); keys that need arithmetic are
translated below. "auto" means: take the value from the flags. `unsupported.py` accepts or refuses keys that
have no option here, with the reason. In a block that is switched off (`"fp16": {"enabled": false, …}`) values
are ignored, but names are checked.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .answers import asks_for_nothing
from .config_files import JsonDocument, declared_keys, names, paths_of, text_of
from .deepspeed_data_efficiency import (
    CURRICULUM_KEYS,
    LTD,
    RANDOM_LTD_KEYS,
    random_ltd_is_off,
    translate_curriculum,
    translate_random_ltd,
)
from .option import Option, json_key, shown
from .reading import PartOf, Reading
from .suggest import near_key
from .unsupported import KEYS, answer_to_key

# Keys that the functions below translate.
TRANSLATED: Mapping[str, Option] = {
    "fp16.loss_scale": json_key(float, "`--loss-scale`; 0 is dynamic", at_least=0),
    "fp16.initial_scale_power": json_key(int, "`--initial-loss-scale`, 2 to this power"),
    "optimizer.type": json_key(str, "`--optimizer`: Adam and AdamW (both with decoupled weight decay), SGD"),
    "optimizer.params.betas": json_key(float, "`--adam-beta1`, `--adam-beta2`", is_list=True, count=2),
    "optimizer.params.max_grad_norm": json_key(float, "`--clip-grad`, like gradient_clipping", at_least=0),
    "zero_optimization.cpu_offload": json_key(bool, "`--offload-optimizer` cpu"),
    "zero_optimization.cpu_offload_params": json_key(bool, "`--offload-param` cpu"),
    "aio.thread_count": json_key(int, "`--nvme-threads`, like aio.intra_op_parallelism", at_least=1),
    "wandb.enabled": json_key(bool, "whether the block is used; the project is deepspeed unless given"),
    "tensorboard.enabled": json_key(bool, "whether the block is used"),
    "tensorboard.output_path": json_key(str, "`--tensorboard-dir`, together with the job name"),
    "tensorboard.job_name": json_key(str, "the directory under the output path"),
    "scheduler.type": json_key(str, "`--lr-decay-style`: WarmupLR, WarmupDecayLR, WarmupCosineLR"),
    "scheduler.params.warmup_type": json_key(
        str, "`--lr-warmup-style`; log unless given", choices=("log", "linear")),
    "scheduler.params.warmup_min_lr": json_key(float, "`--lr-warmup-init`"),
    "scheduler.params.warmup_max_lr": json_key(float, "`--lr`"),
    "scheduler.params.warmup_num_steps": json_key(int, "`--lr-warmup-iters`; 1000 unless given"),
    "scheduler.params.total_num_steps": json_key(int, "`--lr-decay-iters`"),
    "scheduler.params.warmup_min_ratio": json_key(
        float, "`--lr-warmup-init`, as a fraction of the learning rate"),
    "scheduler.params.cos_min_ratio": json_key(
        float, "`--min-lr`, as a fraction of the learning rate; 0.0001 unless given"),
    **CURRICULUM_KEYS, **RANDOM_LTD_KEYS}

ADAM_W_MODE = "optimizer.params.adam_w_mode"
OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}
_ADAM = {"lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "max_grad_norm"}
OPTIMIZER_PARAMS = {"adam": _ADAM, "sgd": {"lr", "momentum", "weight_decay", "max_grad_norm"}}
_WARMUP = {"warmup_num_steps", "warmup_type"}
SCHEDULER_PARAMS = {"WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
                    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
                    "WarmupCosineLR": _WARMUP | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"}}


def read_deepspeed(path: str) -> Reading:
    """The settings of a file, and its problems."""
    try:
        block = load_json(path, "--deepspeed_config")
    except ConfigError as error:
        reading = Reading(is_complete=False)
        reading.refuse(error)
        return reading
    return reading_of(path, block)


def reading_of(path: str, block: Mapping[str, Any]) -> Reading:
    """The settings and problems of a block. path: name of the block in messages."""
    document = JsonDocument(path, known_keys())
    _collect(document, "", block)
    for translate in (_declared, _fp16, _optimizer, _scheduler, _offload, _tensorboard, translate_curriculum,
                      translate_random_ltd):
        translate(document)
    return document


def auto_keys(block: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys whose value is "auto", in the order of the block."""
    found = []
    for name, value in block.items():
        if isinstance(value, Mapping):
            found += auto_keys(value, f"{prefix}{name}.")
        elif value == "auto":
            found.append(prefix + name)
    return found


def with_autos(block: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy of the block in which the "auto" of each dotted key of `values` is replaced by its value."""
    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_autos(value, values, f"{prefix}{name}.")
        return values.get(prefix + name, value) if value == "auto" else value

    return {name: replaced(name, value) for name, value in block.items()}


def _collect(document: JsonDocument, prefix: str, block: Mapping[str, Any], is_off: bool = False) -> None:
    """Store the values of known keys in the document, and accept or refuse the others.

    is_off: a block around this one is switched off
    """
    is_off = is_off or block.get("enabled") is False
    for name, value in block.items():
        key = prefix + name
        is_block = any(known.startswith(key + ".") for known in document.known) or key not in KEYS and any(
            known.startswith(key + ".") for known in KEYS)
        if is_block and isinstance(value, dict):
            _collect(document, key + ".", value, is_off)
        elif is_block:
            document.refuse(f'{document.path}: "{key}" should be a block {{ … }}, not {shown(value)}.')
        elif key in document.known:
            document.values[key] = value
        else:
            _answer(document, key, value, is_off)


def _answer(document: JsonDocument, key: str, value: Any, is_off: bool) -> None:
    """A key without an option. is_off: its block is switched off."""
    covered = answer_to_key(key)
    if covered is None:
        near = _near(key)
        document.refuse(f'{document.path}: unknown key "{key}"{near or "."} docs/flags.md lists all keys.')
        document.unread |= {option.path for known, option in declared_keys().items()
                            if repr(known) in near or repr(known.rpartition(".")[2]) in near}
    elif is_off or covered[1].accepts(value):
        if not is_off and not asks_for_nothing(value):
            document.without_effect[f"{document.path} {key}"] = covered[1].note
    else:
        document.refuse(f'{document.path}: "{key}" is not supported: {covered[1].refusal}')


def _declared(document: JsonDocument) -> None:
    """Keys that an option declares."""
    off = {block + "." for block in ("fp16", "bf16") if document.values.get(block + ".enabled",
                                                                            False) is False}
    off |= {"wandb."} if document.values.get("wandb.enabled", False) is not True else set()
    off |= {LTD + "."} if random_ltd_is_off(document.values) else set()
    off |= {ADAM_W_MODE} if _is_adamw(document) else set()
    for key, option in declared_keys().items():
        if not key.startswith(tuple(off)) or key.endswith(".enabled"):
            document.copy(key, option.path)


def _fp16(document: JsonDocument) -> None:
    if document.take("fp16.enabled") is False or "fp16.enabled" not in document.values:
        return
    document.copy("fp16.loss_scale", "optimizer.loss_scale", lambda scale: scale or None)    # 0 is dynamic
    document.copy("fp16.initial_scale_power", "optimizer.initial_loss_scale", lambda power: 2.0**power)


def _optimizer(document: JsonDocument) -> None:
    kind = document.take("optimizer.type")
    if kind is not None and kind.lower() not in OPTIMIZERS:
        document.refuse(f'{document.path}: "optimizer.type" is {kind!r}, which is not available. '
                        "Available: Adam, AdamW (both with decoupled weight decay), SGD.",
                        "optimizer.optimizer")
    elif kind is not None:
        name = OPTIMIZERS[kind.lower()]
        document.give("optimizer.optimizer", name, "optimizer.type")
        document.refuse_params("optimizer", kind, OPTIMIZER_PARAMS[name])
    if _is_adamw(document) and document.take(ADAM_W_MODE) is False:
        document.without_effect[f"{document.path} {ADAM_W_MODE}"] = (
            "the weight decay of the type AdamW is decoupled in any case, as in DeepSpeed")
    document.copy("optimizer.params.max_grad_norm", "optimizer.clip_grad")
    for number, beta in enumerate(document.take("optimizer.params.betas") or (), 1):
        document.give(f"optimizer.adam_beta{number}", beta, "optimizer.params.betas")


def _is_adamw(document: JsonDocument) -> bool:
    return str(document.values.get("optimizer.type")).lower() == "adamw"


def _scheduler(document: JsonDocument) -> None:
    """Missing keys have DeepSpeed's defaults: 1000 steps of warm-up, a cosine to 1e-4 of the maximum."""
    kind = document.take("scheduler.type")
    if kind is None:
        return
    if kind not in SCHEDULER_PARAMS:
        near = did_you_mean(kind, list(SCHEDULER_PARAMS)) or "."
        document.refuse(f'{document.path}: "scheduler.type" is {kind!r}, which is not available{near} '
                        f"Available: {', '.join(SCHEDULER_PARAMS)}; or use --lr-decay-style instead.")
        document.unread |= paths_of("scheduler.type")
        return
    document.refuse_params("scheduler", kind, SCHEDULER_PARAMS[kind])
    document.give("optimizer.lr_decay_style", kind, "scheduler.type")

    for name, option, default in (
            ("warmup_num_steps", "lr_warmup_iters", 1000), ("warmup_type", "lr_warmup_style", "log"),
            ("warmup_min_lr", "lr_warmup_init", None), ("warmup_max_lr", "lr", None),
            ("total_num_steps", "lr_decay_iters", None), ("warmup_min_ratio", "lr_warmup_init", None),
            ("cos_min_ratio", "min_lr", 1e-4)):
        key, path = f"scheduler.params.{name}", f"optimizer.{option}"
        meaning = partial(PartOf, "optimizer.lr") if name.endswith("_ratio") else lambda value: value
        if key in document.values:
            document.copy(key, path, meaning)
        elif default is not None and name in SCHEDULER_PARAMS[kind]:
            document.give(path, meaning(default), "scheduler.type, as DeepSpeed's default")


def _offload(document: JsonDocument) -> None:
    """Older names."""
    for key, path in (("cpu_offload", "zero.offload_optimizer"),
                      ("cpu_offload_params", "zero.offload_param")):
        if document.take(f"zero_optimization.{key}"):
            document.give(path, "cpu", f"zero_optimization.{key}")
    document.copy("aio.thread_count", "zero.nvme_threads")


def _tensorboard(document: JsonDocument) -> None:
    if document.take("wandb.enabled") and "wandb.project" not in document.values:
        document.give("logging.wandb_project", "deepspeed", "wandb.enabled")
    if not document.take("tensorboard.enabled"):
        return
    folder = document.take("tensorboard.output_path")
    if folder is None and document.values.get("tensorboard.output_path") != "auto":
        document.refuse(f'{document.path}: "tensorboard" is enabled without "output_path", the '
                        "directory for the events. Add it, or disable the block and use --tensorboard-dir.")
    elif folder is not None:
        folder = os.path.join(folder, document.take("tensorboard.job_name") or "DeepSpeedJobName")
        document.give("logging.tensorboard_dir", folder, "tensorboard.output_path")


def unique_keys(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """The `object_pairs_hook` that raises ConfigError for a key that occurs twice in a block.

    path: of the file, for messages
    """
    def block_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"{path}: {', '.join(map(repr, twice))} occurs twice in a block, and JSON "
                              "would keep only the last. Remove one.")
        return dict(pairs)

    return block_of


def load_json(path: str, flag: str) -> dict[str, Any]:
    """The block of a JSON file. flag: the flag that gave the file, for messages. Raises ConfigError."""
    text = text_of(path, flag)
    try:
        document = json.loads(text, object_pairs_hook=unique_keys(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: this is not JSON: {error.msg.lower()} at column "
                          f"{error.colno}.") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is not a configuration: its brackets are nested too deep.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} should contain one block {{ … }} of keys.")
    return document


def _near(key: str) -> str:
    """A suggestion: the key of an option of this name, a key of the same block, or any other key."""
    parent, _, name = key.rpartition(".")
    candidates = [*known_keys(), *KEYS]
    siblings = {other.rpartition(".")[2]: other.rpartition(".")[2] for other in candidates
                if other.rpartition(".")[0] == parent}
    by_option = {other: option.json for other, option in names().items() if option.json}
    direct = by_option.get(name) if not parent else None
    if direct:
        return f"; did you mean {direct!r}?"
    near = near_key(name, siblings) or (not parent and near_key(name, by_option))
    return near or near_key(key, {candidate: candidate for candidate in candidates})


@cache
def known_keys() -> Mapping[str, Option]:
    """All dotted keys that are read."""
    return {**declared_keys(), **TRANSLATED}
