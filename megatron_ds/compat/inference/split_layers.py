"""The division of a model over tensor-parallel ranks, in place: weights are cut, and hooks communicate.

Modules keep their classes. Each rank of the group must hold the same whole model before. Styles of split_plan.py:

    style                   cut            before              after
    colwise                 outputs
    rowwise                 inputs                             sum over the ranks
    colwise_gather_output   outputs                            concatenation of the ranks' outputs
    rowwise_split_input     inputs         this rank's slice   sum over the ranks
    packed_colwise          outputs of two layers in one tensor of experts
    moe_tp_experts                                             sum over the ranks
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...mpu.collectives import all_gather, shard
from ...mpu.group import Group
from ...mpu.regions import reduce_from_region
from .split_plan import (
    COLUMN,
    GATHERED,
    PACKED,
    ROW,
    SLICED,
    SUMMED,
    Plan,
    is_transposed,
)

# Linear layers with several layers in one: end of the name → their number.
FUSED = {"crossattention.c_attn": 2, "c_attn": 3, "Wqkv": 3}
# Attributes of an attention module that count heads, or columns, of this rank.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
)
# Arguments of an attention module with a value for each head: ALiBi, and masks that contain it.
BIASES = ("alibi", "position_bias", "attention_mask")
WIDTHS = ("split_size", "inner_dim", "all_head_size")


def split(model: nn.Module, plan: Plan, group: Group) -> None:
    """Divide the modules and parameters of the plan. Raises ConfigError where a size is not divisible."""
    modules = dict(model.named_modules())
    tied = _tied_weights(model)
    for name, style in plan.items():
        if name not in modules:
            owner, _, last = name.rpartition(".")
            _split_parameter(modules[owner], last, style, group)
        elif style == SUMMED:
            modules[name].register_forward_hook(partial(_sum, group))
        elif id(modules[name].weight) not in tied:
            _split_linear(name, modules[name], style, group)
    # A module that has lost columns has fewer heads.
    columns = {
        name.rpartition(".")[0] for name, style in plan.items() if style == COLUMN
    }
    for name in columns:
        _reduce_counts(modules[name], group)


def _tied_weights(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, which an output layer may share."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


# ---------------------------------------------------------------------- linear layers
def _split_linear(name: str, linear: nn.Module, style: str, group: Group) -> None:
    transposed = is_transposed(linear)
    is_column = style in (COLUMN, GATHERED)
    dim = int(is_column == transposed)
    fused = (parts for end, parts in FUSED.items() if f".{name}".endswith(f".{end}"))
    parts = next(fused, 1) if is_column else 1
    weight = _cut(name, linear.get_parameter("weight"), dim, parts, group)
    linear.weight = weight
    # Outputs have their own biases; a sum has the bias once.
    bias = linear.bias
    if isinstance(bias, torch.Tensor) and is_column:
        linear.bias = _cut(name, bias, 0, parts, group)
    elif isinstance(bias, torch.Tensor) and group.rank:
        linear.bias = _parameter(torch.zeros_like(bias), bias)
    inputs, outputs = weight.shape[:: 1 if transposed else -1]
    sizes = (
        {"nf": outputs}
        if transposed
        else {"in_features": inputs, "out_features": outputs}
    )
    for attribute, size in sizes.items():
        setattr(linear, attribute, size)
    if style == SLICED:
        linear.register_forward_pre_hook(partial(_slice_input, group))
    if after := {ROW: _sum, SLICED: _sum, GATHERED: _gather}.get(style):
        linear.register_forward_hook(partial(after, group))


def _split_parameter(owner: nn.Module, name: str, style: str, group: Group) -> None:
    """A tensor of experts: [experts, outputs, inputs]."""
    if style not in (PACKED, COLUMN, ROW):
        raise ConfigError(
            f"the parameter {name} of {type(owner).__name__} has the tensor-parallel style {style!r}, which is "
            "not available for experts. Give tp_size=1."
        )
    parameter = getattr(owner, name)
    dim = 2 if style == ROW else 1
    parts = 2 if style == PACKED else 1
    if getattr(owner, "is_transposed", False) or parameter.dim() != 3:
        raise ConfigError(
            f"the experts of {type(owner).__name__} have a layout that tensor parallelism does not know. Give "
            "tp_size=1, or use ZeRO stage 3 (docs/use/inference_engine.md)."
        )
    setattr(owner, name, _cut(name, parameter, dim, parts, group))


def _cut(
    name: str, value: torch.Tensor, dim: int, parts: int, group: Group
) -> nn.Parameter:
    """Return this rank's piece along `dim`, of each of equal `parts` in turn."""
    size = value.shape[dim]
    if size % (parts * group.size):
        raise ConfigError(
            f"{name} has {size} {'columns' if dim else 'rows'} in {parts} part(s), which {group.size} "
            "tensor-parallel ranks do not divide. Give a tp_size that does."
        )
    pieces = [shard(part, group, dim) for part in value.detach().chunk(parts, dim)]
    return _parameter(torch.cat(pieces, dim), value)


def _parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=like.requires_grad)


# ---------------------------------------------------------------------- counts of heads
def _reduce_counts(owner: nn.Module, group: Group) -> None:
    """Divide the counts of heads of an attention module, and the biases that it has for each of them."""
    counts = {
        name: count
        for name in (*HEADS, *WIDTHS)
        if isinstance(count := getattr(owner, name, None), int)
    }
    for name, count in counts.items():
        if count % group.size:
            raise ConfigError(
                f"{type(owner).__name__} has {name}={count}, which {group.size} tensor-parallel ranks do not "
                "divide. Give a tp_size that does."
            )
        setattr(owner, name, count // group.size)
    # Biases that it owns are cut now, those among its inputs at each call.
    heads = next((counts[name] for name in HEADS if name in counts), None)
    if heads is None:
        return
    for name, child in owner.named_children():
        if isinstance(child, nn.Embedding) and child.embedding_dim == heads:
            child.weight = _cut(name, child.weight, 1, 1, group)
            child.embedding_dim = heads // group.size
    owner.register_forward_pre_hook(
        partial(_slice_biases, group, heads), with_kwargs=True
    )


def _slice_biases(
    group: Group, heads: int, module: nn.Module, inputs: tuple, options: dict
) -> tuple[tuple, dict]:
    """Return this rank's heads of biases that the model made for all: [batch, heads, …] or [batch × heads, …]."""
    for name in BIASES:
        bias = options.get(name)
        if not torch.is_tensor(bias):
            continue
        if bias.dim() == 4 and bias.shape[1] == heads:
            options[name] = shard(bias, group, 1)
        elif bias.dim() == 3 and bias.shape[0] % heads == 0:
            options[name] = shard(bias.unflatten(0, (-1, heads)), group, 1).flatten(
                0, 1
            )
    return inputs, options


# ---------------------------------------------------------------------- hooks
def _sum(group: Group, module: nn.Module, inputs: Sequence, output: Any) -> Any:
    return reduce_from_region(output, group)


def _gather(group: Group, module: nn.Module, inputs: Sequence, output: Any) -> Any:
    return all_gather(output, group, output.dim() - 1)


def _slice_input(group: Group, module: nn.Module, inputs: Sequence) -> tuple:
    return shard(inputs[0], group, inputs[0].dim() - 1), *inputs[1:]
