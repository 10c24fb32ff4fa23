"""Optimizers whose ranks exchange one bit for each element: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

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
        provides={
            "optimizer options": own(".options:OneBitOptions"),
            "optimizer facts": own(".facts:FACTS"),
        },
    )
]
