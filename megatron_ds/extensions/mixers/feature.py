"""Mixers with a state of constant size: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .mixer_options import MixerOptions

own = partial(Later, __package__)


def _is_on(config: Any) -> bool:
    model = config.model
    return bool(
        model.hybrid_layer_pattern
        or model.linear_attention_freq
        or model.attention_output_gate
    )


def _implied(config: Any) -> dict[str, tuple[Any, str]]:
    """Return which layers have experts, as the pattern says."""
    pattern = config.model.hybrid_layer_pattern or ""
    if "E" not in pattern:
        return {}
    layers = [int(letter == "E") for letter in pattern]
    return {"model.moe_layer_freq": (str(layers), "--hybrid-layer-pattern")}


FEATURES = [
    Feature(
        "mixers",
        extends={"model": MixerOptions},
        implies=_implied,
        rules=rules_if(
            _is_on,
            own(".mixer_rules:kinds"),
            own(".mixer_rules:heads"),
            own(".mixer_rules:others"),
        ),
    )
]
