"""Rotary positions in `config.json` of Hugging Face ↔ options of our models: base, share of a head, scaling.

    their rope_type    our options
    default            none
    linear             rotary_seq_len_interpolation_factor
    dynamic            rotary_ntk_factor, original_max_position_embeddings
    yarn               position_embedding_type yarn, yarn_*
    llama3             use_rope_scaling, rope_scaling_factor

The order of transformers 5: rope_scaling, if it is there and not empty, replaces rope_parameters as a whole.
Then a value of that table comes before the one beside it: rope_theta and partial_rotary_factor, which in
gpt_neox are rotary_emb_base and rotary_pct. original_max_position_embeddings beside the table comes before
that in it. The older spelling of rope_type is type.

Dynamic NTK of transformers follows the longest position of each batch; ours is that of all positions of the
model (`models.attention.scaled_rotary_base`). Up to their max_position_embeddings both are default; a model
of ours that was lengthened has another base for all lengths, and is written so.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ....models.attention import rotary_scalings, scaled_rotary_base

Settings = Mapping[str, Any]
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3_LENGTH = 8192
LENGTH = "original_max_position_embeddings"
THETA = "rope_theta"
SHARE = "partial_rotary_factor"
BESIDE = {THETA: THETA, SHARE: SHARE}
BESIDE_IN_NEOX = {THETA: "rotary_emb_base", SHARE: "rotary_pct"}
USUAL = {THETA: 10000.0, SHARE: 1.0}


def rope_table(settings: Settings) -> tuple[str, Settings]:
    """Return the name and the values of the table of rotary settings that is in force. Raises CheckpointError for
    a table whose values differ between layers."""
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    rope = settings.get(name) or {}
    if not isinstance(rope, Mapping) or any(
        isinstance(value, Mapping) for value in rope.values()
    ):
        raise CheckpointError(
            f"{name} is {rope!r}: other rotary positions in some layers are not computed"
        )
    return name, rope


def rotary_options(settings: Settings, defaults: Settings) -> dict[str, Any]:
    """Return our options. defaults: values of absent settings; those of models that rotate a part of each head have
    partial_rotary_factor. Raises CheckpointError for what is not computed."""
    name, rope = rope_table(settings)
    is_neox = settings.get("model_type") == "gpt_neox"
    beside = BESIDE_IN_NEOX if is_neox else BESIDE
    values = {
        ours: rope.get(ours, settings.get(theirs, defaults.get(ours, USUAL[ours])))
        for ours, theirs in beside.items()
    }
    base = _positive(values, THETA, name)
    share = _positive(values, SHARE, name)
    if share != 1 and SHARE not in defaults:
        raise CheckpointError(
            f"partial_rotary_factor is {share}, and models of this type rotate whole heads"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in READERS:
        raise CheckpointError(
            f"rope_type is {kind!r}, and this package computes "
            f"{', '.join(map(repr, READERS))}"
        )
    return {
        "rotary_base": base,
        "rotary_percent": share,
        **READERS[kind](rope, settings),
    }


def _positive(values: Settings, key: str, where: str) -> float:
    """Return a number above 0. Raises CheckpointError. transformers computes with no other."""
    value = values.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
    ):
        what = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(f"{where}: {key} {what}; it must be a number above 0")
    return float(value)


def _linear(rope: Settings, settings: Settings) -> dict[str, Any]:
    return {
        "rotary_seq_len_interpolation_factor": _positive(
            rope, "factor", "rope_type linear"
        )
    }


def _dynamic(rope: Settings, settings: Settings) -> dict[str, Any]:
    return {
        "rotary_ntk_factor": _positive(rope, "factor", "rope_type dynamic"),
        LENGTH: int(settings["max_position_embeddings"]),
    }


def _yarn(rope: Settings, settings: Settings) -> dict[str, Any]:
    longest = settings["max_position_embeddings"]
    original = settings.get(LENGTH) or rope.get(LENGTH) or longest
    # null means the ratio of the two lengths.
    is_given = rope.get("factor", "absent") is not None
    factor = (
        _positive(rope, "factor", "rope_type yarn") if is_given else longest / original
    )
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        LENGTH: int(original),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        **_amplitude(rope, factor),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


def _amplitude(rope: Settings, factor: float) -> dict[str, float]:
    """Return our two weights of ln(factor): from attention_factor, or from mscale and mscale_all_dim, which count
    only together."""
    given = rope.get("attention_factor")
    mscale = rope.get("mscale")
    divisor = rope.get("mscale_all_dim")
    if given is None and mscale and divisor:
        return {"yarn_mscale": float(mscale), "yarn_mscale_all_dim": float(divisor)}
    if given is None:
        return {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}
    if factor <= 1 and given != 1:
        raise CheckpointError(
            f"attention_factor is {given} with factor {factor}, and this package computes "
            "1 for sequences that are not lengthened"
        )
    weight = (given - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0
    return {"yarn_mscale": round(weight, 12), "yarn_mscale_all_dim": 0.0}


def _llama3(rope: Settings, settings: Settings) -> dict[str, Any]:
    if odd := [
        f"{name} {rope.get(name)}"
        for name, value in LLAMA3.items()
        if rope.get(name) != value
    ]:
        raise CheckpointError(
            f"rope_type llama3 has {' and '.join(odd)}, and this package computes "
            f"{', '.join(f'{name} {value}' for name, value in LLAMA3.items())}"
        )
    length = (
        settings.get(LENGTH) or rope.get(LENGTH) or settings["max_position_embeddings"]
    )
    found = {
        "use_rope_scaling": True,
        "rope_scaling_factor": _positive(rope, "factor", "rope_type llama3"),
    }
    return found if length == LLAMA3_LENGTH else found | {LENGTH: int(length)}


READERS: dict[str, Callable[[Settings, Settings], dict[str, Any]]] = {
    "default": lambda rope, settings: {},
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}


def rotary_settings(model: ModelConfig, is_partial: bool) -> dict[str, Any]:
    """Return their settings, in the spellings of transformers 4 and 5. is_partial: the share of a head is written"""
    scaling = _scaling(model)
    share = (
        {"partial_rotary_factor": model.rotary_percent}
        if is_partial or model.rotary_percent != 1
        else {}
    )
    base = (
        model.rotary_base
        if scaling["rope_type"] == "dynamic"
        else scaled_rotary_base(model)
    )
    found = {
        "rope_theta": base,
        **share,
        "rope_parameters": {"rope_theta": base, **share, **scaling},
    }
    if share:
        found |= {"rotary_pct": model.rotary_percent, "rotary_emb_base": base}
    if scaling["rope_type"] != "default":
        found["rope_scaling"] = scaling
    return found


def _scaling(model: ModelConfig) -> dict[str, Any]:
    original = model.original_max_position_embeddings
    # Each rope_type of transformers has keys of its own.
    if model.position_embedding_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": model.yarn_factor,
            LENGTH: original,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "truncate": model.yarn_correction_range_round_to_int,
            **_amplitude_settings(model),
        }
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            **LLAMA3,
            LENGTH: original or LLAMA3_LENGTH,
        }
    if model.rotary_seq_len_interpolation_factor:
        return {
            "rope_type": "linear",
            "factor": model.rotary_seq_len_interpolation_factor,
        }
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
