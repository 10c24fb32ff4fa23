"""Flags and files of other programs: the declaration of the feature."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...features import Feature, Later

own = partial(Later, __package__)
STAGE = "zero.stage"
OFFLOAD = "zero.offload_optimizer"


def offloaded(config: Any) -> Mapping[str, tuple[Any, str]]:
    """Return the stage of ZeRO that Megatron's --optimizer-cpu-offload needs here, where no stage is given.

    Stages 0 and 1 have the same numbers; offloaded state is split over the data-parallel ranks here.
    """
    source = config.sources.get(OFFLOAD)
    is_switch = source is not None and source.name == "--optimizer-cpu-offload"
    if not is_switch or STAGE in config.sources:
        return {}
    return {STAGE: (1, source.name)}


FEATURES = [
    Feature(
        "dialects",
        implies=offloaded,
        provides={
            "foreign json": own(".deepspeed_json:load_json"),
            "foreign words": own(".installed_words:WORDS"),
        },
    )
]
