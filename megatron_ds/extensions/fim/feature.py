"""Fill in the middle: the declaration of the feature."""

from functools import partial
from typing import Any

from ...features import ChangedSamples, Feature, Later, rules_if
from .options import FimOptions

own = partial(Later, __package__)
IN_IDENTITY = (
    "fim_rate",
    "fim_spm_rate",
    "fim_split_sample",
    "fim_fragment_rate",
    "fim_no_prefix",
    "fim_prefix_token",
    "fim_middle_token",
    "fim_suffix_token",
)


def identity(config: Any) -> dict[str, Any]:
    """Return the options that change what becomes of a document."""
    values = [getattr(config.data, name) for name in IN_IDENTITY]
    return {"fill_in_the_middle": values}


FEATURES = [
    Feature(
        "fim",
        extends={"data": FimOptions},
        rules=rules_if(lambda config: config.data.fim_data, own(".rules:documents")),
        samples=ChangedSamples(
            is_on=lambda config: config.data.fim_data,
            change=own(".fill_in_middle:rearranged"),
            identity=identity,
        ),
    )
]
