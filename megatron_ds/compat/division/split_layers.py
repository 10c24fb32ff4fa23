"""The division of a model over tensor-parallel ranks, in place: parameters are cut, and hooks communicate.

Parameters stay the same objects, which optimizers hold. A cut one has Megatron's marks (`tensor_model_parallel`,
`partition_dim`, `partition_stride`), from which an engine makes its spec. Each rank of the group must hold the same
whole model before. Styles of split_plan.py:

    style                   cut            before              after
    colwise                 outputs        enter
    rowwise                 inputs                             sum over the ranks
    colwise_gather_output   outputs        enter               concatenation of the ranks' outputs
    rowwise_split_input     inputs         this rank's slice   sum over the ranks
    packed_colwise          outputs of two layers in one tensor of experts
    moe_tp_experts                         enter               sum over the ranks
    replicated_with_grad_allreduce         the gradient is a partial sum (mark `sequence_parallel`)

"enter": ranks compute different results from one input, whose gradient is the sum of theirs. Layers that share an
input (queries, keys and values) share the sum. Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...mpu.collectives import shard
from ...mpu.group import Group
from ...mpu.regions import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from .split_plan import (
    BASE,
    COLUMN,
    GATHERED,
    PACKED,
    PARTIAL,
    ROW,
    SLICED,
    SUMMED,
    Plan,
    is_transposed,
)
from .summed_linear import sum_before_bias

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
# Where a tensor keeps itself as the input of divided layers.
ENTERED = "entered_region"
WIDTHS = ("split_size", "inner_dim", "all_head_size")


def split(
    model: nn.Module,
    plan: Plan,
    group: Group,
    packed: Mapping[str, int] | None = None,
) -> None:
    """Divide the modules and parameters of the plan. Raises ConfigError where a size is not divisible.

    packed  name of a linear layer → the number of equal layers in it, where it is not known by its name
    """
    modules = dict(model.named_modules())
    tied = _tied_weights(model)
    parts = packed or {}
    for name, style in plan.items():
        module = modules.get(name)
        if style == PARTIAL:
            _mark_partial(model, name)
        elif module is None:
            owner, _, last = name.rpartition(".")
            _split_parameter(modules[owner], last, style, group)
        elif style == SUMMED:
            module.register_forward_pre_hook(
                partial(_enter_all, group), with_kwargs=True
            )
            module.register_forward_hook(partial(_sum, group))
        elif id(module.weight) not in tied:
            _split_linear(name, module, style, group, parts.get(name))
    # A module that has lost columns has fewer heads.
    columns = {
        name.removesuffix(f".{BASE}").rpartition(".")[0]
        for name, style in plan.items()
        if style == COLUMN
    }
    for name in columns:
        _reduce_counts(modules[name], group)


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether this rank has a piece of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def _tied_weights(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, which an output layer may share."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _mark_partial(model: nn.Module, name: str) -> None:
    """Mark the parameters of a module, or one parameter, whose gradients are sums over the ranks."""
    for at, parameter in model.named_parameters():
        if at == name or at.startswith(f"{name}."):
            mark_partial(parameter)


def mark_partial(parameter: torch.Tensor, is_partial: bool = True) -> None:
    """Mark whether the gradient of a whole parameter is a partial sum, as Megatron marks it."""
    vars(parameter)["sequence_parallel"] = is_partial


# ---------------------------------------------------------------------- linear layers
def _split_linear(
    name: str, linear: nn.Module, style: str, group: Group, packed: int | None
) -> None:
    # The cut.
    transposed = is_transposed(linear)
    is_column = style in (COLUMN, GATHERED)
    dim = int(is_column == transposed)
    parts = packed or layers_in(name)
    weight = linear.get_parameter("weight")
    cut(name, weight, dim, parts if is_column else 1, group)
    bias = linear.bias
    has_bias = isinstance(bias, torch.Tensor)
    if isinstance(bias, torch.Tensor) and is_column:
        cut(name, bias, 0, parts, group)
    inputs, outputs = weight.shape[:: 1 if transposed else -1]
    sizes = (
        {"nf": outputs}
        if transposed
        else {"in_features": inputs, "out_features": outputs}
    )
    for attribute, size in sizes.items():
        setattr(linear, attribute, size)
    # What comes before and after it.
    before = {COLUMN: _enter, GATHERED: _enter, SLICED: _slice_input}
    if hook := before.get(style):
        linear.register_forward_pre_hook(partial(hook, group))
    if style == GATHERED:
        linear.register_forward_hook(partial(_gather, group))
    elif not is_column and has_bias:
        sum_before_bias(name, linear, group)
    elif not is_column:
        linear.register_forward_hook(partial(_sum, group))


def layers_in(name: str) -> int:
    """Return the number of layers in a linear layer, by its name."""
    found = (parts for end, parts in FUSED.items() if f".{name}".endswith(f".{end}"))
    return next(found, 1)


def _split_parameter(owner: nn.Module, name: str, style: str, group: Group) -> None:
    """A tensor of experts: [experts, outputs, inputs]."""
    if style not in (PACKED, COLUMN, ROW):
        raise ConfigError(
            f"the parameter {name} of {type(owner).__name__} has the tensor-parallel style {style!r}, which is "
            "not available for experts. Give a tensor-parallel size of 1."
        )
    parameter = getattr(owner, name)
    dim = 2 if style == ROW else 1
    parts = 2 if style == PACKED else 1
    if getattr(owner, "is_transposed", False) or parameter.dim() != 3:
        raise ConfigError(
            f"the experts of {type(owner).__name__} have a layout that tensor parallelism does not know. Give "
            "a tensor-parallel size of 1, or use ZeRO stage 3 (docs/use/inference_engine.md)."
        )
    cut(name, parameter, dim, parts, group)


def cut(name: str, parameter: torch.Tensor, dim: int, parts: int, group: Group) -> None:
    """Leave this rank's piece of a parameter along `dim`, of each of equal `parts` in turn, and mark it.

    A parameter of two layers is cut once. Raises ConfigError where the size is not divisible.
    """
    if is_cut(parameter):
        return
    size = parameter.shape[dim]
    if size % (parts * group.size):
        raise ConfigError(
            f"{name} has {size} {'columns' if dim else 'rows'} in {parts} part(s), which {group.size} "
            "tensor-parallel ranks do not divide. Give a size that does."
        )
    whole = parameter.detach().chunk(parts, dim)
    pieces = [shard(part, group, dim) for part in whole]
    parameter.data = torch.cat(pieces, dim)
    vars(parameter).update(
        tensor_model_parallel=True, partition_dim=dim, partition_stride=parts
    )


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
                "divide. Give a size that does."
            )
        setattr(owner, name, count // group.size)
    # Biases that it owns are cut now, those among its inputs at each call.
    heads = next((counts[name] for name in HEADS if name in counts), None)
    if heads is None:
        return
    for name, child in owner.named_children():
        if isinstance(child, nn.Embedding) and child.embedding_dim == heads:
            cut(name, child.weight, 1, 1, group)
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
            options[name] = scatter_to_region(bias, group, 1)
        elif bias.dim() == 3 and bias.shape[0] % heads == 0:
            of_samples = bias.unflatten(0, (-1, heads))
            options[name] = scatter_to_region(of_samples, group, 1).flatten(0, 1)
    return inputs, options


# ---------------------------------------------------------------------- hooks
def _enter(group: Group, module: nn.Module, inputs: tuple) -> tuple | None:
    """Enter the region of divided results. A tensor enters once, for all layers that it is given to."""
    x = inputs[0]
    if not _has_gradient(x):
        return None
    entered = vars(x).get(ENTERED)
    if entered is None:
        entered = copy_to_region(x, group)
        vars(x)[ENTERED] = entered
    return entered, *inputs[1:]


def _enter_all(
    group: Group, module: nn.Module, inputs: tuple, options: dict
) -> tuple[tuple, dict]:
    """The same for experts, whose weights of routing have gradients as well."""
    enter = lambda value: (
        copy_to_region(value, group) if _has_gradient(value) else value
    )
    entered = {name: enter(value) for name, value in options.items()}
    return tuple(map(enter, inputs)), entered


def _has_gradient(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad and torch.is_grad_enabled()


def _sum(group: Group, module: nn.Module, inputs: Sequence, output: Any) -> Any:
    return reduce_from_region(output, group)


def _gather(group: Group, module: nn.Module, inputs: Sequence, output: Any) -> Any:
    return gather_from_region(output, group)


def _slice_input(group: Group, module: nn.Module, inputs: Sequence) -> tuple:
    return scatter_to_region(inputs[0], group), *inputs[1:]
