"""Several predicted tokens: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .options import PredictionOptions

own = partial(Later, __package__)
PREDICTING = own(".predicting_layers:predicting_layers")


def model_layers(layers: list, config: Any, ctx: Any) -> list:
    """Return the layers of a GPT, whose head has the depths that the options ask for."""
    return PREDICTING(layers, config, ctx) if config.mtp_num_layers else layers


FEATURES = [
    Feature(
        "token_predictions",
        extends={"model": PredictionOptions},
        rules=rules_if(
            lambda config: config.model.mtp_num_layers,
            own(".rules:models"),
            own(".rules:positions"),
            own(".rules:lengths"),
            own(".rules:objectives"),
        ),
        model_layers=model_layers,
        model_fields=("mtp_num_layers",),
    )
]
