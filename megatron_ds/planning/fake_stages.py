"""Stages of a run as modules without memory, and what one micro-batch keeps, needs and sends on them, found by running it.

Nothing here knows a sort of layer: each is run forward and backward through its own code, among simulated peers, on tensors
that have shapes, dtypes and storages but no values. So a new layer needs no formula, and a layer whose shapes do not fit
fails as it would in a launch.

    planned device   tensors                               what follows from it
    CPU              FakeTensors that report a CPU         torch chooses the kernels that it chooses on a CPU
    CUDA             on the meta device                    the layers' code for GPUs; of torch's fused attention what its
                                                           documentation says that it keeps (`ops.attention`)

    kept      storages that are alive after a forward and were not before it: what autograd saved, what functions keep on
              `ctx`, what a stage keeps of its input. Measured on a second micro-batch, so that what a rank holds once, such
              as the last rotary tables, does not count
    at_work   the most that is alive at any moment of a forward and backward, less `kept`; the memory of products in fp32
              (`ops.workspace`) included
    traffic   of the tensor-parallel group, as `mpu.traffic` counts it in a run

`kept` is that of a real stage on a CPU to the byte, which tests measure; on CUDA devices it was *not measured yet*.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import RunConfig
from ..data.batch import Batch
from ..errors import LayoutError
from ..models import Layer, Loss, build_stage, build_stages, count_uses
from ..mpu.fake_group import fake_mesh
from ..mpu.mesh import Mesh
from ..mpu.traffic import Traffic
from ..ops.workspace import WORKSPACE
from ..pipeline.instruction import Op, Program, Schedule
from ..pipeline.stage import Stage
from .run_model import DTYPES, blank_batch, boundary_shape, describe_layers, last_step, loss_function, sequence_slice
from .run_plan import RunPlan


@dataclass(frozen=True)
class StageRun:
    """One micro-batch on a stage, in bytes, as the head of this file defines them.

    workspace  of products in fp32, part of `at_work`
    traffic    forward and backward
    metrics    names that the layers add to the ledger
    """

    kept: int
    at_work: int = 0
    workspace: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    metrics: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FakeStage:
    """A stage whose modules have no memory.  ran: itself, not another one of its sort."""

    index: int
    layers: tuple[Layer, ...]
    modules: nn.ModuleList
    uses: Counter[nn.Parameter]
    run: StageRun
    ran: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Each once, in forward order."""
        return list(self.uses)


def fake_stages(config: RunConfig, mesh: Mesh, plan: RunPlan, schedule: Schedule, device: str) -> list[FakeStage]:
    """All stages of the model, as `mesh`'s tensor-parallel rank would hold them. mesh: of `fake_mesh`.

    One stage of each sort runs, and those of the mesh's own pipeline rank. device: planned, "cpu" or "cuda".
    Raises LayoutError where a stage returns another shape than the next one expects.
    """
    with without_memory(device) as where:
        runner = StageRunner(config, mesh, plan, where, _split_stages(schedule))
        stages = [stage for pp_rank in range(plan.shape.size) for stage in runner.stages_of(pp_rank)]
    return sorted(stages, key=lambda stage: stage.index)


def run_own_stages(config: RunConfig, mesh: Mesh, plan: RunPlan, program: Program, *,
                   only_forward: bool = False) -> dict[int, StageRun]:
    """Stage → its run, for the stages of this rank in a real run; `mesh` itself sends nothing.

    only_forward: `StageRun.kept` is all that is wanted, so nothing runs backward
    """
    fake = fake_mesh(mesh.grid, mesh.rank)
    fake.place_stages(plan.shape.placement)
    with without_memory(mesh.device.type) as where:
        runner = StageRunner(config, fake, plan, where, _split_stages((program,)), only_forward)
        return {stage.index: stage.run for stage in runner.stages_of(mesh.coordinate("pp"))}


def most_kept(program: Program, kept: Mapping[int, int]) -> int:
    """The most bytes kept at once by the micro-batches between F and their B or W. kept: by one, for each stage."""
    trained = {(i.stage, i.microbatch) for i in program if i.op in (Op.B, Op.W)}
    now = most = 0
    for i in program:
        if i.op is Op.F and (i.stage, i.microbatch) in trained:
            now += kept[i.stage]
            most = max(most, now)
        elif i.op in (Op.B, Op.W):
            now -= kept[i.stage]
    return most


@contextmanager
def without_memory(device: str) -> Iterator[torch.device]:
    """Within, tensors made on the device that is yielded have no memory, and `WORKSPACE` is another one."""
    with FakeTensorMode() if device == "cpu" else nullcontext(), WORKSPACE.apart():
        yield torch.device("cpu" if device == "cpu" else "meta")


def _split_stages(schedule: Schedule) -> frozenset[int]:
    """Stages whose backward the schedule splits in two halves."""
    return frozenset(i.stage for program in schedule for i in program if i.op is Op.W)


