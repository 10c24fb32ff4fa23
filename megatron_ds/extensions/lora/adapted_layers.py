"""The layers of a model, frozen, with adapters beside their linear layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...config import RunConfig
from ...config.options.model import ModelConfig
from ...errors import ConfigError
from ...models.layer import Layer, LayerFlops
from ...models.mixers import SELF_ATTENTION, Mixer, mixer_of, mixers_of
from ...moe.experts import GroupedLinear
from ...moe.mixture import MixtureOfExperts
from ...mpu.context import ParallelContext
from ...mpu.managed_parameter import spec_of
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from .adapter import AdaptedExperts, AdaptedLinear, AdapterForm, Linear
from .adapter_dropout import AdapterDropout, BatchUnderWay, ExpertDropout, TokenKeys
from .dora import DoraExperts, DoraLinear
from .options import LoraConfig
from .targets import FEED_FORWARD, TARGETS, Target

# A layer of a block, or of its experts: (module that has it, name in that module, the layer).
Place = tuple[nn.Module, str, Linear | GroupedLinear]


def adapted_layers(
    layers: list[Layer], config: RunConfig, ctx: ParallelContext
) -> list[Layer]:
    """Return the layers of a run, with adapters where the options ask for them."""
    settings = config.of(LoraConfig)
    if not settings.is_on:
        return layers
    return with_adapters(layers, settings, config.model, ctx)


def with_adapters(
    layers: Sequence[Layer],
    settings: LoraConfig,
    model: ModelConfig,
    ctx: ParallelContext,
) -> list[Layer]:
    """Return the layers, whose weights are frozen, with the adapters of the options."""
    _check_targets(model, settings.targets)
    blocks = iter(enumerate(model.experts))
    adapted = []
    for layer in layers:
        channels = 0
        if layer.is_block:
            number, experts = next(blocks)
            mixer = mixer_of(model, number)
            channels = adapted_channels(model, experts, settings.targets, mixer)
        made = partial(_adapted, layer, settings, ctx)
        flops = partial(_flops, layer, settings.rank * channels)
        adapted.append(replace(layer, make=made, flops=flops))
    return adapted


def _flops(
    layer: Layer, weights_of_token: int, seq_length: int, vocab_size: int
) -> LayerFlops:
    """FLOPs of the layer without the gradients of its weights, and of its adapters.

    weights_of_token: weights of adapters that a token is multiplied with
    """
    own = layer.flops(seq_length, vocab_size)
    return replace(
        own,
        weights=6.0 * seq_length * weights_of_token,
        frozen=own.weights * 2 / 3,
    )


def _check_targets(model: ModelConfig, targets: Sequence[str]) -> None:
    """Raise ConfigError for a target that no block has, which would have no adapter."""
    present = set(FEED_FORWARD)
    for mixer in mixers_of(model):
        present.update(mixer.linear_layers(model))
    for name in targets:
        if TARGETS[name].layer not in present:
            raise ConfigError(
                f"--lora-target-modules names {name}, and blocks of this model have {', '.join(sorted(present))}. "
                "Name some of these."
            )


def adapted_channels(
    model: ModelConfig,
    experts: int,
    targets: Sequence[str],
    mixer: Mixer = SELF_ATTENTION,
) -> int:
    """Channels into and out of the adapters that a token passes in a block; experts: 0 for a dense block."""
    h = model.hidden_size
    up = 2 if model.is_gated else 1
    of_width = {
        "linear_fc1": lambda f: h + up * f,
        "linear_fc2": lambda f: f + h,
        "gate_proj": lambda f: h + f,
        "up_proj": lambda f: h + f,
        "down_proj": lambda f: f + h,
    }
    # A token passes the experts that its router chooses, and what all tokens pass.
    widths = [model.ffn_size]
    if experts:
        widths = [model.expert_ffn_size] * model.moe_router_topk
        widths += [width for width in (model.dense_width,) if width]
    total = 0
    for name in targets:
        if name in of_width and not mixer.has_feed_forward:
            continue
        if name in of_width:
            total += sum(map(of_width[name], widths))
        else:
            total += _channels_of_mixer(model, TARGETS[name], mixer)
    return total


def _channels_of_mixer(model: ModelConfig, target: Target, mixer: Mixer) -> int:
    """Return the channels of a layer of attention, or of a part of its rows; 0 in a block without it."""
    layers = mixer.linear_layers(model)
    if target.layer not in layers:
        return 0
    into, out = layers[target.layer]
    if target.part is None:
        return into + out
    keys = model.query_groups * model.head_dim
    parts = (model.num_attention_heads * model.head_dim, keys, keys)
    return into + parts[target.part]


def _adapted(
    layer: Layer, settings: LoraConfig, ctx: ParallelContext, *tied: torch.Tensor
) -> nn.Module:
    module = layer.make(*tied)
    module.requires_grad_(False)
    if not layer.is_block:
        return module
    under_way = BatchUnderWay()
    if settings.lora_dropout:
        under_way.follow(module)
        feed_forward = getattr(module, "mlp", None)
        if isinstance(feed_forward, MixtureOfExperts):
            feed_forward.token_keys = TokenKeys(ctx)
    for parent, name, linear in list(_linear_layers(module)):
        if parts := _parts_of(name, settings.targets):
            adapted = _with_adapter(linear, parts, settings, ctx, under_way)
            setattr(parent, name, adapted)
    return module


def _linear_layers(block: nn.Module) -> Iterator[Place]:
    kinds = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, GroupedLinear)
    for parent in block.modules():
        for name, child in parent.named_children():
            if isinstance(child, kinds):
                yield parent, name, child


def _parts_of(layer: str, targets: Sequence[str]) -> list[int | None]:
    """Return the parts of a layer's rows that have an adapter each; [] for none, [None] for one of all rows."""
    parts = [TARGETS[name].part for name in targets if TARGETS[name].layer == layer]
    return [None] if None in parts else parts


def _with_adapter(
    linear: Linear | GroupedLinear,
    parts: Sequence[int | None],
    settings: LoraConfig,
    ctx: ParallelContext,
    under_way: BatchUnderWay,
) -> nn.Module:
    form = AdapterForm(settings.rank, settings.scale, ctx, tuple(parts))
    if isinstance(linear, GroupedLinear):
        of_experts = DoraExperts if settings.use_dora else AdaptedExperts
        drop = _expert_dropout(linear, settings, ctx)
        return of_experts(linear, replace(form, drops=(drop,)))
    # Adapters of one layer drop different elements of its input.
    weight = spec_of(linear.get_parameter("weight"))
    width = weight.shape[1] if isinstance(linear, RowParallelLinear) else None
    drops = []
    for part in parts:
        site = f"{weight.name}.lora.{part}"
        drops.append(AdapterDropout(settings.lora_dropout, site, width, ctx, under_way))
    kind = DoraLinear if settings.use_dora else AdaptedLinear
    return kind(linear, replace(form, drops=tuple(drops)))


def _expert_dropout(
    linear: GroupedLinear, settings: LoraConfig, ctx: ParallelContext
) -> ExpertDropout:
    weight = linear.weight.spec
    local = len(linear.weight)
    first = ctx.group("ep").rank * local
    cut = weight.tensor_split
    assert cut is not None, "weights of experts are divided over tensor-parallel ranks"
    return ExpertDropout(
        settings.lora_dropout,
        f"{weight.name}.lora",
        weight.shape[0],
        range(first, first + local),
        cut.dim == 2,
        ctx,
    )
