"""Mixers with a state of constant size: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .mixer_options import MixerOptions

own = partial(Later, __package__)


MIXER = own(".layer_mixers:mixer_of_block")


def _has_mixers(model: Any) -> bool:
    return (
        model.attention_output_gate
        or model.norms_behind_attention
        or model.qk_layernorm_of_all_heads
        or model.mixer_pattern is not None
        or model.linear_attention_freq is not None
    )


def _is_on(config: Any) -> bool:
    return _has_mixers(config.model)


def _mixer(model: Any, block: int) -> Any | None:
    """Return the mixer of a block, without loading its module for models that have none."""
    return MIXER(model, block) if _has_mixers(model) else None


def _implied(config: Any) -> dict[str, tuple[Any, str]]:
    """Return which layers have experts, by the pattern."""
    pattern = config.model.mixer_pattern or ""
    if "E" not in pattern:
        return {}
    layers = [int(letter == "E") for letter in pattern]
    return {"model.moe_layer_freq": (str(layers), "--mixer-pattern")}


FEATURES = [
    Feature(
        "mixers",
        extends={"model": MixerOptions},
        implies=_implied,
        mixer=_mixer,
        rules=rules_if(
            _is_on,
            own(".mixer_rules:kinds"),
            own(".mixer_rules:halves"),
            own(".mixer_rules:heads"),
            own(".mixer_rules:factors"),
            own(".mixer_rules:norms"),
            own(".mixer_rules:others"),
        ),
    )
]
