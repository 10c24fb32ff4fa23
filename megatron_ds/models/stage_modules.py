"""The modules of one pipeline stage: built from its slice of the list of layers, run in order."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from .layer import Layer


def build_stage(layers: Sequence[Layer]) -> nn.ModuleList:
    """Build the layers of one pipeline stage; each module gets `layer_name`.

    Layers tied to each other share one parameter when they meet here, and then it is tied to no other stage. Blocks
    recompute counting from the first of the stage, as in Megatron's block method.
    """
    built: dict[str, nn.Module] = {}
    blocks = 0
    for layer in layers:
        source = built.get(layer.tied_to)
        if source is not None:
            source.weight.spec = replace(source.weight.spec, tied=None)
        built[layer.name] = layer.make() if source is None else layer.make(source.weight)
        built[layer.name].layer_name = layer.name
        if layer.kind == "block":
            if layer.recompute_num_layers is not None and blocks >= layer.recompute_num_layers:
                built[layer.name].set_recompute(None)
            blocks += 1
    return nn.ModuleList(built.values())


def run_layers(modules: Iterable[nn.Module], x: torch.Tensor | None, batch,
               caches: Mapping[str, object] | None = None) -> torch.Tensor:
    """Pass x through the modules of a stage, each with its cache (`caches` is keyed by layer name)."""
    for module in modules:
        x = module(x, batch, caches.get(module.layer_name) if caches else None)
    return x


def count_uses(modules: nn.Module) -> Counter[nn.Parameter]:
    """How many gradient contributions each parameter receives per backward of the stage, in forward order."""
    return Counter(p for _, p in modules.named_parameters(remove_duplicate=False))
