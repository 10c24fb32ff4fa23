"""The modules of a rank's pipeline stages: built from their slices of the list of layers, run in order."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..batch.batch import Batch
from ..mpu.managed_parameter import describe, spec_of
from .layer import Layer

logger = logging.getLogger(__name__)
SILENT_SECONDS = 10.0  # between two lines of a build that takes long


def build_stages(stages: Mapping[int, Sequence[Layer]]) -> dict[int, nn.ModuleList]:
    """Build the layers of all stages of a rank, in the model's order; each module gets `layer_name`.

    Layers that are tied to each other share one parameter if this rank holds both, on one stage or on two;
    then it is tied to no other rank. Recomputing blocks are counted from the first of their stage, as in
    Megatron's block method.
    """
    built: dict[str, nn.Module] = {}
    return {stage: _build_stage(stages[stage], built) for stage in sorted(stages)}


def build_stage(layers: Sequence[Layer]) -> nn.ModuleList:
    """Return the modules of a stage, on a rank with one stage."""
    return _build_stage(layers, {})


def _build_stage(layers: Sequence[Layer], built: dict[str, nn.Module]) -> nn.ModuleList:
    """Return the modules of a stage. Adds them to `built`, the modules of this rank by layer name."""
    blocks = 0
    shown = time.monotonic()
    for done, layer in enumerate(layers):
        if time.monotonic() - shown >= SILENT_SECONDS:
            shown = time.monotonic()
            logger.info("built %d of %d layers", done, len(layers))
        source = None if layer.tied_to is None else built.get(layer.tied_to)
        module: Any = layer.make() if source is None else layer.make(_untied(source))
        module.layer_name = layer.name
        built[layer.name] = module
        if layer.is_block:
            most = layer.recompute.num_layers
            if most is not None and blocks >= most:
                module.set_recompute(None)
            blocks += 1
    return nn.ModuleList(built[layer.name] for layer in layers)


def _untied(source: nn.Module) -> nn.Parameter:
    """Return the weight of a layer, which another one of this rank then shares: it is tied to no other rank."""
    weight = source.weight
    assert isinstance(weight, nn.Parameter), "layers that others are tied to have one"
    describe(weight, replace(spec_of(weight), tied=None))
    return weight


def run_layers(
    modules: Iterable[nn.Module], x: torch.Tensor | None, batch: Batch
) -> torch.Tensor:
    """Pass x through the modules of a stage."""
    for module in modules:
        x = module(x, batch)
    assert x is not None, "a stage without layers has an input"
    return x


def count_uses(modules: nn.Module) -> Counter[nn.Parameter]:
    """Return how many gradient contributions each parameter receives per backward of the stage, in forward order."""
    return Counter(p for _, p in modules.named_parameters(remove_duplicate=False))
