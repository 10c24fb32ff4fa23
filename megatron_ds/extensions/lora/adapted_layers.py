"""The layers of a model, frozen, with adapters beside their linear layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...errors import ConfigError
from ...models.layer import Layer
from ...moe.experts import GroupedLinear
from ...mpu.context import ParallelContext
from ...tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from .adapter import AdaptedExperts, AdaptedLinear
from .lora_options import LoraConfig
from .targets import TARGETS

# A layer of a block, or of its experts: (module that has it, name in that module, the layer).
Place = tuple[nn.Module, str, nn.Module]


def with_adapters(
    layers: Sequence[Layer], settings: LoraConfig, ctx: ParallelContext
) -> list[Layer]:
    """The layers, whose weights are frozen, with the adapters of the options."""
    return [
        replace(layer, make=partial(_adapted, layer, settings, ctx)) for layer in layers
    ]


def _adapted(
    layer: Layer, settings: LoraConfig, ctx: ParallelContext, *tied: torch.Tensor
) -> nn.Module:
    module = layer.make(*tied)
    module.requires_grad_(False)
    if layer.is_block:
        for parent, name, linear in list(_linear_layers(module)):
            if parts := _parts_of(name, settings.targets):
                adapted = _with_adapter(linear, parts, settings, ctx)
                setattr(parent, name, adapted)
    return module


def _linear_layers(block: nn.Module) -> Iterator[Place]:
    kinds = (ColumnParallelLinear, RowParallelLinear, GroupedLinear)
    for parent in block.modules():
        for name, child in parent.named_children():
            if isinstance(child, kinds):
                yield parent, name, child


def _parts_of(layer: str, targets: Sequence[str]) -> list[int | None]:
    """The parts of a layer's rows that have an adapter each; [] for none, [None] for one of all rows."""
    parts = [TARGETS[name].part for name in targets if TARGETS[name].layer == layer]
    return [None] if None in parts else parts


def _with_adapter(
    linear: nn.Module,
    parts: Sequence[int | None],
    settings: LoraConfig,
    ctx: ParallelContext,
) -> nn.Module:
    rank = settings.lora_rank
    scale = settings.scale
    if isinstance(linear, GroupedLinear):
        return AdaptedExperts(linear, rank, scale, ctx)
    return AdaptedLinear(linear, parts, rank, scale, ctx)
