"""Other spellings of DeepSpeed's keys, and a JSON with comments and trailing commas, which it reads as HJSON.

"bfloat16": {…}                            "bf16": {…}
zero_optimization.max_live_parameters      zero_optimization.stage3_max_live_parameters, and others
"zero_optimization.stage" at the top       left out: DeepSpeed looks for "stage" in the block alone
"""

import json
import re
from collections.abc import Mapping
from typing import Any

ZERO = "zero_optimization"
PREFIX = "stage3_"
# Keys of ZeRO that DeepSpeed also reads without the prefix.
UNPREFIXED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
OTHERS = {"cpu_offload_param": "cpu_offload_params"}
OFFLOADS = ("offload_optimizer", "offload_param")  # null: not offloaded
GROUP = "sub_group_size"  # 0: DeepSpeed makes a group of each parameter
LEAST_GROUP = 2048
DEVICES = ("cpu", "nvme")
NO_KEY = "DeepSpeed has no such key at the top level, and ignores it"
DOTTED = f"{NO_KEY}: a key of a block stands inside the block"
# Parameters of Adam that files also write beside "params", where DeepSpeed does not look, and its defaults.
BESIDE_PARAMS = {"eps": 1e-8, "betas": [0.9, 0.999], "weight_decay": 0}
SAME_VALUE = 'DeepSpeed reads only "optimizer.params", by which the value is the same'
STAGE3_ONLY = "it applies to stage 3; DeepSpeed ignores it at other stages"
# A string, or what HJSON has besides JSON: comments, and a comma before a closing bracket. A string or a
# comment without an end goes on to the end of its line or of the text, so that no part is read twice.
_STRING = r'"(?:\\[^\n]|[^"\n])*+(?:"|$)'
_EXTRAS = re.compile(
    rf"{_STRING}|(?://|\#)[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL | re.MULTILINE
)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*+[}}\]])", re.MULTILINE)


def with_usual_names(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (a copy of the block with the usual spelling of each key, {key without effect: the reason})."""
    notes = {key: DOTTED for key in block if is_dotted(key)}
    block = {key: value for key, value in block.items() if key not in notes}
    if "bfloat16" in block and "bf16" not in block:
        block = {
            "bf16" if key == "bfloat16" else key: value for key, value in block.items()
        }
    repeated = _repeated(block.get("optimizer"))
    if repeated:
        kept = {k: v for k, v in block["optimizer"].items() if k not in repeated}
        block = block | {"optimizer": kept}
        notes |= {f"optimizer.{key}": SAME_VALUE for key in repeated}
    # DeepSpeed accepts values under this block that would be refused here, and changes no number by them.
    zero = block.get(ZERO)
    if not isinstance(zero, Mapping):
        return block, notes
    zero = {
        _usual(key, zero): value
        for key, value in zero.items()
        if not (key in OFFLOADS and value is None)
    }
    if _is_small(zero.get(GROUP)):
        zero[GROUP] = LEAST_GROUP
        notes[f"{ZERO}.{GROUP}"] = (
            f"groups have at least {LEAST_GROUP} elements, which changes no number"
        )
    offload = zero.get("offload_param")
    if (
        isinstance(offload, Mapping)
        and offload.get("device") in DEVICES
        and _is_below_stage_3(zero)
    ):
        del zero["offload_param"]
        notes[f"{ZERO}.offload_param"] = STAGE3_ONLY
    return block | {ZERO: zero}, notes


def _repeated(optimizer: Any) -> list[str]:
    """Return the parameters beside "params" whose value is in force without them. Others are refused as misplaced."""
    if not isinstance(optimizer, Mapping):
        return []
    is_adam = str(optimizer.get("type")).lower() in ("adam", "adamw")
    params = optimizer.get("params")
    known = {
        **(BESIDE_PARAMS if is_adam else {}),
        **(params if isinstance(params, Mapping) else {}),
    }
    return [
        key
        for key in BESIDE_PARAMS
        if key in optimizer and key in known and optimizer[key] == known[key]
    ]


def is_dotted(key: Any) -> bool:
    """Return whether a name is a path, such as "zero_optimization.stage", which no key of DeepSpeed is."""
    return isinstance(key, str) and "." in key


def _is_small(size: Any) -> bool:
    """Return whether DeepSpeed accepts a size of a group that is too small here."""
    return type(size) is int and 0 <= size < LEAST_GROUP


def _usual(key: str, zero: Mapping[str, Any]) -> str:
    is_other = key in UNPREFIXED and PREFIX + key not in zero
    return PREFIX + key if is_other else OTHERS.get(key, key)


def _is_below_stage_3(zero: Mapping[str, Any]) -> bool:
    stage = zero.get("stage", 0)
    return isinstance(stage, int) and stage < 3


def without_extras(text: str) -> str:
    """Return the text without comments and trailing commas; line numbers stay."""

    def blank(found: re.Match) -> str:
        return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])

    return _TRAILING_COMMA.sub(lambda found: found[1] or " ", _EXTRAS.sub(blank, text))


def loads(text: str, **options: Any) -> Any:
    """`json.loads`, also of a text with comments and trailing commas. Raises JSONDecodeError as json does."""
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError as error:
        try:
            return json.loads(without_extras(text), **options)
        except json.JSONDecodeError:
            raise error from None
