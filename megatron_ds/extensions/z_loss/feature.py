"""The z-loss of the softmax over the vocabulary: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, Objective, rules_if
from .options import ZLossConfig

own = partial(Later, __package__)


def _is_on(config: Any) -> bool:
    return config.of(ZLossConfig).is_on


FEATURES = [
    Feature(
        "z_loss",
        title="z-loss",
        options=ZLossConfig,
        rules=rules_if(_is_on, own(".rules:normalized")),
        objective=Objective(is_on=_is_on, loss=own(".normalized_loss:normalized_loss")),
    )
]
