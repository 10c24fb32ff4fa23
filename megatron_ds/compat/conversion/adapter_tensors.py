"""Adapters of a checkpoint, apart from the weights beside which they were trained, and added to them.

A checkpoint with adapters is converted as one of the whole model, each weight being the sum that the model
computes with; a format that keeps adapters apart, as peft's, takes them from here.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...mpu.param_spec import ParamSpec
from ...plugins import plugged
from .files.stored_tensor import (
    WEIGHT,
    AdapterTensors,
    LogicalCheckpoint,
    StoredProgress,
    StoredTensor,
)

NAME = re.compile(r"(?P<layer>.+?)(\.(?P<part>\d+))?\.lora_(?P<leaf>[ab])\.weight")
Pairs = Mapping[int | None, tuple[StoredTensor, StoredTensor]]


def of_layers(adapters: AdapterTensors) -> dict[str, Pairs]:
    """Layer → part of its rows → (A, B). Raises CheckpointError for names of no adapter and for single ones."""
    found: dict[str, dict[int | None, dict[str, StoredTensor]]] = {}
    for name, tensor in adapters.tensors.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{tensor.place} is not a tensor of an adapter.")
        part = None if match["part"] is None else int(match["part"])
        of_layer = found.setdefault(match["layer"], {})
        of_layer.setdefault(part, {})[match["leaf"]] = tensor
    for layer, parts in found.items():
        if any(len(pair) < 2 for pair in parts.values()):
            raise CheckpointError(f"an adapter of {layer} lacks one of its matrices.")
    return {
        layer: {part: (pair["a"], pair["b"]) for part, pair in parts.items()}
        for layer, parts in found.items()
    }


def with_adapters(
    base: LogicalCheckpoint,
    adapters: AdapterTensors,
    specs: Mapping[str, ParamSpec],
    folder: Path,
) -> LogicalCheckpoint:
    """The whole model: weights of the base, to which adapters are added when they are read.

    specs: of the model's weights. folder: of the adapters. Raises CheckpointError for adapters of layers that the
    base lacks.
    """
    weights = dict(base.tensors[WEIGHT])
    for layer, pairs in of_layers(adapters).items():
        name = f"{layer}.weight"
        if name not in weights:
            raise CheckpointError(f"{base.folder} has no {name}, which has an adapter.")
        read = partial(_sum, weights[name], specs[name], pairs, adapters.scale)
        weights[name] = replace(weights[name], dtype=torch.float32, read=read)
    return replace(
        base,
        folder=folder,
        tensors={WEIGHT: weights},
        progress=StoredProgress(),
        optimizer=None,
        adapters=adapters,
    )


def _sum(
    weight: StoredTensor, spec: ParamSpec, pairs: Pairs, scale: float
) -> torch.Tensor:
    read = {part: (a.read(), b.read()) for part, (a, b) in pairs.items()}
    return plugged("adapter merge")(weight.read(), spec, read, scale)


def adapters_in_memory(
    tensors: Mapping[str, torch.Tensor], place: object
) -> dict[str, StoredTensor]:
    """Tensors that were read already."""
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
