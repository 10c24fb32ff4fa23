"""Flags and files of other programs: the declaration of the feature."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...features import Feature, Later

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


def scaled_weights(config: Any) -> Iterator[str]:
    """MindSpeed-LLM's --norm-topk-prob divides scaled weights by their sum, or scales the quotient, by router."""
    source = config.sources.get("model.moe_router_pre_softmax")
    is_word = source is not None and source.name == "--norm-topk-prob"
    if is_word and config.model.moe_router_topk_scaling_factor is not None:
        yield (
            "--norm-topk-prob with [moe_router_topk_scaling_factor]: of some routers it undoes the factor. Remove it, "
            "and with --moe-router-load-balancing-type aux_loss also the factor."
        )


FEATURES = [
    Feature(
        "dialects",
        implies=implied,
        rules=[scaled_weights],
        provides={
            "foreign json": own(".deepspeed_json:load_json"),
            "foreign words": own(".installed_words:WORDS"),
        },
    )
]
