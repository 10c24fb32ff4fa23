"""Goldfish loss: the declaration of the feature."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...config.options.need import need
from ...config.options.option import option
from ...features import ChangedSamples, Feature, Later, rules_if

own = partial(Later, __package__)
GOLDFISH = need("data.goldfish_loss")


@dataclass(frozen=True)
class GoldfishOptions:
    """Names and defaults are those of swiss-ai's fork of Megatron-LM."""

    goldfish_loss: bool = option(
        False,
        help="Leave one token in --goldfish-k out of the loss, always the same after the same tokens, so that the "
        "model cannot repeat long passages of its corpus.",
        avoid="Fewer tokens count in a step.",
    )
    goldfish_k: int = option(
        50,
        at_least=1,
        needs=GOLDFISH,
        help="One token in K does not count (in the mean over all contexts).",
    )
    goldfish_h: int = option(
        50,
        at_least=1,
        unit="tokens",
        needs=GOLDFISH,
        help="Length of the context that decides, the token itself included.",
        avoid="A short context treats the ends of common phrases alike in all texts.",
    )


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
