"""Optimizers whose ranks exchange one bit for each element: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later
from .options import OneBitOptions

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "onebit",
        registers={
            "optimizer": {
                "onebit_adam": f"{__package__}.adam",
                "onebit_lamb": f"{__package__}.lamb",
                "zero_one_adam": f"{__package__}.zero_one_adam",
            }
        },
        rules=(own(".rules:one_bit"),),
        extends={"optimizer": OneBitOptions},
        optimizers={
            "onebit_adam": own(".facts:ONE_BIT_ADAM"),
            "zero_one_adam": own(".facts:ZERO_ONE_ADAM"),
            "onebit_lamb": own(".facts:ONE_BIT_LAMB"),
        },
    )
]
