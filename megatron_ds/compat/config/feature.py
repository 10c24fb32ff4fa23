"""Flags and files of other programs: the declaration of the feature."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...features import Feature, Later, rules_if

own = partial(Later, __package__)
STAGE = "zero.stage"
OFFLOAD = "zero.offload_optimizer"
FREQUENCY = "model.moe_layer_freq"
INTERVAL = "model.expert_interval"


def implied(config: Any) -> Mapping[str, tuple[Any, str]]:
    """Return what words of other programs mean where nothing else is given.

    --optimizer-cpu-offload  stage 1 of ZeRO, which has the numbers of stage 0: offloaded state is split over the
                             data-parallel ranks here
    --num-experts A B …      numbers for half of the layers are for every second one, the default of
                             Megatron-DeepSpeed, which alone has several numbers
    """
    found: dict[str, tuple[Any, str]] = {}
    source = config.sources.get(OFFLOAD)
    if source is not None and source.name == "--optimizer-cpu-offload":
        found[STAGE] = (1, source.name)
    numbers = config.model.num_experts or ()
    is_half = config.model.num_layers == 2 * len(numbers)
    if len(numbers) > 1 and is_half and FREQUENCY not in config.sources:
        found[INTERVAL] = (2, "--num-experts for half of the layers")
    return found


def _sums_to_one(config: Any) -> bool:
    source = config.sources.get("model.moe_router_pre_softmax")
    return source is not None and source.name == "--norm-topk-prob"


FEATURES = [
    Feature(
        "dialects",
        implies=implied,
        rules=rules_if(_sums_to_one, own(".block_words:scaled_weights")),
        provides={
            "foreign json": own(".deepspeed_json:load_json"),
            "foreign words": own(".dialects:WORDS"),
        },
    )
]
