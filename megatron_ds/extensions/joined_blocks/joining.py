"""Which blocks of a model run as two functions and their attention: those where these compute what the layers do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from ...config import RunConfig
from ...models.block import Block, in_sequence
from ...models.layer import Layer
from ...mpu.context import ParallelContext


def with_joined_blocks(
    layers: Sequence[Layer], config: RunConfig, ctx: ParallelContext
) -> list[Layer]:
    """Return the layers, in which blocks of the form that can be joined run so."""
    return [
        replace(layer, make=partial(_build, layer.make)) if layer.is_block else layer
        for layer in layers
    ]


def _build(make: Callable[[], nn.Module]) -> nn.Module:
    module = make()
    for block in module.modules():
        if isinstance(block, Block) and _is_joinable(block):
            from .joined_run import JoinedRun

            block.run = JoinedRun()
    return module


def _is_joinable(block: Block) -> bool:
    drops = block.attention_dropout.p or block.mlp_dropout.p
    if drops or block.run is not in_sequence:
        return False
    from .joinable_layers import joinable_layers

    return joinable_layers(block) is not None
