"""Checkpoints of other programs: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "conversion",
        provides={
            "foreign checkpoints": own(".foreign_start:CHECKPOINTS"),
        },
    )
]
