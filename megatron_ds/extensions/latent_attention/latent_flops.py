"""FLOPs of blocks in which context-parallel ranks gather latents: each rank projects those of all ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ...config.run import RunConfig
from ...models.layer import Layer
from ...models.mixers import mixer_of
from ...mpu.context import ParallelContext
from ...planning.made_flops import with_made
from .latent_sizes import sends_latents

UP = "linear_kv_up_proj"


def with_projections(
    layers: Sequence[Layer], config: RunConfig, ctx: ParallelContext
) -> list[Layer]:
    """Return the layers; of those blocks with other FLOPs."""
    if ctx.cp.size == 1 or _is_adapted(config):
        return list(layers)
    return [*_changed(layers, config, ctx)]


def _changed(
    layers: Sequence[Layer], config: RunConfig, ctx: ParallelContext
) -> Iterator[Layer]:
    model = config.model
    number = 0
    for layer in layers:
        if not layer.is_block:
            yield layer
            continue
        of_block = mixer_of(model, number).linear_layers(model)
        kind = ctx.comm_type(number)
        number += 1
        if UP in of_block and sends_latents(model, ctx.tp.size, ctx.cp.size, kind):
            weights = math.prod(of_block[UP])
            made = partial(with_made, layer.flops, weights, ctx.cp.size)
            layer = replace(layer, flops=made)
        yield layer


def _is_adapted(config: RunConfig) -> bool:
    """Return whether the projection has adapters, which are of the tokens of their rank: keys and values travel."""
    if config.get("adapters.lora_rank") is None:
        return False
    return UP in config.get("adapters.lora_target_modules")
