"""The blocks "curriculum_learning" and "data_efficiency" of a DeepSpeed JSON → settings.

The user chooses the names of metrics, so these blocks are read as a whole and not key by key. The metrics
`seqlen_truncate` and `seqlen_reshape` are lengths, as in Megatron-DeepSpeed; all others choose samples.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import did_you_mean
from .data_efficiency_options import METRIC_KEYS, RESHAPE, TRUNCATE
from .option import Option, coerce, json_key, shown
from .run import all_options

LEGACY, SAMPLING = "curriculum_learning", "data_efficiency.data_sampling"
METRICS = f"{SAMPLING}.curriculum_learning.curriculum_metrics"
CURRICULUM_KEYS: Mapping[str, Option] = {
    LEGACY: json_key(str, "`--curriculum-type` seqlen_truncate and the lengths of its schedule"),
    "data_efficiency.enabled": json_key(bool, "whether the block is used"),
    "data_efficiency.seed": json_key(int, "`--data-efficiency-seed`", at_least=0),
    f"{SAMPLING}.enabled": json_key(bool, "whether the block is used"),
    f"{SAMPLING}.num_workers": json_key(int, "`--num-workers`", at_least=0),
    f"{SAMPLING}.curriculum_learning.enabled": json_key(bool, "whether the block is used"),
    f"{SAMPLING}.curriculum_learning.data_cluster_path": json_key(
        str, "`--curriculum-cluster-path`, if several metrics choose samples"),
    METRICS: json_key(str, "`--curriculum-metrics`; the metrics `seqlen_truncate` and `seqlen_reshape` are "
                      "`--curriculum-type`")}
LENGTHS = {"min_difficulty": "min_length", "max_difficulty": "max_length", "schedule_type": "schedule"}
SCHEDULES = {"total_curriculum_step": "steps", "difficulty_step": "length_step", "root_degree": "root_degree",
             "difficulty": "lengths", "max_step": "until_steps", "function": "function"}


def translate_curriculum(document) -> None:
    """document: a `deepspeed._Document`."""
    legacy = document.keys.get(LEGACY)
    if legacy is not None:
        _legacy(document, legacy)
    if not document.take("data_efficiency.enabled"):
        return
    document.give("curriculum.data_efficiency_seed", document.take("data_efficiency.seed"),
                  "data_efficiency.seed")
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
            document.wrong.append(f'{document.path}: "{LEGACY}.curriculum_type" is {shown(kind)}; only '
                                  '"seqlen" exists.')
        _lengths(document, LEGACY, TRUNCATE, block)
    elif block.get("enabled") not in (None, False):
        document.wrong.append(f'{document.path}: "{LEGACY}.enabled": {shown(block["enabled"])} is not true '
                              'or false.')


def _metrics(document) -> None:
    metrics = document.keys.get(METRICS)
    if not isinstance(metrics, dict) or not metrics:
        document.wrong.append(f'{document.path}: "{METRICS}" is {shown(metrics)}; give a block for each '
                              'metric: {"vocab_rarity": { … }}.')
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
                    document.give(path, coerce(all_options()[path], values[name], f'{document.path}: '
                                                                                  f'"{prefix}.{name}"'),
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
            document.wrong.append(f'{document.path}: unknown key '
                                  f'"{key}.{name}"{did_you_mean(name, sorted(known)) or "."} Known: '
                                  f'{", ".join(sorted(known))}.')
    return known >= block.keys()


DATA, ROUTING = "data_efficiency", "data_efficiency.data_routing"
LTD = f"{ROUTING}.random_ltd"
SWITCHES = (f"{DATA}.enabled", f"{ROUTING}.enabled", f"{LTD}.enabled")       # all of them, as upstream has it

RANDOM_LTD_KEYS: Mapping[str, Option] = {
    f"{ROUTING}.enabled": json_key(bool, "whether the block is used"),
    f"{LTD}.enabled": json_key(bool, "`--random-ltd`, if the blocks around it are enabled, too"),
    f"{LTD}.random_ltd_layer_num": json_key(int, "must be the number of `random_ltd_layer_id`"),
    f"{LTD}.model_type": json_key(str, "decoder or encoder: masks follow from the "
                                       "model", choices=("decoder", "encoder")),
    f"{LTD}.model_mask_name": json_key(str, "attention_mask, the only one there "
                                            "is", choices=("attention_mask",)),
    f"{LTD}.hidden_state_order": json_key(str, "seq_batch_dim, the only one there "
                                               "is", choices=("seq_batch_dim",)),
    f"{LTD}.random_ltd_schedule.schedule_type": json_key(
        str, "fixed_linear, the only one there is", choices=("fixed_linear",)),
    f"{LTD}.layer_token_lr_schedule.enabled": json_key(bool, "must be false, as in DeepSpeed")}


def random_ltd_is_off(keys: Mapping[str, Any]) -> bool:
    """Whether one of the three blocks around the schedule is not switched on; its values are then ignored."""
    return not all(keys.get(switch) is True for switch in SWITCHES)


def translate_random_ltd(document) -> None:
    """document: a `deepspeed._Document`."""
    on = [document.take(switch) for switch in SWITCHES]
    if not all(on):
        return
    document.give("random_ltd.random_ltd", True, SWITCHES[-1])
    for key in RANDOM_LTD_KEYS:
        if key not in SWITCHES:
            document.take(key)
    if document.take(f"{LTD}.layer_token_lr_schedule.enabled"):
        document.wrong.append(f'{document.path}: "{LTD}.layer_token_lr_schedule" is not available, here as '
                              'in DeepSpeed: the '
                              "learning rate follows samples or steps. Disable it.")
    count, ids = document.take(f"{LTD}.random_ltd_layer_num"), document.take(f"{LTD}.random_ltd_layer_id")
    if count is not None and count != len(ids or ()):
        document.wrong.append(f'{document.path}: "{LTD}.random_ltd_layer_num" is {count}, but '
                              '"random_ltd_layer_id" names '
                              f"{len(ids or ())} layers. Make them equal, or remove the number.")
