"""Optimizers besides Adam and SGD: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later
from .options import OptimizerOptions

own = partial(Later, __package__)
NAMES = ("adagrad", "ademamix", "lamb", "lion", "muon")

FEATURES = [
    Feature(
        "optimizers",
        extends={"optimizer": OptimizerOptions},
        registers={
            "optimizer": {
                **{name: f"{__package__}.{name}" for name in NAMES},
                "dist_muon": "muon",
            }
        },
        optimizers={name: own(f".facts:{name.upper()}") for name in NAMES},
        provides={"optimizer classes": own(".classes")},
    )
]
