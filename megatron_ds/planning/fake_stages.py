"""Stages of a run as modules without memory. Running a micro-batch on them measures activations and traffic.

Each layer runs forward and backward through its own code, among simulated peers, on tensors that have shapes,
dtypes and storages but no values. So a new layer needs no formula here, and a layer whose shapes do not fit
fails as in a launch.

    planned device   tensors                           consequences
    CPU              FakeCpuTensors                    torch chooses the kernels that it chooses on a CPU
    CUDA             on the meta device                the layers run their code for GPUs; torch's fused
                                                       attention keeps what its documentation lists
                                                       (`ops.core_attention`), FlexAttention what its
                                                       compiled code does (FlexAttention)

    kept      bytes of storages that a forward creates and that are alive after it: what autograd saved, what
              functions keep on `ctx`, what a stage keeps of its input. Measured on a second micro-batch, so
              that storages that a rank has once, such as the last rotary tables, do not count
    at_work   the maximum of live bytes during a forward and backward, less `kept`; includes the memory of
              products in fp32 (`ops.product`), the batch, and what a rank has once
    traffic   of the tensor-parallel group, as `mpu.group` counts it in a run

Tests compare `kept` with a real stage on a CPU, to the byte; on CUDA devices it was *not measured yet*.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..batch.batch import Batch
from ..config import RunConfig
from ..errors import LayoutError
from ..host.dispatch_mode import DispatchMode
from ..host.fake_cpu import DEVICE_OF, FakeCpu
from ..host.known_results import KnownResults
from ..models import Layer, Loss, build_stage, build_stages, count_uses
from ..models.kept_input import bytes_in_host
from ..mpu.fake_group import fake_mesh
from ..mpu.group import Traffic
from ..mpu.managed_parameter import TensorAccumulator, accumulate
from ..mpu.mesh import Mesh
from ..ops.kernel_table import selected
from ..ops.widened_products import WORKSPACE
from ..pipeline.instruction import Op, Program, Schedule
from ..pipeline.stage import Stage
from .cuda_segments import reserved
from .run_model import (
    DTYPES,
    boundary_shape,
    describe_layers,
    loss_function,
    planned_batch,
)
from .run_plan import RunPlan


@dataclass(frozen=True)
class StageRun:
    """One micro-batch on a stage: bytes, as the head of this file defines them.

    workspace  part of `at_work`: products in fp32
    reserved   what torch's CUDA allocator reserves for `kept` alone (cuda_segments.py)
    traffic    forward and backward
    metrics    names that the layers add to the ledger
    in_host    bytes that wait in host memory, beside `kept`
    work       what its recorder has found; None without one
    """

    kept: int
    at_work: int = 0
    workspace: int = 0
    reserved: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    metrics: frozenset[str] = frozenset()
    in_host: int = 0
    work: Any = None


@dataclass(frozen=True)
class FakeStage:
    """A stage whose modules have no memory.

    uses  how many gradient contributions each parameter receives per backward
    ran   False if `run` is that of another stage of the same sort
    """

    index: int
    layers: tuple[Layer, ...]
    modules: nn.ModuleList
    uses: Counter[nn.Parameter]
    run: StageRun
    ran: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, each once, in forward order."""
        return list(self.uses)


def fake_stages(
    config: RunConfig,
    mesh: Mesh,
    plan: RunPlan,
    schedule: Schedule,
    device: str,
    recorder: "MakeRecorder | None" = None,
) -> list[FakeStage]:
    """All stages of the model, as the tensor-parallel rank of `mesh` holds them. mesh: from `fake_mesh`.

    One stage of each sort runs, and all stages of the mesh's own pipeline rank. device: planned, "cpu" or
    "cuda". recorder: of the work of each stage. Raises LayoutError if the shape that a stage returns is not the one
    that the next stage expects.
    """
    with without_memory(device, config.train.kernels) as where:
        runner = StageRunner(
            config, mesh, plan, where, _split_stages(schedule), recorder=recorder
        )
        stages: list[FakeStage] = []
        for pp_rank in range(plan.shape.size):
            stages += runner.stages_of(pp_rank)
    return sorted(stages, key=lambda stage: stage.index)


