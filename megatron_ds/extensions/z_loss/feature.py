"""The z-loss of the softmax over the vocabulary: the declaration of the feature."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...config.options.option import option
from ...features import Feature, Later, Objective, rules_if

own = partial(Later, __package__)


@dataclass(frozen=True)
class ZLossConfig:
    """Off unless --z-loss-strength is above 0."""

    z_loss_strength: float = option(
        0.0,
        at_least=0,
        help="Weight A of the z-loss: the loss of a token is its cross entropy + A × log² Z, where Z is the sum of the "
        "exponentials of its logits (PaLM, 1e-4).",
        avoid="It is for runs whose logits drift. Evaluations have the cross entropy alone.",
    )


def _is_on(config: Any) -> bool:
    return config.of(ZLossConfig).z_loss_strength > 0


FEATURES = [
    Feature(
        "z_loss",
        title="z-loss",
        options=ZLossConfig,
        rules=rules_if(_is_on, own(".rules:normalized")),
        objective=Objective(is_on=_is_on, loss=own(".normalized_loss:normalized_loss")),
    )
]
