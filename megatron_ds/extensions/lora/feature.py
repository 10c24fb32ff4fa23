"""Adapters of low rank: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "lora",
        rules=(
            own(".lora_rules:targets"),
            own(".lora_rules:dropout"),
            own(".lora_rules:frozen_weights"),
        ),
    )
]
