"""A DeepSpeed JSON (`--deepspeed_config`) → settings.

Most keys are declared with their option (`option(json="gradient_clipping")`); keys that need arithmetic are
translated below. "auto" means: take the value from the flags. `unsupported.py` accepts or refuses keys that
have no option here, with the reason. In a block that is switched off (`"fp16": {"enabled": false, …}`) values
are ignored, but names are checked.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from ...config.options.option import Option, json_key, shown
from ...config.sources.config_files import JsonDocument, declared_keys, text_of
from ...config.sources.keys import names
from ...config.sources.reading import SourceReading
from ...config.sources.suggest import near_key
from ...errors import ConfigError
from .deepspeed_data_efficiency import (
    CURRICULUM_KEYS,
    LTD,
    RANDOM_LTD_KEYS,
    random_ltd_is_off,
    translate_curriculum,
    translate_random_ltd,
)
from .deepspeed_optimizer import (
    ADAM_W_MODE,
    OPTIMIZER_KEYS,
    is_adamw,
    translate_optimizer,
)
from .deepspeed_schedulers import SCHEDULER_KEYS, translate_scheduler
from .deepspeed_spellings import NO_KEY, STAGE3_ONLY, is_dotted, loads, with_usual_names
from .unsupported import KEYS, answer_to_key, asks_for_default

# A name in more blocks than these, such as "enabled", does not identify a place.
MOST_PLACES = 2
TAG_VALIDATION = "checkpoint.tag_validation"
MICS = "zero_optimization.mics_shard_size"
HPZ = "zero_optimization.zero_hpz_partition_size"
# Names at the top level that resemble keys and carry notes.
NOTES = ("comment", "comments", "memory_optimization")
NOTE_MARKS = ("_", "#", "//")
# Operations of "comms_logger.prof_ops" → those of mpu/group.py.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), ("all_reduce",)),
    **dict.fromkeys(
        (
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_coalesced",
            "all_gather_object",
        ),
        ("all_gather",),
    ),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor"), ("reduce_scatter",)),
    **dict.fromkeys(
        ("all_to_all", "all_to_all_single"), ("all_to_all", "all_to_all_v")
    ),
    **dict.fromkeys(("broadcast", "broadcast_object_list"), ("broadcast",)),
    **dict.fromkeys(("send", "isend"), ("send",)),
}
# Keys that the functions below translate.
TRANSLATED: Mapping[str, Option] = {
    TAG_VALIDATION: json_key(
        str,
        "Ignore, Warn or Fail, in any case; an engine obeys it where ranks give different tags",
    ),
    "fp16.loss_scale": json_key(float, "`--loss-scale`; 0 is dynamic", at_least=0),
    "fp16.initial_scale_power": json_key(
        int, "`--initial-loss-scale`, 2 to this power", at_least=0, at_most=127
    ),
    "sequence_parallel_size": json_key(
        int,
        "`--context-parallel-size`, with `--cp-comm-type` a2a. An engine takes mpu=",
        at_least=1,
    ),
    "tensor_parallel.autotp_size": json_key(
        int,
        "`--tensor-model-parallel-size`; 0 is 1. An engine divides models of transformers",
        at_least=0,
    ),
    "comms_logger.prof_all": json_key(
        bool, "false: record the operations of prof_ops only"
    ),
    "comms_logger.prof_ops": json_key(
        str, "`--comms-logger-ops`, if prof_all is false", is_list=True
    ),
    "zero_optimization.cpu_offload": json_key(bool, "`--offload-optimizer` cpu"),
    "zero_optimization.cpu_offload_params": json_key(bool, "`--offload-param` cpu"),
    MICS: json_key(
        int,
        "`--zero-hpz-partition-size`: so many ranks gather parameters among themselves; 0 and less is off",
    ),
    "aio.thread_count": json_key(
        int, "`--nvme-threads`, like aio.intra_op_parallelism", at_least=1
    ),
    "wandb.enabled": json_key(
        bool, "whether the block is used; the project is deepspeed unless given"
    ),
    "comet.enabled": json_key(
        bool, "whether the block is used; the project is general unless given"
    ),
    "comet.online": json_key(bool, "false: `--comet-offline-dir` .cometml-runs"),
    "csv_monitor.enabled": json_key(bool, "whether the block is used"),
    "csv_monitor.output_path": json_key(
        str, "`--csv-monitor-dir`, together with the job name"
    ),
    "csv_monitor.job_name": json_key(str, "the directory under the output path"),
    "tensorboard.enabled": json_key(bool, "whether the block is used"),
    "tensorboard.output_path": json_key(
        str, "`--tensorboard-dir`, together with the job name"
    ),
    "tensorboard.job_name": json_key(str, "the directory under the output path"),
    **OPTIMIZER_KEYS,
    **SCHEDULER_KEYS,
    **CURRICULUM_KEYS,
    **RANDOM_LTD_KEYS,
}


def read_deepspeed(path: str) -> SourceReading:
    """Return the settings of a file, and its problems."""
    try:
        block = load_json(path, "--deepspeed_config")
    except ConfigError as error:
        reading = SourceReading(is_complete=False)
        reading.refuse(error)
        return reading
    return reading_of(path, block)


def reading_of(path: str, block: Mapping[str, Any]) -> SourceReading:
    """Return the settings and problems of a block. path: name of the block in messages."""
    document = JsonDocument(path, known_keys())
    block, notes = with_usual_names(block)
    document.without_effect |= {f"{path} {key}": why for key, why in notes.items()}
    _collect(document, "", block)
    for translate in (
        _declared,
        _fp16,
        translate_optimizer,
        translate_scheduler,
        _offload,
        _mics,
        _model_parallel,
        _tensorboard,
        _csv_monitor,
        _comet,
        _communication_log,
        _sparse_attention,
        translate_curriculum,
        translate_random_ltd,
        _tag_validation,
    ):
        translate(document)
    return document


def _tag_validation(document: JsonDocument) -> None:
    """Check the value, which has no effect: a save is always refused where tags differ."""
    value = document.take(TAG_VALIDATION)
    if value is None:
        return
    if value.upper() not in ("IGNORE", "WARN", "FAIL"):
        document.refuse(
            f'{document.path}: "{TAG_VALIDATION}" is {value!r}. Write Ignore, Warn or Fail.'
        )
    why = "save_checkpoint refuses tags that differ between ranks"
    document.without_effect[f"{document.path} {TAG_VALIDATION}"] = why


def auto_keys(block: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys whose value is "auto", in the order of the block. A name with a point is no key and
    left out."""
    found = []
    for name, value in block.items():
        if is_dotted(name):
            continue
        if isinstance(value, Mapping):
            found += auto_keys(value, f"{prefix}{name}.")
        elif value == "auto":
            found.append(prefix + name)
    return found


