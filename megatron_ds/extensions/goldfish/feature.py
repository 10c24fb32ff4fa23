"""Goldfish loss: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import ChangedSamples, Feature, Later, rules_if
from .options import GoldfishOptions

own = partial(Later, __package__)


def _is_on(config: Any) -> bool:
    return config.data.goldfish_loss


def _identity(config: Any) -> dict[str, Any]:
    return {"goldfish": [config.data.goldfish_k, config.data.goldfish_h]}


FEATURES = [
    Feature(
        "goldfish",
        extends={"data": GoldfishOptions},
        rules=rules_if(_is_on, own(".rules:context")),
        samples=ChangedSamples(
            is_on=_is_on, change=own(".goldfish_dataset:forgetful"), identity=_identity
        ),
    )
]
