"""Blocks whose layers are launched as one: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature("joined_blocks", layers=own(".joining:with_joined_blocks")),
]