def run_own_stages(
    config: RunConfig,
    mesh: Mesh,
    plan: RunPlan,
    program: Program,
    *,
    only_forward: bool = False,
) -> dict[int, StageRun]:
    """Stage → its run, for the stages of this rank in a real run. Sends nothing over `mesh`.

    only_forward: measure `StageRun.kept` alone, without a backward
    """
    stages = own_stages(config, mesh, plan, program, only_forward=only_forward)
    return {stage.index: stage.run for stage in stages}


def own_stages(
    config: RunConfig,
    mesh: Mesh,
    plan: RunPlan,
    program: Program,
    *,
    only_forward: bool = False,
) -> list[FakeStage]:
    """Return the stages of this rank in a real run; arguments as of `run_own_stages`."""
    fake = fake_mesh(mesh.grid, mesh.rank)
    fake.place_stages(plan.shape.placement)
    with without_memory(mesh.device.type, config.train.kernels) as where:
        runner = StageRunner(
            config, fake, plan, where, _split_stages((program,)), only_forward
        )
        return list(runner.stages_of(mesh.coordinate("pp")))


def most_kept(program: Program, kept: Mapping[int, int]) -> int:
    """Most bytes that micro-batches keep between F and B or W. kept: stage → bytes of one micro-batch."""
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
def without_memory(device: str, kernels: str = "auto") -> Iterator[torch.device]:
    """Yields a device on which tensors have no memory; `WORKSPACE` has other tensors within the context.

    kernels: of the planned run, as in `kernel_table.select`
    """
    with (
        FakeCpu() if device == "cpu" else KnownResults(),
        WORKSPACE.apart(),
        selected(kernels),
    ):
        yield torch.device("cpu" if device == "cpu" else "meta")


def _split_stages(schedule: Schedule) -> frozenset[int]:
    """Stages whose backward the schedule splits into an input half and a weight half."""
    return frozenset(i.stage for program in schedule for i in program if i.op is Op.W)


Phase = Callable[[Op], AbstractContextManager[None]]


class Recorder(Protocol):
    """Records what a stage does for a micro-batch, in the phases F and B, or F, I and W."""

    def phase(self, op: Op) -> AbstractContextManager[None]:
        """Record what runs within the context."""

    def stage_work(self) -> Any:
        """Return what was recorded."""


MakeRecorder = Callable[[Traffic], Recorder]
"""(traffic of the groups of the layers) → a recorder"""


def _unrecorded(op: Op) -> AbstractContextManager[None]:
    return nullcontext()


