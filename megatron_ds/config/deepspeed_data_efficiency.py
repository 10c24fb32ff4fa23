"""The blocks "curriculum_learning" and "data_efficiency" of a DeepSpeed JSON → settings.

The user chooses the names of metrics, so these blocks are read as a whole and not key by key. The metrics
`seqlen_truncate` and `seqlen_reshape` are lengths, as in Megatron-DeepSpeed; all others choose samples.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .coerce import coerce, shown
from .data_efficiency_options import METRIC_KEYS, RESHAPE, TRUNCATE
from .option import Option
from .run import all_options

LEGACY, SAMPLING = "curriculum_learning", "data_efficiency.data_sampling"
METRICS = f"{SAMPLING}.curriculum_learning.curriculum_metrics"
_BOOL, _BLOCK = Option(None, "", kind=bool), Option(None, "")
KEYS: Mapping[str, Option] = {
    LEGACY: _BLOCK, "data_efficiency.enabled": _BOOL, "data_efficiency.seed": Option(None, "", kind=int, at_least=0),
    f"{SAMPLING}.enabled": _BOOL, f"{SAMPLING}.num_workers": Option(None, "", kind=int, at_least=0),
    f"{SAMPLING}.curriculum_learning.enabled": _BOOL,
    f"{SAMPLING}.curriculum_learning.data_cluster_path": Option(None, "", kind=str), METRICS: _BLOCK}
MEANINGS = {
    LEGACY: "`--curriculum-type` seqlen_truncate and the lengths of its schedule",
    "data_efficiency.enabled": "whether the block is used", f"{SAMPLING}.enabled": "whether the block is used",
    f"{SAMPLING}.curriculum_learning.enabled": "whether the block is used",
    "data_efficiency.seed": "`--data-efficiency-seed`", f"{SAMPLING}.num_workers": "`--num-workers`",
    f"{SAMPLING}.curriculum_learning.data_cluster_path": "`--curriculum-cluster-path`, if several metrics choose samples",
    METRICS: "`--curriculum-metrics`; the metrics `seqlen_truncate` and `seqlen_reshape` are `--curriculum-type`"}
LENGTHS = {"min_difficulty": "min_length", "max_difficulty": "max_length", "schedule_type": "schedule"}
SCHEDULES = {"total_curriculum_step": "steps", "difficulty_step": "length_step", "root_degree": "root_degree",
             "difficulty": "lengths", "max_step": "until_steps", "function": "function"}


def translate(document) -> None:
    """document: a `deepspeed._Document`."""
    legacy = document.keys.get(LEGACY)
    if legacy is not None:
        _legacy(document, legacy)
    if not document.take("data_efficiency.enabled"):
        return
    document.give("curriculum.data_efficiency_seed", document.take("data_efficiency.seed"), "data_efficiency.seed")
    if document.take(f"{SAMPLING}.enabled"):
        document.give("data.num_workers", document.take(f"{SAMPLING}.num_workers"), f"{SAMPLING}.num_workers")
        if document.take(f"{SAMPLING}.curriculum_learning.enabled"):
            _metrics(document)


def _legacy(document, block: Any) -> None:
    if not _is_block(document, LEGACY, block, {"enabled", "curriculum_type", "schedule_config", *LENGTHS}):
        return
    if block.get("enabled") is True:
        kind = block.get("curriculum_type", "seqlen")
        if kind != "seqlen":
            document.wrong.append(f'{document.path}: "{LEGACY}.curriculum_type" is {shown(kind)}; only "seqlen" exists.')
        _lengths(document, LEGACY, TRUNCATE, block)
    elif block.get("enabled") not in (None, False):
        document.wrong.append(f'{document.path}: "{LEGACY}.enabled": {shown(block["enabled"])} is not true or false.')


def _metrics(document) -> None:
    metrics = document.keys.get(METRICS)
    if not isinstance(metrics, dict) or not metrics:
        document.wrong.append(f'{document.path}: "{METRICS}" is {shown(metrics)}; give a block for each metric: '
                              '{"vocab_rarity": { … }}.')
        return
    texts = []
    for name, block in metrics.items():
        key = f"{METRICS}.{name}"
        if not _is_block(document, key, block, METRIC_KEYS - {"name"}):
            continue
        if name in (TRUNCATE, RESHAPE):
            _lengths(document, key, name, block)
        if name not in (TRUNCATE, RESHAPE) or block.get("clustering_type") == "schedule_based":
            texts.append(json.dumps({"name": name, **block}))
    document.give("curriculum.curriculum_metrics", tuple(texts) or None, METRICS)
    folder = f"{SAMPLING}.curriculum_learning.data_cluster_path"
    if len(texts) > 1:                           # upstream always requires it; with one metric it has no use
        document.give("curriculum.curriculum_cluster_path", document.take(folder), folder)


def _lengths(document, key: str, kind: str, block: Mapping[str, Any]) -> None:
    document.give("curriculum.curriculum_type", kind, key)
    schedule = block.get("schedule_config", {})
    if not _is_block(document, f"{key}.schedule_config", schedule, set(SCHEDULES)):
        return
    for values, names, prefix in ((block, LENGTHS, key), (schedule, SCHEDULES, f"{key}.schedule_config")):
        for name, option in names.items():
            if name in values and values[name] != "auto":
                path = f"curriculum.curriculum_{option}"
                try:
                    document.give(path, coerce(all_options()[path], values[name], f'{document.path}: "{prefix}.{name}"'),
                                  f"{prefix}.{name}")
                except ConfigError as error:
                    document.wrong.append(str(error))


def _is_block(document, key: str, block: Any, known: set[str]) -> bool:
    """Whether it is a block with known keys; notes the problem if not."""
    if not isinstance(block, dict):
        document.wrong.append(f'{document.path}: "{key}" should be a block {{ … }}, not {shown(block)}.')
        return False
    for name in block:
        if name not in known:
            document.wrong.append(f'{document.path}: unknown key "{key}.{name}"{did_you_mean(name, sorted(known)) or "."} '
                                  f'Known: {", ".join(sorted(known))}.')
    return known >= block.keys()
