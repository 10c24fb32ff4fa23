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
        provides={
            "adapted layers": own(".adapted_layers:with_adapters"),
            "adapter merge": own(".merging:merged"),
            "adapter norms": own(".merging:row_norms"),
            "adapter options": own(".lora_options:LoraConfig"),
            "adapter targets": own(".lora_targets:TARGETS"),
        },
    )
]
