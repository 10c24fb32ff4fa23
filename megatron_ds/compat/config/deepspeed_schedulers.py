"""The block "scheduler" of a DeepSpeed JSON → settings. Parameters that are options by themselves, those of
OneCycle and LRRangeTest, are declared in `options/cycle.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...config.options.cycle import ONE_CYCLE, RANGE_TEST, CycleConfig
from ...config.options.option import Option, json_key
from ...config.options.option import options_of as options_in_class
from ...config.sources.config_files import JsonDocument, paths_of
from ...config.sources.reading import PartOf
from ...registry import did_you_mean

SCHEDULER_KEYS: Mapping[str, Option] = {
    "scheduler.type": json_key(
        str,
        "`--lr-decay-style`: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
    ),
    "scheduler.params.warmup_type": json_key(
        str, "`--lr-warmup-style`; log unless given", choices=("log", "linear")
    ),
    "scheduler.params.warmup_min_lr": json_key(float, "`--lr-warmup-init`"),
    "scheduler.params.warmup_max_lr": json_key(
        float, "`--lr`; with WarmupDecayLR 0.001 unless given"
    ),
    "scheduler.params.warmup_num_steps": json_key(
        int, "`--lr-warmup-iters`; 1000 unless given"
    ),
    "scheduler.params.total_num_steps": json_key(int, "`--lr-decay-iters`"),
    "scheduler.params.warmup_min_ratio": json_key(
        float, "`--lr-warmup-init`, as a fraction of the learning rate"
    ),
    "scheduler.params.cos_min_ratio": json_key(
        float, "`--min-lr`, as a fraction of the learning rate; 0.0001 unless given"
    ),
    "scheduler.params.cycle_min_lr": json_key(float, "`--min-lr`"),
    "scheduler.params.cycle_max_lr": json_key(float, "`--lr`"),
    "scheduler.params.lr_range_test_min_lr": json_key(
        float, "`--lr`; 0.001 unless given"
    ),
}

_WARMUP = {"warmup_num_steps", "warmup_type"}
_CYCLE = {option.name for option in options_in_class("cycle", CycleConfig)}
_TEST = {name for name in _CYCLE if "range_test" in name}
# Type → the parameters that it has.
SCHEDULER_PARAMS: Mapping[str, set[str]] = {
    "WarmupLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": _WARMUP | {"warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": _WARMUP
    | {"warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
    ONE_CYCLE: (_CYCLE - _TEST) | {"cycle_min_lr", "cycle_max_lr"},
    RANGE_TEST: _TEST | {"lr_range_test_min_lr"},
}
# (parameter, option, DeepSpeed's default where the option's is another)
TRANSLATIONS = (
    ("warmup_num_steps", "lr_warmup_iters", 1000),
    ("warmup_type", "lr_warmup_style", "log"),
    ("warmup_min_lr", "lr_warmup_init", None),
    ("warmup_max_lr", "lr", None),
    ("total_num_steps", "lr_decay_iters", None),
    ("warmup_min_ratio", "lr_warmup_init", None),
    ("cos_min_ratio", "min_lr", 1e-4),
    ("cycle_min_lr", "min_lr", None),
    ("cycle_max_lr", "lr", None),
    ("lr_range_test_min_lr", "lr", 1e-3),
)
DECAY_DEFAULT = 1e-3  # of WarmupDecayLR's warmup_max_lr
RATE = "optimizer.lr"
OF_OPTIMIZER = "optimizer.params.lr"


def translate_scheduler(document: JsonDocument) -> None:
    """Translate the block into settings and problems."""
    kind = document.take("scheduler.type")
    if kind is None:
        return
    if kind not in SCHEDULER_PARAMS:
        near = did_you_mean(kind, list(SCHEDULER_PARAMS)) or "."
        document.refuse(
            f'{document.path}: "scheduler.type" is {kind!r}, which is not available{near} '
            f"Available: {', '.join(SCHEDULER_PARAMS)}; or use --lr-decay-style instead."
        )
        document.unread |= paths_of("scheduler.type")
        return
    document.refuse_params("scheduler", kind, SCHEDULER_PARAMS[kind])
    document.give("optimizer.lr_decay_style", kind, "scheduler.type")
    if kind == ONE_CYCLE:
        _require(document, "cycle_min_lr", "cycle_max_lr")
    # DeepSpeed's defaults hold where a parameter is not given; ratios are parts of the rate.
    for name, option, default in TRANSLATIONS:
        key = f"scheduler.params.{name}"
        path = f"optimizer.{option}"
        meaning: Callable[[Any], Any] = (
            partial(PartOf, RATE) if name.endswith("_ratio") else lambda value: value
        )
        if key in document.values:
            document.copy(key, path, meaning)
        elif default is not None and name in SCHEDULER_PARAMS[kind]:
            document.give(
                path, meaning(default), "scheduler.type, as DeepSpeed's default"
            )
    # A warm-up ends at the optimizer's rate unless it has its own.
    if (
        kind == "WarmupDecayLR"
        and "scheduler.params.warmup_max_lr" not in document.values
    ):
        _decay_default(document)
    _override(document)


def _require(document: JsonDocument, *names: str) -> None:
    """Add a problem for each parameter without a default that is missing."""
    for name in names:
        if f"scheduler.params.{name}" not in document.values:
            document.refuse(
                f'{document.path}: "scheduler.type" {ONE_CYCLE} needs "scheduler.params.{name}", '
                "which has no default. Add it."
            )


def _decay_default(document: JsonDocument) -> None:
    """WarmupDecayLR without a highest rate rises to 0.001, whatever the optimizer's rate is."""
    given = document.values.get(OF_OPTIMIZER)
    if given is None:
        document.give(RATE, DECAY_DEFAULT, "scheduler.type, as DeepSpeed's default")
    elif given not in ("auto", DECAY_DEFAULT):
        document.refuse(
            f'{document.path}: WarmupDecayLR without "scheduler.params.warmup_max_lr" rises to '
            f'{DECAY_DEFAULT:g} in DeepSpeed, not to "{OF_OPTIMIZER}" {given}. Add '
            '"warmup_max_lr" with the rate that you mean.',
            RATE,
        )


def _override(document: JsonDocument) -> None:
    """Replace the rate of the optimizer by that of the scheduler, which is DeepSpeed's rule."""
    rates = [setting for setting in document.settings if setting.path == RATE]
    of_optimizer = [
        setting for setting in rates if str(setting.source).endswith(f" {OF_OPTIMIZER}")
    ]
    if len(rates) > len(of_optimizer):
        for setting in of_optimizer:
            document.settings.remove(setting)
            document.without_effect[str(setting.source)] = (
                "the scheduler sets the learning rate"
            )
