"""The text before the first step: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [Feature("startup", described=own(".startup_text:describe"))]
