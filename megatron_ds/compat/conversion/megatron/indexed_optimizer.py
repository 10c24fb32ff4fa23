"""Optimizer state of Megatron-LM without its distributed optimizer: by index of the parameter in groups.

    optimizer.state          index → exp_avg, exp_avg_sq
    optimizer.param_groups   params: indices; wd_mult 1 for matrices, 0 for biases and norms
    fp32_from_fp16_params    per group, the masters

The indices run through groups, and inside a group through the modules in the order of registration.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ....errors import CheckpointError
from ..files.foreign_pickle import fields_of
from ..files.stored_tensor import MASTER, StoredTensor
from .flat_buffers import KINDS, REMEDY, LocalParameter
from .names import TensorPart

MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


def from_indices(
    states: Sequence[Mapping[str, Any]],
    parameters: Sequence[LocalParameter],
    place: str,
) -> dict[str, dict[TensorPart, StoredTensor]]:
    """Return the mapping kind → part → tensor. states: of the optimizers that are chained, usually one.

    Raises CheckpointError if counts or shapes are not those of the parameters.
    """
    # If any optimizer has a group of experts, no other group holds parameters of experts.
    found: dict[str, dict[TensorPart, StoredTensor]] = {
        kind: {} for kind in KINDS.values()
    }
    groups = chain.from_iterable(map(groups_of, states))
    apart = any(group.get("is_expert_parallel") for group in groups)
    for state in states:
        # Versions keep the inner optimizer under different keys.
        inner = _inner(state)
        by_index = fields_of(inner.get("state"))
        masters = next((state[name] for name in MASTERS if name in state), None)
        # A group numbers its parameters in the order of registration.
        for g, group in enumerate(groups_of(state)):
            members = [p for p in parameters if _is_in(p, group, apart)]
            indices = group.get("params", [])
            if len(members) != len(indices):
                raise CheckpointError(
                    f"{place}: a parameter group of the optimizer has {len(indices)} "
                    f"parameters, and {len(members)} of the model belong to it. {REMEDY}"
                )
            # Moments are stored by index; masters by group and position.
            for position, (index, parameter) in enumerate(zip(indices, members)):
                state_of = fields_of(by_index.get(index))
                values = {
                    kind: state_of.get(kind) for kind in ("exp_avg", "exp_avg_sq")
                }
                if masters is not None:
                    values[MASTER] = _at(masters, g, position)
                for kind, tensor in values.items():
                    if tensor is not None:
                        found[kind][parameter.part] = _checked(tensor, parameter, place)
    return {kind: tensors for kind, tensors in found.items() if tensors}


def groups_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's state, in any of Megatron-LM's nestings."""
    return [fields_of(group) for group in _inner(state).get("param_groups") or ()]


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer, which mixed precision wraps under one of two keys."""
    return (
        fields_of(state.get("optimizer"))
        or fields_of(state.get("optimizer_state_dict"))
        or state
    )


def _is_in(parameter: LocalParameter, group: Mapping[str, Any], apart: bool) -> bool:
    """apart: experts have groups of their own, as they do if ranks hold different ones."""
    name = parameter.part.name
    if group.get("is_decoupled_lr"):
        raise CheckpointError(f"the optimizer has groups of --decoupled-lr. {REMEDY}")
    # Experts are in groups of experts.
    is_expert = ".mlp.experts." in name
    if apart and is_expert != bool(group.get("is_expert_parallel")):
        return False
    # Matrices are in groups with weight decay, biases and norms in those without.
    default = 0.0 if group.get("weight_decay") == 0 else 1.0
    factor = group.get("wd_mult", default)
    has_decay = len(parameter.shape) > 1 and not name.endswith(".bias")
    return has_decay == (factor != 0)


def _at(masters: Any, group: int, position: int) -> StoredTensor | None:
    try:
        return masters[group][position]
    except (IndexError, KeyError, TypeError):
        return None


def _checked(tensor: Any, parameter: LocalParameter, place: str) -> StoredTensor:
    is_tensor = isinstance(tensor, StoredTensor)
    if not is_tensor or tensor.shape != parameter.shape:
        shape = list(tensor.shape) if is_tensor else type(tensor).__name__
        raise CheckpointError(
            f"{place}: optimizer state of {parameter.part.name} has shape {shape}, and the "
            f"parameter {list(parameter.shape)}: their order is not that of the modules. "
            f"{REMEDY}"
        )
    return tensor
