"""Where did the first NaN come from? Run the same micro-batches forward again, watching every module's output.

Nothing random is left to chance (dropout masks are a function of the sample), so the second forward repeats the first.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ..mpu.collectives import all_gather_object
from ..mpu.mesh import Mesh


def locate_nonfinite(layers: Mapping[str, nn.Module], weights: Iterable[tuple[str, torch.Tensor]],
                     rerun: Callable[[], object], mesh: Mesh) -> str:
    """A sentence naming the first parameter or module output that is not finite, over all ranks.

    layers   of this rank, by their global names
    weights  (name, values) of what this rank keeps; parameters in shards are not whole now
    rerun    runs the forward of the same micro-batches; every rank must take part

    Collective over the world.
    """
    output = _bad_output(layers, rerun)       # on every rank, or the neighbours would wait for this one
    what = _bad_parameter(weights) or output
    entry = (mesh.coordinate("pp"), mesh.rank, what) if what else None
    found = sorted(entry for entry in all_gather_object(entry, mesh.group("world")) if entry)
    if not found:
        return "no module of a second forward had a non-finite output: the loss itself is the first"
    stage, rank, what = found[0]
    return f"first seen on rank {rank} (pipeline stage {stage}): {what}"


def _bad_parameter(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    for name, values in weights:
        if not torch.isfinite(values).all():
            return f"parameter {name} holds non-finite values"
    return None


def _bad_output(layers: Mapping[str, nn.Module], rerun: Callable[[], object]) -> str | None:
    first: list[str] = []

    def watch(name: str):
        def hook(module, inputs, output):
            if not first and isinstance(output, torch.Tensor) and output.is_floating_point() \
                    and not torch.isfinite(output).all():
                bad = (~torch.isfinite(output)).sum().item()
                first.append(f"output of {name} ({type(module).__name__}, shape {list(output.shape)}): "
                             f"{bad} non-finite values")
        return hook

    handles = [module.register_forward_hook(watch(name)) for layer_name, layer in layers.items()
               for name, module in layer.named_modules(prefix=layer_name)]
    try:
        rerun()
    finally:
        for handle in handles:
            handle.remove()
    return first[0] if first else None
