"""Rotary positions in `config.json` of Hugging Face ↔ options of our models: base, share of a head, scaling.

    their rope_type    our options
    default            none
    linear             rotary_seq_len_interpolation_factor
    dynamic            rotary_ntk_factor, original_max_position_embeddings
    yarn               position_embedding_type yarn, yarn_*
    llama3             use_rope_scaling, rope_scaling_factor

Dynamic NTK of transformers follows the longest position of each batch; ours is that of all positions of the
model (`models.attention.scaled_rotary_base`). Up to their max_position_embeddings both are default; a model
of ours that was lengthened has another base for all lengths, and is written so.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..config.model_options import ModelConfig
from ..errors import CheckpointError
from ..models.attention import rotary_scalings, scaled_rotary_base

Settings = Mapping[str, Any]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}       # the values that are computed
LLAMA3_LENGTH = 8192
LENGTH = "original_max_position_embeddings"


def rotary_options(settings: Settings, defaults: Settings) -> dict[str, Any]:
    """Our options. defaults: values of absent settings. Raises CheckpointError for what is not computed."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(f"rope_parameters is {rope!r}: other rotary positions in some layers are not "
                              "computed")
    first = lambda *names, default: next((value for name in names for value in (rope.get(name), settings.get(
        name)) if value is not None), default)
    base = first("rope_theta", "rotary_emb_base", default=defaults.get("rope_theta", 10000.0))
    share = first("partial_rotary_factor", "rotary_pct", default=defaults.get("partial_rotary_factor", 1.0))
    if share != 1 and "partial_rotary_factor" not in defaults:
        raise CheckpointError(f"partial_rotary_factor is {share}, and models of this type rotate whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in READERS:
        raise CheckpointError(f"rope_type is {kind!r}, and this package computes "
                              f"{', '.join(map(repr, READERS))}")
    return {"rotary_base": float(base), "rotary_percent": float(share), **READERS[kind](rope, settings)}


def _linear(rope: Settings, settings: Settings) -> dict[str, Any]:
    return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}


def _dynamic(rope: Settings, settings: Settings) -> dict[str, Any]:
    return {"rotary_ntk_factor": float(rope["factor"]), LENGTH: int(settings["max_position_embeddings"])}


def _yarn(rope: Settings, settings: Settings) -> dict[str, Any]:
    longest = settings["max_position_embeddings"]
    original = settings.get(LENGTH) or rope.get(LENGTH) or longest
    factor = float(rope.get("factor") or longest / original)
    return {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": factor, LENGTH: int(original),
            "yarn_beta_fast": float(rope.get("beta_fast") or 32), "yarn_beta_slow": float(
                rope.get("beta_slow") or 1), **_amplitude(rope, factor),
            "yarn_correction_range_round_to_int": bool(rope.get("truncate", True))}


def _amplitude(rope: Settings, factor: float) -> dict[str, float]:
    """Our weights of ln(factor) for their attention_factor, or for theirs, of which both or none count."""
    given, weights = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if given is None:
        mscale, divisor = weights if all(weights) else (1.0, 0.0)
        return {"yarn_mscale": float(mscale), "yarn_mscale_all_dim": float(divisor)}
    if factor <= 1 and given != 1:
        raise CheckpointError(f"attention_factor is {given} with factor {factor}, and this package computes "
                              "1 for sequences that are not lengthened")
    weight = (given - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0
    return {"yarn_mscale": round(weight, 12), "yarn_mscale_all_dim": 0.0}


def _llama3(rope: Settings, settings: Settings) -> dict[str, Any]:
    if odd := [f"{name} {rope.get(name)}" for name, value in LLAMA3.items() if rope.get(name) != value]:
        raise CheckpointError(f"rope_type llama3 has {' and '.join(odd)}, and this package computes "
                              f"{', '.join(f'{name} {value}' for name, value in LLAMA3.items())}")
    length = settings.get(LENGTH) or rope.get(LENGTH) or settings["max_position_embeddings"]
    found = {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    return found if length == LLAMA3_LENGTH else found | {LENGTH: int(length)}


READERS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda rope, settings: {}, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn,
    "llama3": _llama3}


def rotary_settings(model: ModelConfig, is_partial: bool) -> dict[str, Any]:
    """Their settings, in the spellings of transformers 4 and 5. is_partial: the share of a head is written"""
    scaling = _scaling(model)
    share = {"partial_rotary_factor": model.rotary_percent} if is_partial or model.rotary_percent != 1 else {}
    base = model.rotary_base if scaling["rope_type"] == "dynamic" else scaled_rotary_base(model)
    found = {"rope_theta": base, **share, "rope_parameters": {"rope_theta": base, **share, **scaling}}
    if share:
        found |= {"rotary_pct": model.rotary_percent}
    if scaling["rope_type"] != "default":
        found["rope_scaling"] = scaling
    return found


def _scaling(model: ModelConfig) -> dict[str, Any]:
    original = model.original_max_position_embeddings
    if model.position_embedding_type == "yarn":
        return {"rope_type": "yarn", "factor": model.yarn_factor, LENGTH: original,
                "beta_fast": model.yarn_beta_fast, "beta_slow": model.yarn_beta_slow,
                "truncate": model.yarn_correction_range_round_to_int, **_amplitude_settings(model)}
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3,
                LENGTH: original or LLAMA3_LENGTH}
    if model.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if model.rotary_ntk_factor is not None and original == model.positions:
        return {"rope_type": "dynamic", "factor": model.rotary_ntk_factor}
    return {"rope_type": "default"}


def _amplitude_settings(model: ModelConfig) -> dict[str, float]:
    weights = model.yarn_mscale, model.yarn_mscale_all_dim
    if weights == (1.0, 0.0):
        return {}
    if all(weights):
        return {"mscale": weights[0], "mscale_all_dim": weights[1]}
    return {"attention_factor": rotary_scalings(model)[0].amplitude}
