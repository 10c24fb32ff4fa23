"""Optimizers whose ranks exchange one bit for each element: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later
from .options import OneBitOptions

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "onebit",
        registers={"optimizer": f"{__package__}.registered"},
        rules=(own(".rules:one_bit"),),
        extends={"optimizer": OneBitOptions},
        optimizers=own(".facts:facts"),
    )
]
