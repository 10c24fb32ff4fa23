"""Locates the first non-finite value: a second forward of the same micro-batches, with a hook on every
module's output.

Dropout masks are functions of the sample, so the second forward repeats the first.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ...mpu.collectives import all_gather_object
from ...mpu.host_reads import read_number
from ...mpu.managed_parameter import spec_of
from ...mpu.mesh import Mesh


def locate_nonfinite(
    layers: Mapping[str, tuple[int, nn.Module]],
    weights: Iterable[tuple[str, torch.Tensor]],
    rerun: Callable[[], object],
    mesh: Mesh,
) -> str:
    """Return a sentence naming the first parameter or module output that is not finite. Collective over the world.

    layers   (pipeline stage, module) of this rank, by their global names
    weights  (name, values) of the weights or shards that this rank keeps
    rerun    runs the forward of the same micro-batches
    """
    output = _bad_output(layers, rerun)  # on every rank: the forward is collective
    stage, what = _bad_parameter(weights, layers) or output or (0, None)
    entry = (stage, mesh.rank, what) if what else None
    found = sorted(
        entry for entry in all_gather_object(entry, mesh.group("world")) if entry
    )
    if not found:
        return (
            "no module had a non-finite output in a second forward: the loss itself is the first "
            "non-finite value"
        )
    stage, rank, what = found[0]
    return f"first seen on rank {rank} (pipeline stage {stage}): {what}"


def _bad_parameter(
    weights: Iterable[tuple[str, torch.Tensor]],
    layers: Mapping[str, tuple[int, nn.Module]],
) -> tuple[int, str] | None:
    """(stage, description) of the first stage that holds a non-finite parameter."""
    bad = {name for name, values in weights if not _is_finite(values)}
    found = []
    for stage, module in layers.values():
        names = (spec_of(p).name for p in module.parameters())
        found += [(stage, name) for name in names if name in bad]
    if not found:
        return None
    stage, name = min(found, key=lambda entry: entry[0])
    return stage, f"parameter {name} holds non-finite values"


def _is_finite(values: torch.Tensor) -> bool:
    return bool(read_number(torch.isfinite(values).all()))


def _bad_output(
    layers: Mapping[str, tuple[int, nn.Module]], rerun: Callable[[], object]
) -> tuple[int, str] | None:
    """(stage, description) of the first stage with a non-finite output, in it of the first module in time."""
    first: dict[int, str] = {}

    def watch(stage: int, name: str):
        def hook(module, inputs, output):
            if (
                stage not in first
                and isinstance(output, torch.Tensor)
                and output.is_floating_point()
                and not _is_finite(output)
            ):
                bad = read_number((~torch.isfinite(output)).sum())
                first[stage] = (
                    f"output of {name} ({type(module).__name__}, shape {list(output.shape)}): "
                    f"{bad} non-finite values"
                )

        return hook

    # Run the micro-batch again with a hook on every module.
    handles = []
    for layer_name, (stage, layer) in layers.items():
        for name, module in layer.named_modules(prefix=layer_name):
            handles.append(module.register_forward_hook(watch(stage, name)))
    try:
        rerun()
    finally:
        for handle in handles:
            handle.remove()
    return min(first.items(), default=None)
