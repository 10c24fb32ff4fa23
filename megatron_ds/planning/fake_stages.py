"""The stages of a run on the meta device: real modules with shapes and no values, among peers that are only imagined.

Every stage is built. One of each sort runs a micro-batch forward and backward, through the layers' own code, so what does not
fit is found as a launch would find it; what its tensor-parallel group sends is counted, as it is in a run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..config import RunConfig
from ..errors import LayoutError
from ..models import build_stages, count_uses
from ..mpu.mesh import Mesh
from ..mpu.traffic import Traffic
from ..pipeline.instruction import Op, Schedule
from ..pipeline.stage import Stage
from .activations import last_step
from .run_model import DTYPES, blank_batch, boundary_shape, loss_function, sequence_slice
from .run_plan import RunPlan


@dataclass(frozen=True)
class ImaginedStage:
    """A stage without memory.

    traffic  of one micro-batch, forward and backward
    ran      itself, not another one of its sort
    metrics  names that its layers add to the ledger
    """

    index: int
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    modules: nn.ModuleList
    uses: Counter[nn.Parameter]
    traffic: Traffic
    ran: bool
    metrics: frozenset[str]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Each once, in forward order."""
        return list(self.uses)


def imagine_stages(config: RunConfig, mesh: Mesh, plan: RunPlan, layers: Sequence, schedule: Schedule) -> list[ImaginedStage]:
    """All stages of the model, as `mesh`'s tensor-parallel rank would hold them; its own run themselves.

    Raises LayoutError where a stage gives another shape than the next one expects.
    """
    shape, ran, stages = plan.shape, {}, []
    split = {i.stage for program in schedule for i in program if i.op is Op.W}
    for pp_rank in range(shape.size):
        built = build_stages({stage: layers[plan.slice_of(stage)] for stage in shape.stages_of(pp_rank)})
        for index, modules in built.items():
            kinds, uses = tuple(layer.sort for layer in layers[plan.slice_of(index)]), count_uses(modules)
            types = tuple(type(module) for module in modules.modules())
            sort = kinds, types, tuple((tuple(p.shape), count) for p, count in uses.items()), index in split
            # Names in a ledger may contain the number of a layer, so a stage that adds some stands for no other.
            runs = sort not in ran or bool(ran[sort][1]) or pp_rank == mesh.coordinate("pp")
            if runs:
                ran[sort] = _run(config, mesh, modules, index, shape.num_stages, index in split)
            traffic, metrics = ran[sort]
            stages.append(ImaginedStage(index, plan.stage_names(index), kinds, modules, uses, traffic, runs, metrics))
    return sorted(stages, key=lambda stage: stage.index)


def _run(config: RunConfig, mesh: Mesh, modules: nn.ModuleList, index: int, num_stages: int,
         split: bool) -> tuple[Traffic, frozenset[str]]:
    """A micro-batch forward and backward, in halves where the schedule splits it: (bytes sent, names in its ledger)."""
    first, last = index == 0, index == num_stages - 1
    batch = blank_batch(config, sequence_slice(config), "meta", last_step(config))
    stage = Stage(index, list(modules), is_first=first, is_last=last,
                  loss=loss_function(config, mesh.group("tp")) if last else None,
                  per_token=config.train.calculate_per_token_loss)
    between = torch.empty(boundary_shape(config), dtype=DTYPES[config.optimizer.params_dtype], device="meta")
    mesh.traffic.clear()
    output = stage.forward(0, batch, None if first else between, 1.0)
    if not last:
        _check(f"stage {index} hands on", output, between)
    gradient = (stage.backward_input if split else stage.backward)(0, None if last else between)
    if split:
        stage.backward_weights(0)
    if not first:
        _check(f"stage {index} hands back", gradient, between)
    stage.check_empty()
    for parameter in modules.parameters():
        parameter.grad = None
    sent = Traffic()
    sent.add_all(mesh.traffic)
    mesh.traffic.clear()
    return sent, frozenset(entry.name for entry in stage.entries)


def _check(what: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise LayoutError(f"{what} {list(tensor.shape)} of {tensor.dtype}, but stages send {list(expected.shape)} of "
                          f"{expected.dtype}. A layer changes the shape or the dtype of the hidden states; it must return the "
                          "shape and dtype of its input.")
