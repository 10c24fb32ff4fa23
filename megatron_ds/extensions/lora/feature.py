"""Adapters of low rank: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later, rules_if
from .options import NOUN, LoraConfig

own = partial(Later, __package__)

FEATURES = [
    Feature(
        NOUN,
        title="Adapters (LoRA)",
        options=LoraConfig,
        is_on=lambda config: config.of(LoraConfig).is_on,
        rules=rules_if(
            lambda config: config.of(LoraConfig) != LoraConfig(),
            own(".rules:targets"),
            own(".rules:dropout"),
            own(".rules:frozen_weights"),
        ),
        layers=own(".adapted_layers:adapted_layers"),
        added=lambda config: config.of(LoraConfig).added,
        unloadable=own(".saved_adapters:unloadable"),
        provides={
            "adapter merge": own(".merging:merged"),
            "adapter norms": own(".merging:row_norms"),
            "adapter targets": own(".targets:TARGETS"),
        },
    )
]
