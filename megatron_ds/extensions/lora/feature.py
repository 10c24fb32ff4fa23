"""Adapters of low rank: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "lora",
        rules=(
            own(".rules:targets"),
            own(".rules:dropout"),
            own(".rules:frozen_weights"),
        ),
        provides={
            "adapted layers": own(".adapted_layers:with_adapters"),
            "adapter merge": own(".merging:merged"),
            "adapter norms": own(".merging:row_norms"),
            "adapter options": own(".options:LoraConfig"),
            "adapter targets": own(".targets:TARGETS"),
        },
    )
]