def with_autos(
    block: Mapping[str, Any], values: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a copy of the block in which the "auto" of each dotted key of `values` is replaced by its value."""

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_autos(value, values, f"{prefix}{name}.")
        return values.get(prefix + name, value) if value == "auto" else value

    return {name: replaced(name, value) for name, value in block.items()}


def _collect(
    document: JsonDocument, prefix: str, block: Mapping[str, Any], is_off: bool = False
) -> None:
    """Store the values of known keys in the document, and accept or refuse the others.

    is_off: a block around this one is switched off
    """
    is_off = is_off or block.get("enabled") is False
    for name, value in block.items():
        key = prefix + name
        if is_dotted(name):
            document.refuse(
                f'{document.path}: unknown key "{name}" in "{prefix[:-1]}": write the parts of the name as '
                "blocks, one in the other."
            )
            continue
        is_block = (
            any(known.startswith(key + ".") for known in document.known)
            or key not in KEYS
            and any(known.startswith(key + ".") for known in KEYS)
        )
        if is_block and isinstance(value, dict):
            _collect(document, key + ".", value, is_off)
        elif is_block:
            document.refuse(
                f'{document.path}: "{key}" should be a block {{ … }}, not {shown(value)}.'
            )
        elif key in document.known:
            document.values[key] = value
        else:
            _answer(document, key, value, is_off)


def _answer(document: JsonDocument, key: str, value: Any, is_off: bool) -> None:
    """Answer a key that has no option. is_off: its block is switched off."""
    covered = answer_to_key(key)
    near = _near(key) if covered is None else ""
    if covered is None and _is_note(key, near):
        document.without_effect[f"{document.path} {key}"] = NO_KEY
    elif covered is None:
        document.refuse(
            f'{document.path}: unknown key "{key}"{near or "."} '
            "docs/reference/flags.md lists all keys."
        )
        document.unread |= {
            option.path
            for known, option in declared_keys().items()
            if any(
                repr(part) in near
                for part in (known, known.rpartition(".")[2], known.partition(".")[0])
            )
        }
    elif is_off or covered[1].accepts(value):
        if not is_off and not asks_for_default(key, value):
            document.without_effect[f"{document.path} {key}"] = covered[1].note
    else:
        document.refuse(
            f'{document.path}: "{key}" is not supported: {covered[1].refusal}'
        )


def _is_note(key: str, near: str) -> bool:
    """Return whether an unknown key is left out, as DeepSpeed does: it is at the top level and no misspelt key.

    near: the suggestion for it
    """
    is_marked = key.startswith(NOTE_MARKS) or key in NOTES
    return "." not in key and (is_marked or not near)


def _declared(document: JsonDocument) -> None:
    """Return the keys that options declare."""
    off = {
        block + "."
        for block in ("fp16", "bf16")
        if document.values.get(block + ".enabled", False) is False
    }
    off |= {
        f"{block}."
        for block in ("wandb", "comet", "flops_profiler", "autotuning", "comms_logger")
        if document.values.get(f"{block}.enabled", False) is not True
    }
    off |= {LTD + "."} if random_ltd_is_off(document.values) else set()
    off |= {ADAM_W_MODE} if is_adamw(document) else set()
    for key, option in declared_keys().items():
        if not key.startswith(tuple(off)) or key.endswith(".enabled"):
            document.copy(key, option.path)


def _fp16(document: JsonDocument) -> None:
    if document.take("fp16.enabled") is False or "fp16.enabled" not in document.values:
        return
    # 0 means a dynamic scale.
    document.copy(
        "fp16.loss_scale", "optimizer.loss_scale", lambda scale: scale or None
    )
    document.copy(
        "fp16.initial_scale_power",
        "optimizer.initial_loss_scale",
        lambda power: 2.0**power,
    )


def _offload(document: JsonDocument) -> None:
    """Translate the older names of offloading."""
    for key, path in (
        ("cpu_offload", "zero.offload_optimizer"),
        ("cpu_offload_params", "zero.offload_param"),
    ):
        wanted = document.take(f"zero_optimization.{key}")
        if wanted and any(setting.path == path for setting in document.settings):
            document.without_effect[f"{document.path} zero_optimization.{key}"] = (
                f"the block {path.partition('.')[2]}, its newer name, is given"
            )
        elif wanted:
            document.give(path, "cpu", f"zero_optimization.{key}")
    document.copy("aio.thread_count", "zero.nvme_threads")


def _mics(document: JsonDocument) -> None:
    """MiCS gathers parameters within groups of ranks, as hierarchical partitioning does."""
    size = document.take(MICS)
    if size is None or size < 1:
        return
    if document.values.get("zero_optimization.stage") != 3:
        document.without_effect[f"{document.path} {MICS}"] = STAGE3_ONLY
    elif HPZ in document.values:
        document.without_effect[f"{document.path} {MICS}"] = f'"{HPZ}" is given'
    else:
        document.give("zero.zero_hpz_partition_size", size, MICS)


def _communication_log(document: JsonDocument) -> None:
    """Choose the operations: "prof_ops" has an effect only if "prof_all" is false, as in DeepSpeed."""
    names = document.take("comms_logger.prof_ops")
    records_all = document.take("comms_logger.prof_all") is not False
    if not document.take("comms_logger.enabled") or records_all:
        return
    wanted = [OPERATIONS.get(name, ()) for name in names or ()]
    found = tuple(dict.fromkeys(chain.from_iterable(wanted)))
    document.give("profiler.comms_logger_ops", found, "comms_logger.prof_ops")
    unknown = [name for name in names or () if name not in OPERATIONS]
    if unknown:
        document.without_effect[f"{document.path} comms_logger.prof_ops"] = (
            f"there is no operation {', '.join(unknown)} here"
        )


def _sparse_attention(document: JsonDocument) -> None:
    """Translate the block; without a mode it has DeepSpeed's default."""
    keys = [key for key in document.values if key.startswith("sparse_attention.")]
    if keys and "sparse_attention.mode" not in keys:
        document.give(
            "model.sparse_attention",
            "fixed",
            "sparse_attention, as DeepSpeed's default",
        )


def _model_parallel(document: JsonDocument) -> None:
    """Translate the sizes of groups that split a model or its sequences."""
    document.copy(
        "tensor_parallel.autotp_size",
        "parallel.tensor_model_parallel_size",
        lambda size: size or 1,
    )
    document.copy("sequence_parallel_size", "parallel.context_parallel_size")
    if (document.take("sequence_parallel_size") or 1) > 1:  # Ulysses
        document.give("parallel.cp_comm_type", ("a2a",), "sequence_parallel_size")


def _csv_monitor(document: JsonDocument) -> None:
    if document.take("csv_monitor.enabled"):
        folder = document.values.get("csv_monitor.output_path") and document.take(
            "csv_monitor.output_path"
        )
        folder = os.path.join(
            folder or "", document.take("csv_monitor.job_name") or "DeepSpeedJobName"
        )
        document.give("logging.csv_monitor_dir", folder, "csv_monitor.enabled")


def _comet(document: JsonDocument) -> None:
    is_offline = document.take("comet.online") is False
    if not document.take("comet.enabled"):
        return
    if "comet.project" not in document.values:
        document.give("services.comet_project", "general", "comet.enabled")
    if is_offline:
        document.give("services.comet_offline_dir", ".cometml-runs", "comet.online")


def _tensorboard(document: JsonDocument) -> None:
    if document.take("wandb.enabled") and "wandb.project" not in document.values:
        document.give("services.wandb_project", "deepspeed", "wandb.enabled")
    if not document.take("tensorboard.enabled"):
        return
    folder = document.take("tensorboard.output_path")
    if folder is None and document.values.get("tensorboard.output_path") != "auto":
        document.refuse(
            f'{document.path}: "tensorboard" is enabled without "output_path", the '
            "directory for the events. Add it, or disable the block and use --tensorboard-dir."
        )
    elif folder is not None:
        folder = os.path.join(
            folder, document.take("tensorboard.job_name") or "DeepSpeedJobName"
        )
        document.give("logging.tensorboard_dir", folder, "tensorboard.output_path")


def unique_keys(path: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return the `object_pairs_hook` that raises ConfigError for a key that occurs twice in a block.

    path: of the file, for messages
    """

    def block_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ConfigError(
                f"{path}: {', '.join(map(repr, twice))} occurs twice in a block, and JSON "
                "would keep only the last. Remove one."
            )
        return dict(pairs)

    return block_of


def load_json(path: str, flag: str) -> dict[str, Any]:
    """Return the block of a JSON file. flag: the flag that gave the file, for messages. Raises ConfigError."""
    text = text_of(path, flag)
    try:
        document = loads(text, object_pairs_hook=unique_keys(path))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}: this is not JSON: {error.msg.lower()} at column "
            f"{error.colno}."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path}: this is not a configuration: its brackets are nested too deep."
        ) from None
    except ConfigError:  # it is a ValueError, too
        raise
    except ValueError:
        raise ConfigError(
            f"{path}: a number has more digits than can be read."
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} should contain one block {{ … }} of keys.")
    return document


def _near(key: str) -> str:
    """Return a suggestion: the key of an option of this name, a key of the same block, or any other key."""
    parent, _, name = key.rpartition(".")
    candidates = [*known_keys(), *KEYS]
    siblings = {
        other.rpartition(".")[2]: other.rpartition(".")[2]
        for other in candidates
        if other.rpartition(".")[0] == parent
    }
    by_option = {other: option.json for other, option in names().items() if option.json}
    direct = by_option.get(name) if not parent else None
    if direct:
        return f"; did you mean {direct!r}?"
    if place := _place_of(name, candidates, parent):
        return place
    blocks = {
        block: block
        for other in candidates
        if (block := other.partition(".")[0]) != other
    }
    near = near_key(name, siblings) or (
        not parent and (near_key(name, blocks) or near_key(name, by_option))
    )
    return near or near_key(
        name, {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    )


def _place_of(name: str, candidates: Sequence[str], parent: str) -> str:
    """Return the hint for a key or block that exists, but in another place; "" if there is none."""
    # Candidates are keys; the blocks that contain them are places too.
    blocks = set()
    for other in candidates:
        parts = other.split(".")
        blocks |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    places = sorted(
        (other for other in blocks if other.rpartition(".")[2] == name), key=len
    )
    if not places or len(places) > MOST_PLACES:
        return ""
    where = [
        f'in "{place.rpartition(".")[0]}"' if "." in place else "at the top level"
        for place in places
    ]
    here = f'in "{parent}"' if parent else "at the top level"
    return f": there is no {name!r} {here}; it belongs {' or '.join(where)}."


@cache
def known_keys() -> Mapping[str, Option]:
    """Return all dotted keys that are read."""
    return {**declared_keys(), **TRANSLATED}