class StageRunner:
    """Builds and runs stages; of stages of one sort one runs.

    mesh: of `fake_mesh`.  device: of `without_memory`, in which the runner is made and used.  split: stages whose backward
    the schedule splits in two halves
    """

    def __init__(self, config: RunConfig, mesh: Mesh, plan: RunPlan, device: torch.device, split: frozenset[int],
                 only_forward: bool = False):
        self.config, self.mesh, self.plan, self.device, self.split = config, mesh, plan, device, split
        self.only_forward = only_forward
        self.layers = describe_layers(config, mesh, device)
        self.runs: dict[tuple, StageRun] = {}

    def stages_of(self, pp_rank: int) -> Iterator[FakeStage]:
        shape, bounds = self.plan.shape, self.plan.bounds
        layers = {i: self.layers[bounds[i]:bounds[i + 1]] for i in shape.stages_of(pp_rank)}
        for index, modules in build_stages(layers).items():
            uses = count_uses(modules)
            sort = (tuple(layer.sort for layer in layers[index]), index in self.split,
                    tuple(type(module) for module in modules.modules()),
                    tuple((tuple(p.shape), count) for p, count in uses.items()))
            # Names in a ledger may contain the number of a layer, so a stage that adds some stands for no other.
            runs = (sort not in self.runs or bool(self.runs[sort].metrics)
                    or pp_rank == self.mesh.coordinate("pp"))
            if runs:
                self.runs[sort] = self._run(index, layers[index], modules)
            yield FakeStage(index, tuple(layers[index]), modules, uses, self.runs[sort], runs)

    def _run(self, index: int, layers: Sequence[Layer], modules: nn.ModuleList) -> StageRun:
        stage = self._stage(index, modules)
        with LiveBytes() as live:
            batches, losses = [], []                            # a step keeps both until its end
            for microbatch in (1, 0):                           # 0 is the second, which is measured and goes backward
                self.mesh.traffic.clear()
                batches.append(self._batch())
                before = live.now()
                losses.append(self._forward(stage, batches[-1], microbatch))
            kept = live.now() - before
        if self.only_forward:
            return StageRun(kept)
        del stage.live[1]
        self._backward(stage)
        traffic = Traffic()
        traffic.add_all(self.mesh.traffic)
        metrics = frozenset(entry.name for entry in stage.entries)
        return StageRun(kept, *self._at_work(index, layers), traffic, metrics)

    def _at_work(self, index: int, layers: Sequence[Layer]) -> tuple[int, int]:
        """(at_work, of it the workspace) of one layer of each sort: more of them add to what is kept, not to this."""
        modules = build_stage(self._one_of_each_sort(layers))
        stage = self._stage(index, modules)
        for p in modules.parameters():
            p.main_grad = torch.empty(p.shape, dtype=DTYPES[self.config.optimizer.gradient_dtype], device=self.device)
            p.grad_ready = _ignore
        with LiveBytes(peak=True) as live, WORKSPACE.apart() as workspace:
            self._forward(stage, self._batch())
            self._backward(stage)
            batch, live.peak, before = self._batch(), 0, live.now()
            loss = self._forward(stage, batch)
            kept = live.now() - before
            self._backward(stage)
            del loss
            held = sum(memory.nbytes for memory in workspace.values())
            return live.peak - before - kept + held, held

    def _one_of_each_sort(self, layers: Sequence[Layer]) -> list[Layer]:
        chosen, blocks = {}, 0
        for layer in layers:
            most = layer.recompute.num_layers
            recomputes = layer.is_block and (most is None or blocks < most)
            blocks += layer.is_block
            chosen.setdefault((layer.sort, recomputes), replace(
                layer, recompute=replace(layer.recompute, num_layers=None if recomputes else 0)))
        return list(chosen.values())

    def _stage(self, index: int, modules: nn.ModuleList) -> Stage:
        last = index == self.plan.shape.num_stages - 1
        return Stage(index, list(modules), is_first=index == 0, is_last=last,
                     loss=loss_function(self.config, self.mesh.group("tp")) if last else None,
                     per_token=self.config.train.calculate_per_token_loss)

    def _batch(self) -> Batch:
        config = self.config
        batch = blank_batch(config, sequence_slice(config), self.device, last_step(config))
        if config.data.reset_attention_mask or config.data.pack_documents:
            batch = replace(batch, document_ids=torch.zeros_like(batch.tokens))
        return batch

    def _between(self) -> torch.Tensor:
        return torch.empty(boundary_shape(self.config), dtype=DTYPES[self.config.optimizer.params_dtype], device=self.device)

    def _forward(self, stage: Stage, batch: Batch, microbatch: int = 0) -> Loss | None:
        output = stage.forward(microbatch, batch, None if stage.is_first else self._between(), 1.0)
        if stage.is_last:
            return output
        _check(f"stage {stage.index} returns", output, self._between())
        return None

    def _backward(self, stage: Stage) -> None:
        between = None if stage.is_last else self._between()
        if stage.index in self.split:
            gradient = stage.backward_input(0, between)
            stage.backward_weights(0)
        else:
            gradient = stage.backward(0, between)
        if not stage.is_first:
            _check(f"the backward of stage {stage.index} returns", gradient, self._between())
        stage.check_empty()
        for module in stage.modules:
            module.zero_grad()


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made inside and that are still referenced.

    peak  the most after any operation, where asked for; may be set back
    """

    def __init__(self, peak: bool = False):
        super().__init__()
        self.peak, self._watches_peak = 0, peak
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        if self._watches_peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _ignore() -> None:
    """`grad_ready` of a parameter that no optimizer manages."""


def _check(what: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise LayoutError(f"{what} {list(tensor.shape)} of {tensor.dtype}, but stages send {list(expected.shape)} of "
                          f"{expected.dtype}. A layer changes the shape or the dtype of the hidden states; it must return the "
                          "shape and dtype of its input.")
