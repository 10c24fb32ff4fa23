"""Object stores: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)

FEATURES = [
    Feature("stores", provides={"object stores": own(".open_store:open_store")})
]