class StageRunner:
    """Builds stages and runs one of each sort, within the context of `without_memory`.

    mesh, device  from `fake_mesh` and from `without_memory`
    split         stages whose backward the schedule splits
    only_forward  measures `StageRun.kept` alone
    recorder      of the work of each stage
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        plan: RunPlan,
        device: torch.device,
        split: frozenset[int],
        only_forward: bool = False,
        recorder: "MakeRecorder | None" = None,
    ):
        self.config = config
        self.mesh = mesh
        self.plan = plan
        self.device = device
        self.split = split
        self.only_forward = only_forward
        self.recorder = recorder
        self.layers = describe_layers(config, mesh, device)
        self.runs: dict[tuple, tuple[StageRun, Sequence[Layer]]] = {}

    def stages_of(self, pp_rank: int) -> Iterator[FakeStage]:
        """Build the stages of a pipeline rank, and run those of a sort that has not run."""
        shape = self.plan.shape
        bounds = self.plan.bounds
        layers = {
            i: self.layers[bounds[i] : bounds[i + 1]] for i in shape.stages_of(pp_rank)
        }
        for index, modules in build_stages(layers).items():
            uses = count_uses(modules)
            sort = (
                tuple(layer.sort for layer in layers[index]),
                index in self.split,
                tuple(type(module) for module in modules.modules()),
                tuple((tuple(p.shape), count) for p, count in uses.items()),
            )
            known = None
            if sort in self.runs and pp_rank != self.mesh.coordinate("pp"):
                known = _of_other_layers(*self.runs[sort], layers[index])
            run = known or self.run_stage(index, layers[index], modules)
            if known is None:
                self.runs[sort] = run, layers[index]
            yield FakeStage(
                index, tuple(layers[index]), modules, uses, run, known is None
            )

    def run_stage(
        self, index: int, layers: Sequence[Layer], modules: nn.ModuleList
    ) -> StageRun:
        """Run a micro-batch on the modules of some layers, as stage `index`."""
        stage = self._stage(index, modules)
        recorder = self.recorder(self.mesh.traffic) if self.recorder else None
        recorded = recorder.phase if recorder else _unrecorded
        with LiveBytes() as live:
            # kept until both micro-batches are measured, as in a step
            batches = []
            losses = []
            for microbatch in (1, 0):  # the second one, 0, is measured and run backward
                self.mesh.traffic.clear()
                batches.append(planned_batch(self.config, self.device))
                before = live.now()
                waiting = bytes_in_host(modules)
                older = live.sizes()
                # The first one also computes what a stage has once, so the second one is recorded.
                with _unrecorded(Op.F) if microbatch else recorded(Op.F):
                    losses.append(self._forward(stage, batches[-1], microbatch))
            # The first micro-batch also allocated what a stage has once, so only the second one counts.
            kept = live.now() - before
            waiting = bytes_in_host(modules) - waiting
            newer = [nbytes for key, nbytes in live.sizes().items() if key not in older]
        # Traffic and metrics include those of the backward.
        if self.only_forward:
            return StageRun(kept, in_host=waiting)
        del stage.live[1]
        self._backward(stage, recorded)
        traffic = Traffic()
        traffic.add_all(self.mesh.traffic)
        metrics = frozenset(entry.name for entry in stage.entries)
        return StageRun(
            kept,
            *self._at_work(index, layers),
            reserved(newer),
            traffic,
            metrics,
            waiting,
            recorder.stage_work() if recorder else None,
        )

    def _at_work(self, index: int, layers: Sequence[Layer]) -> tuple[int, int]:
        """Measure (at_work, the workspace in it) on one layer of each sort, since more layers only add to `kept`. Of
        blocks whose inputs wait in host memory there are two: one input comes back while the other block is at work."""
        modules = build_stage(self._one_of_each_sort(layers))
        stage = self._stage(index, modules)
        gradients = DTYPES[self.config.optimizer.gradient_dtype]
        for p in modules.parameters():
            total = torch.empty(p.shape, dtype=gradients, device=self.device)
            accumulate(p, TensorAccumulator(total))
        with LiveBytes(peak=True) as live, WORKSPACE.apart() as workspace:
            # The first forward allocates what a rank has once.
            self._forward(stage, planned_batch(self.config, self.device))
            self._backward(stage)
            batch = planned_batch(self.config, self.device)
            before = live.peak = live.now()
            loss = self._forward(stage, batch)
            kept = live.now() - before
            self._backward(stage)
            del loss
            held = sum(
                memory.nbytes for memory in workspace.values() if memory is not None
            )
            return live.peak - kept + held, held

    def _one_of_each_sort(self, layers: Sequence[Layer]) -> list[Layer]:
        """Choose a layer of each sort; blocks that recompute are a sort, with two if inputs wait in host memory."""
        chosen: dict[tuple, Layer] = {}
        blocks = 0
        for layer in layers:
            most = layer.recompute.num_layers
            recomputes = layer.is_block and (most is None or blocks < most)
            blocks += layer.is_block
            place: tuple = (layer.sort, recomputes)
            if place in chosen and recomputes and layer.recompute.offload:
                place = *place, "another"
            chosen.setdefault(
                place,
                replace(
                    layer,
                    recompute=replace(
                        layer.recompute, num_layers=None if recomputes else 0
                    ),
                ),
            )
        return list(chosen.values())

    def _stage(self, index: int, modules: nn.ModuleList) -> Stage:
        last = index == self.plan.shape.num_stages - 1
        return Stage(
            index,
            list(modules),
            is_first=index == 0,
            is_last=last,
            loss=loss_function(self.config, self.mesh) if last else None,
            per_token=self.config.train.calculate_per_token_loss,
        )

    def _between(self) -> torch.Tensor:
        """Hidden states as stages send them."""
        return torch.empty(
            boundary_shape(self.config),
            dtype=DTYPES[self.config.optimizer.params_dtype],
            device=self.device,
        )

    def _forward(self, stage: Stage, batch: Batch, microbatch: int = 0) -> Loss | None:
        output = stage.forward(
            microbatch, batch, None if stage.is_first else self._between(), 1.0
        )
        if stage.is_last:
            return output
        _check(f"stage {stage.index} returns", output, self._between())
        return None

    def _backward(self, stage: Stage, phase: Phase = _unrecorded) -> None:
        between = None if stage.is_last else self._between()
        if stage.index in self.split:
            with phase(Op.I):
                gradient = stage.backward_input(0, between)
            with phase(Op.W):
                stage.backward_weights(0)
        else:
            with phase(Op.B):
                gradient = stage.backward(0, between)
        if not stage.is_first:
            assert gradient is not None  # of the input, which another stage has sent
            _check(
                f"the backward of stage {stage.index} returns",
                gradient,
                self._between(),
            )
        stage.check_empty()
        for module in stage.modules:
            module.zero_grad()


def _of_other_layers(
    run: StageRun, layers: Sequence[Layer], others: Sequence[Layer]
) -> StageRun | None:
    """Derive the run of `others`, a stage of the same sort as `layers`, from `run`; None if its metrics are unknown.

    The name of a metric may begin with that of its layer. A number elsewhere in it may be that of a layer, too.
    """
    renamed = {layer.name: other.name for layer, other in zip(layers, others)}
    metrics = set()
    for metric in run.metrics:
        owner = next(
            (name for name in renamed if re.match(rf"{re.escape(name)}\b", metric)), ""
        )
        rest = metric.removeprefix(owner)
        if re.search(r"\d", rest):
            return None
        metrics.add(renamed.get(owner, "") + rest)
    return replace(run, metrics=frozenset(metrics))


class LiveBytes(DispatchMode):
    """Bytes of the storages that operations created within the mode and that are still referenced.

    peak  maximum after any operation, if enabled; may be reset
    """

    def __init__(self, peak: bool = False):
        super().__init__()
        self.peak = 0
        self._watches_peak = peak
        self._created: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if function is DEVICE_OF:  # most calls are of this function
            return function(*args)
        kwargs = kwargs or {}
        given = {
            tensor.untyped_storage()._cdata
            for tensor in _tensors((args, tuple(kwargs.values())))
        }
        result = function(*args, **kwargs)
        new = [tensor.untyped_storage() for tensor in _tensors(result)]
        new = [storage for storage in new if storage._cdata not in given]
        for storage in new:
            self._created.setdefault(
                storage._cdata, (StorageWeakRef(storage), storage.nbytes())
            )
        if new and self._watches_peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive at this moment."""
        self._created = {
            key: entry for key, entry in self._created.items() if not entry[0].expired()
        }
        return sum(nbytes for _, nbytes in self._created.values())

    def sizes(self) -> dict[int, int]:
        """Bytes of each storage that was alive at the last `now`, in the order in which they were made."""
        return {key: nbytes for key, (_, nbytes) in self._created.items()}


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operation."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _check(what: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise LayoutError(
            f"{what} {list(tensor.shape)} of {tensor.dtype}, but stages send "
            f"{list(expected.shape)} of {expected.dtype}. A layer changes the shape or the "
            "dtype of the hidden states; it must return the shape and dtype of its input."
        )
