"""Curricula and random-LTD: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "data_efficiency",
        rules=(
            own(".data_efficiency_rules:lengths"),
            own(".data_efficiency_rules:samples"),
            own(".data_efficiency_rules:folding"),
            own(".data_efficiency_rules:kept_tokens"),
            own(".data_efficiency_rules:dropping_blocks"),
            own(".data_efficiency_rules:divided_tokens"),
        ),
    )
]
