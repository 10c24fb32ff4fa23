"""Recipes of other programs: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature(
        "recipes",
        provides={"recipe configuration": own(".verdict:config_of_recipe")},
    )
]
