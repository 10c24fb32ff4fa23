"""The blocks "curriculum_learning" and "data_efficiency" of a DeepSpeed JSON → settings.

Curricula: users choose the names of metrics, so these blocks are read as a whole and not key by key. The
metrics `seqlen_truncate` and `seqlen_reshape` set the sequence length, as in Megatron-DeepSpeed; all others
choose samples.

Random-LTD: options declare the keys of its schedule. The keys here enable the block, or describe the model to
a library that does not know it: they are checked against the model.
"""

import json
from collections.abc import Mapping
from typing import Any

from ...config.options.option import Option, coerce, json_key, shown
from ...config.run import all_options
from ...config.sources.config_files import JsonDocument
from ...config.sources.reading import attempt
from ...features import Provided, missing_wings
from ...registry import did_you_mean

METRIC_KEYS: Provided[set[str]] = Provided("metric keys")

TRUNCATE = "seqlen_truncate"
RESHAPE = "seqlen_reshape"
LEGACY = "curriculum_learning"
SAMPLING = "data_efficiency.data_sampling"
METRICS = f"{SAMPLING}.curriculum_learning.curriculum_metrics"
CURRICULUM_KEYS: Mapping[str, Option] = {
    LEGACY: json_key(
        str,
        "`--curriculum-type` seqlen_truncate and the lengths of its schedule. An engine passes the length "
        "to its module as `curriculum_seqlen`",
    ),
    "data_efficiency.enabled": json_key(bool, "whether the block is used"),
    "data_efficiency.seed": json_key(int, "`--data-efficiency-seed`", at_least=0),
    f"{SAMPLING}.enabled": json_key(bool, "whether the block is used"),
    f"{SAMPLING}.num_workers": json_key(int, "`--num-workers`", at_least=0),
    f"{SAMPLING}.curriculum_learning.enabled": json_key(
        bool, "whether the block is used"
    ),
    f"{SAMPLING}.curriculum_learning.data_cluster_path": json_key(
        str, "`--curriculum-cluster-path`, if several metrics choose samples"
    ),
    METRICS: json_key(
        str,
        "`--curriculum-metrics`; the metrics `seqlen_truncate` and `seqlen_reshape` are "
        "`--curriculum-type`",
    ),
}
LENGTHS = {
    "min_difficulty": "min_length",
    "max_difficulty": "max_length",
    "schedule_type": "schedule",
}
SCHEDULES = {
    "total_curriculum_step": "steps",
    "difficulty_step": "length_step",
    "root_degree": "root_degree",
    "difficulty": "lengths",
    "max_step": "until_steps",
    "function": "function",
}

ROUTING = "data_efficiency.data_routing"
LTD = f"{ROUTING}.random_ltd"
# All of them count, as in DeepSpeed.
SWITCHES = (
    "data_efficiency.enabled",
    f"{ROUTING}.enabled",
    f"{LTD}.enabled",
)
RANDOM_LTD_KEYS: Mapping[str, Option] = {
    f"{ROUTING}.enabled": json_key(bool, "whether the block is used"),
    f"{LTD}.enabled": json_key(
        bool, "`--random-ltd`, if the blocks around it are enabled, too"
    ),
    f"{LTD}.random_ltd_layer_num": json_key(
        int, "must be the number of `random_ltd_layer_id`"
    ),
    f"{LTD}.model_type": json_key(
        str,
        "decoder or encoder: masks follow from the model",
        choices=("decoder", "encoder"),
    ),
    f"{LTD}.model_mask_name": json_key(
        str, "attention_mask, the only one there is", choices=("attention_mask",)
    ),
    f"{LTD}.hidden_state_order": json_key(
        str,
        "either order: the model knows its own",
        choices=("seq_batch_dim", "batch_seq_dim"),
    ),
    f"{LTD}.random_ltd_schedule.schedule_type": json_key(
        str, "fixed_linear, the only one there is", choices=("fixed_linear",)
    ),
    f"{LTD}.layer_token_lr_schedule.enabled": json_key(
        bool, "must be false, as in DeepSpeed"
    ),
}


def translate_curriculum(document: JsonDocument) -> None:
    """Set the options of curricula over lengths and over samples."""
    legacy = document.values.get(LEGACY)
    if legacy is not None:
        _legacy(document, legacy)
    if not document.take("data_efficiency.enabled"):
        return
    if METRIC_KEYS.find() is not None:
        document.copy("data_efficiency.seed", "curriculum.data_efficiency_seed")
    if document.take(f"{SAMPLING}.enabled") and _is_installed(document, SAMPLING):
        document.copy(f"{SAMPLING}.num_workers", "data.num_workers")
        if document.take(f"{SAMPLING}.curriculum_learning.enabled"):
            _metrics(document)


