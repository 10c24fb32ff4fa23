"""Multi-latent attention: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if
from .latent_options import LatentOptions

own = partial(Later, __package__)
mixer = own(".latent_mixer:LATENT_MIXER")
implied = own(".latent_rules:implied")
settled = own(".latent_rules:settled")


def _is_on(config: Any) -> bool:
    return config.model.multi_latent_attention


def _mixer(model: Any, block: int) -> Any | None:
    return mixer.load() if model.multi_latent_attention else None


def _if_on(part: Later) -> Any:
    return lambda config: part(config) if _is_on(config) else {}


FEATURES = [
    Feature(
        "latent_attention",
        extends={"model": LatentOptions},
        implies=_if_on(implied),
        settles=_if_on(settled),
        rules=rules_if(
            _is_on,
            own(".latent_rules:latent_positions"),
            own(".latent_rules:latent_composition"),
        ),
        mixer=_mixer,
    )
]
