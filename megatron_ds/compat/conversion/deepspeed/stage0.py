"""Optimizer state by number: torch's `state_dict` of an optimizer has no names.

Parameters are numbered group by group, each group in the order of registration. Frozen ones have no number,
and at stage 0 a file does not record which were frozen. So the numbers are assigned to names by shape, and
only if there is exactly one way: anything else is refused, since moments of another parameter of the same
shape would not be noticed.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from ....errors import CheckpointError
from ..files.stored_tensor import MASTER, StoredTensor
from .zero_shards import VectorSlice, joined

ALONE = "Load the weights alone"


def stage0_state(
    inner: Mapping[str, Any],
    masters: Any,
    weights: Mapping[str, StoredTensor],
    place: object,
) -> dict[str, dict[str, StoredTensor]]:
    """Return kind → name → tensor; with the kind "master" if there are fp32 weights beside those of the module.

    inner    {"state": {number: {kind: tensor}}, "param_groups": [{"params": [number, …]}, …]}
    masters  [[fp32 tensor of a parameter, …] for each group] of fp16 training; None
    weights  of the module, in the order of registration
    """
    state, groups = _state_and_groups(inner, place)
    # Each group lists the states of its parameters by number; scalars are no state of elements.
    found: dict[str, dict[str, StoredTensor]] = {}
    taken: set[str] = set()
    for g, group in enumerate(groups):
        states = [
            {
                kind: value
                for kind, value in (state.get(number) or {}).items()
                if isinstance(value, StoredTensor) and value.shape
            }
            for number in group["params"]
        ]
        # fp16 training keeps the fp32 weights beside the state.
        if masters is not None:
            states = _with_masters(states, masters, g, place)
        if not any(states):
            continue
        # A group may be one flat vector, which is cut into its parameters.
        if flat := _flat(states, weights, len(groups)):
            states = flat
        # The shapes decide which names the states belong to; no name is used twice.
        names = _assigned(
            [_shape(one, place) for one in states],
            {
                name: tensor.shape
                for name, tensor in weights.items()
                if name not in taken
            },
            len(groups) > 1,
            place,
        )
        taken.update(names)
        for name, one in zip(names, states):
            for kind, tensor in one.items():
                found.setdefault(kind, {})[name] = tensor
    return found


def _state_and_groups(
    inner: Mapping[str, Any], place: object
) -> tuple[Mapping, list[Mapping]]:
    """Return the states by number and the groups. Raises CheckpointError unless they are those of a torch
    optimizer.
    """
    state = inner.get("state") or {}
    groups = inner.get("param_groups")
    if (
        not isinstance(state, Mapping)
        or not isinstance(groups, list)
        or not all(
            isinstance(group, Mapping) and isinstance(group.get("params"), list)
            for group in groups
        )
    ):
        raise CheckpointError(
            f"{place}: the optimizer's state has no groups of parameters. {ALONE}."
        )
    return state, groups


def _with_masters(
    states: Sequence[Mapping[str, StoredTensor]],
    masters: Any,
    group: int,
    place: object,
) -> list[dict[str, StoredTensor]]:
    """Return the states of a group, each with its fp32 weight. Raises CheckpointError if their numbers differ."""
    if (
        not isinstance(masters, list)
        or group >= len(masters)
        or len(masters[group]) != len(states)
    ):
        raise CheckpointError(
            f"{place}: group {group} of the optimizer has {len(states)} parameters, "
            "and its fp32 weights are others. The file is damaged."
        )
    return [{MASTER: master, **one} for master, one in zip(masters[group], states)]


def _flat(
    states: Sequence[Mapping[str, StoredTensor]],
    weights: Mapping[str, StoredTensor],
    groups: int,
) -> list[dict[str, StoredTensor]] | None:
    """Return the state of a fused optimizer: one vector of all parameters of the only group. None if it is not
    that."""
    sizes = [math.prod(tensor.shape) for tensor in weights.values()]
    if (
        groups != 1
        or len(states) != 1
        or len(weights) == 1
        or any(tensor.shape != (sum(sizes),) for tensor in states[0].values())
    ):
        return None
    starts = accumulate(sizes, initial=0)
    return [
        {
            kind: joined(
                name, weight.shape, [VectorSlice(vector, start, size)], vector.place
            )
            for kind, vector in states[0].items()
        }
        for (name, weight), start, size in zip(weights.items(), starts, sizes)
    ]


def _shape(state: Mapping[str, StoredTensor], place: object) -> tuple[int, ...]:
    shapes = {tensor.shape for tensor in state.values()}
    if len(shapes) != 1:
        raise CheckpointError(
            f"{place}: tensors of the state of one parameter have the shapes "
            f"{sorted(shapes)}. {ALONE}."
        )
    return shapes.pop()


def _assigned(
    shapes: Sequence[tuple[int, ...]],
    weights: Mapping[str, tuple[int, ...]],
    several: bool,
    place: object,
) -> list[str]:
    """Return the names of the parameters of one group. Raises CheckpointError unless there is exactly one way.

    several: there are other groups; then matrices and vectors are in different ones
    """
    # Groups usually separate matrices from vectors, which reduces the candidates.
    matrices = {len(shape) >= 2 for shape in shapes}
    if several and len(matrices) == 1:
        weights = {
            name: shape
            for name, shape in weights.items()
            if (len(shape) >= 2) in matrices
        }
    names = list(weights)

    @cache
    def ways(state: int, name: int) -> int:
        """Return the number of ways to assign the states from `state` on to names from `name` on, at most 2."""
        if state == len(shapes):
            return 1
        if len(names) - name < len(shapes) - state:
            return 0
        here = ways(state + 1, name + 1) if weights[names[name]] == shapes[state] else 0
        return min(2, here + ways(state, name + 1))

    # The assignment must be unique.
    number = _from_the_end(ways, len(shapes), len(names))
    if number != 1:
        raise CheckpointError(
            f"{place}: the state of {len(shapes)} parameters has no names, and fits the {len(names)} "
            f"parameters of the model in {'several ways' if number else 'no way'}, in their order. {ALONE}, "
            "or save with ZeRO stage 1, which records names."
        )
    # The unique assignment is followed from the first state to the last.
    result = []
    name = 0
    for state in range(len(shapes)):
        while weights[names[name]] != shapes[state] or not ways(state + 1, name + 1):
            name += 1
        result.append(names[name])
        name += 1
    return result


def _from_the_end(ways: Any, states: int, names: int) -> int:
    """ways(0, 0), computed from the end so that long models do not exceed the depth of recursion."""
    for name in range(names, -1, -1):
        for state in range(states, max(-1, name - (names - states) - 1), -1):
            if name >= state:
                ways(state, name)
    return ways(0, 0)
