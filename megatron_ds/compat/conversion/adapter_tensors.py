"""Adapters of a checkpoint, apart from the weights beside which they were trained, and added to them.

A checkpoint with adapters is converted as one of the whole model, each weight being the sum that the model
computes with; a format that keeps adapters apart, as peft's, takes them from here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...features import Provided
from ...mpu.param_spec import ParamSpec
from .files.stored_tensor import (
    WEIGHT,
    AdapterTensors,
    LogicalCheckpoint,
    StoredProgress,
    StoredTensor,
)

ADAPTER_MERGE: Provided[Any] = Provided("adapter merge")
ADAPTER_NORMS: Provided[Any] = Provided("adapter norms")

NAME = re.compile(r"(?P<layer>.+?)(\.(?P<part>\d+))?\.lora_(?P<leaf>[abm])\.weight")
MATRICES = {"a", "b"}
Parts = Mapping[int | None, Mapping[str, StoredTensor]]


def of_layers(adapters: AdapterTensors) -> dict[str, Parts]:
    """Return the mapping layer → part of its rows → leaf → tensor: "a", "b", and "m" where the adapter has magnitudes.

    Raises CheckpointError for names of no adapter and for single matrices.
    """
    found: dict[str, dict[int | None, dict[str, StoredTensor]]] = {}
    for name, tensor in adapters.tensors.items():
        layer, part, leaf = parts_of_name(name, tensor.place)
        found.setdefault(layer, {}).setdefault(part, {})[leaf] = tensor
    for layer, parts in found.items():
        if any(MATRICES - leaves.keys() for leaves in parts.values()):
            raise CheckpointError(f"an adapter of {layer} lacks one of its matrices.")
    return {layer: parts for layer, parts in found.items()}


def parts_of_name(name: str, place: object) -> tuple[str, int | None, str]:
    """Return (layer, part of its rows, leaf) of the name of a tensor. Raises CheckpointError for other names."""
    match = NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{place} is not a tensor of an adapter.")
    part = None if match["part"] is None else int(match["part"])
    return match["layer"], part, match["leaf"]


def with_adapters(
    base: LogicalCheckpoint,
    adapters: AdapterTensors,
    specs: Mapping[str, ParamSpec],
    folder: Path,
) -> LogicalCheckpoint:
    """Return the whole model: weights of the base, to which adapters are added when they are read.

    specs: of the model's weights. folder: of the adapters. Raises CheckpointError for adapters of layers that the
    base lacks.
    """
    weights = dict(base.tensors[WEIGHT])
    for layer, parts in of_layers(adapters).items():
        name = f"{layer}.weight"
        if name not in weights:
            raise CheckpointError(
                f"{base.folder} has no {name}, to which an adapter belongs. Give the folder of the weights below the "
                "adapters: --base."
            )
        read = partial(_sum, weights[name], specs[name], parts, adapters.scale)
        weights[name] = replace(weights[name], dtype=torch.float32, read=read)
    return replace(
        base,
        folder=folder,
        tensors={WEIGHT: weights},
        progress=StoredProgress(),
        optimizer=None,
        adapters=replace(adapters, below=base.tensors[WEIGHT]),
    )


def _sum(
    weight: StoredTensor, spec: ParamSpec, parts: Parts, scale: float
) -> torch.Tensor:
    read = {
        part: {leaf: tensor.read() for leaf, tensor in leaves.items()}
        for part, leaves in parts.items()
    }
    return ADAPTER_MERGE.get()(weight.read(), spec, read, scale)


def shifted(
    tensors: Mapping[str, StoredTensor],
    below: Mapping[str, StoredTensor],
    specs: Mapping[str, ParamSpec],
    sign: int,
) -> dict[str, StoredTensor]:
    """Return the tensors, with sign · ‖W‖ added to "m" when it is read: ours is the change of a magnitude.

    below: the frozen weights. specs: of the model's weights
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        layer, part, leaf = parts_of_name(name, tensor.place)
        if leaf != "m":
            continue
        weight = f"{layer}.weight"
        read = partial(_shifted, tensor, below[weight], specs[weight], part, sign)
        found[name] = replace(tensor, dtype=torch.float32, read=read)
    return found


def _shifted(
    tensor: StoredTensor,
    weight: StoredTensor,
    spec: ParamSpec,
    part: int | None,
    sign: int,
) -> torch.Tensor:
    norms = ADAPTER_NORMS.get()(weight.read(), spec, part)
    return tensor.read().float() + sign * norms


def adapters_in_memory(
    tensors: Mapping[str, torch.Tensor], place: object
) -> dict[str, StoredTensor]:
    """Return tensors that were read already as stored ones."""
    return {
        name: StoredTensor(
            tuple(tensor.shape),
            tensor.dtype,
            partial(_same, tensor),
            f"{place}: {name}",
        )
        for name, tensor in tensors.items()
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