def _legacy(document: JsonDocument, block: Any) -> None:
    if not _is_block(
        document,
        LEGACY,
        block,
        {"enabled", "curriculum_type", "schedule_config", *LENGTHS},
    ):
        return
    if block.get("enabled") is True and _is_installed(document, LEGACY):
        kind = block.get("curriculum_type", "seqlen")
        if kind != "seqlen":
            document.refuse(
                f'{document.path}: "{LEGACY}.curriculum_type" is {shown(kind)}; it must be '
                '"seqlen".'
            )
        _lengths(document, LEGACY, TRUNCATE, block)
    elif block.get("enabled") not in (None, False, "auto"):
        document.refuse(
            f'{document.path}: "{LEGACY}.enabled": {shown(block["enabled"])} is not true '
            "or false."
        )


def _metrics(document: JsonDocument) -> None:
    metrics = document.values.get(METRICS)
    if not isinstance(metrics, dict) or not metrics:
        document.refuse(
            f'{document.path}: "{METRICS}" is {shown(metrics)}; give a block for each '
            'metric: {"vocab_rarity": { … }}.'
        )
        return
    known = METRIC_KEYS.find()
    assert known is not None, "_is_installed has refused the block without it"
    # A metric of lengths that has a schedule of its own chooses samples, too.
    texts = []
    for name, block in metrics.items():
        key = f"{METRICS}.{name}"
        if not _is_block(document, key, block, known - {"name"}):
            continue
        if name in (TRUNCATE, RESHAPE):
            _lengths(document, key, name, block)
        if (
            name not in (TRUNCATE, RESHAPE)
            or block.get("clustering_type") == "schedule_based"
        ):
            texts.append(json.dumps({"name": name, **block}))
    document.give("curriculum.curriculum_metrics", tuple(texts) or None, METRICS)
    if len(texts) > 1:  # DeepSpeed always requires it; with one metric it has no use
        document.copy(
            f"{SAMPLING}.curriculum_learning.data_cluster_path",
            "curriculum.curriculum_cluster_path",
        )


def _lengths(
    document: JsonDocument, key: str, kind: str, block: Mapping[str, Any]
) -> None:
    document.give("curriculum.curriculum_type", kind, key)
    schedule = block.get("schedule_config", {})
    if not _is_block(document, f"{key}.schedule_config", schedule, set(SCHEDULES)):
        return
    for values, names, prefix in (
        (block, LENGTHS, key),
        (schedule, SCHEDULES, f"{key}.schedule_config"),
    ):
        for name, option in names.items():
            if name in values and values[name] != "auto":
                path = f"curriculum.curriculum_{option}"
                inner = f"{prefix}.{name}"
                value = attempt(
                    document.problems,
                    coerce,
                    all_options()[path],
                    values[name],
                    f'{document.path}: "{inner}"',
                )
                document.give(path, value, inner)


def _is_installed(document: JsonDocument, key: str) -> bool:
    """Return whether curricula and random-LTD are installed. If not, a problem is added."""
    if METRIC_KEYS.find() is None:
        document.refuse(
            f'{document.path}: "{key}" is enabled, which this package does not have.'
            f"{missing_wings()}"
        )
        return False
    return True


def _is_block(document: JsonDocument, key: str, block: Any, known: set[str]) -> bool:
    """Return whether it is a block, and all its keys are known. If not, a problem is added."""
    if not isinstance(block, dict):
        document.refuse(
            f'{document.path}: "{key}" should be a block {{ … }}, not {shown(block)}.'
        )
        return False
    for name in block:
        if name not in known:
            near = did_you_mean(name, sorted(known)) or "."
            document.refuse(
                f'{document.path}: unknown key "{key}.{name}"{near} '
                f"Known: {', '.join(sorted(known))}."
            )
    return known >= block.keys()


def random_ltd_is_off(keys: Mapping[str, Any]) -> bool:
    """Return whether one of the three blocks around the schedule is not enabled, so that its values are ignored."""
    return not all(keys.get(switch) is True for switch in SWITCHES)


def translate_random_ltd(document: JsonDocument) -> None:
    """Enable random-LTD, and check the keys that describe the model."""
    on = [document.take(switch) for switch in SWITCHES]
    if not all(on) or not _is_installed(document, LTD):
        return
    document.give("random_ltd.random_ltd", True, SWITCHES[-1])
    for key in RANDOM_LTD_KEYS:
        if key not in SWITCHES:
            document.take(key)
    if document.take(f"{LTD}.layer_token_lr_schedule.enabled"):
        document.refuse(
            f'{document.path}: "{LTD}.layer_token_lr_schedule" is not available, as in '
            "DeepSpeed: the learning rate follows samples or steps. Disable it."
        )
    count = document.take(f"{LTD}.random_ltd_layer_num")
    ids = document.take(f"{LTD}.random_ltd_layer_id")
    if count is not None and count != len(ids or ()):
        document.refuse(
            f'{document.path}: "{LTD}.random_ltd_layer_num" is {count}, but '
            f'"random_ltd_layer_id" contains {len(ids or ())} layers. Make them equal, or remove '
            "the number."
        )
