"""Several predicted tokens: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .options import PredictionOptions

own = partial(Later, __package__)
PREDICTING = own(".predicting_layers:predicting_layers")


class FurtherDepths:
    """What the options make of the layers of a GPT (`models.gpt.FURTHER`)."""

    fields = ("mtp_num_layers",)

    def layers(self, layers: list, config: Any, ctx: Any) -> list:
        """Return the layers, whose head has the depths that the options ask for."""
        return PREDICTING(layers, config, ctx) if config.mtp_num_layers else layers


FURTHER = FurtherDepths()


FEATURES = [
    Feature(
        "token_predictions",
        extends={"model": PredictionOptions},
        rules=rules_if(
            lambda config: config.model.mtp_num_layers,
            own(".rules:models"),
            own(".rules:positions"),
            own(".rules:lengths"),
            own(".rules:divided"),
            own(".rules:objectives"),
        )
        + rules_if(
            lambda config: config.parallel.pipeline_layout, own(".rules:stages")
        ),
        provides={"further layers": own(".feature:FURTHER")},
    )
]
