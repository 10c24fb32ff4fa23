"""`TeacherPlan`: what a teacher adds to the bytes that each rank of a run holds and sends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...config import RunConfig
from ...models import Layer
from ...mpu.fake_group import fake_mesh
from ...mpu.grid import Grid
from ...mpu.group import Traffic
from ...mpu.mesh import Mesh
from ...pipeline.instruction import SENDS, Program, Schedule
from ...pipeline.passes import forward_only
from ...planning.fake_stages import (
    FakeStage,
    LiveBytes,
    StageRun,
    StageRunner,
    without_memory,
)
from ...planning.rank_plan import RankPlan, data_groups, gathers_of, state_traffic
from ...planning.run_model import DTYPES, boundary_shape, describe_layers, planned_batch
from ...planning.run_plan import RunPlan, plan_run, plan_schedule
from ...zero.prediction import ElementBytes, predict_sets
from ...zero.set_plan import ParameterUse, plan_parameters
from ...zero.settings import ZeroSettings
from .options import DistillationConfig
from .teacher import keeper
from .teacher_config import teacher_config
from .teacher_data import blank_tokens


@dataclass(frozen=True)
class TeacherPlan:
    """config: of the teacher; stages: all of them; programs: its forwards of a step, by pipeline rank; kept: bytes of
    its predictions for a step, on ranks with the last stage."""

    config: RunConfig
    grid: Grid
    run: RunPlan
    stages: Sequence[FakeStage]
    programs: Schedule
    microbatches: int
    kept: int

    def added_to(self, plan: RankPlan) -> RankPlan:
        """Return the plan of a rank with what the teacher needs there."""
        pp = self.grid.coordinates(plan.rank)["pp"]
        shape = self.run.shape
        stages = [self.stages[index] for index in shape.stages_of(pp)]
        # Its weights, of which ZeRO 3 gathers some at a time.
        groups = data_groups(self.config, self.grid, plan.rank, shape.placement)
        parameters = list(
            dict.fromkeys(p for stage in stages for p in stage.parameters)
        )
        settings = weights_alone(self.config)
        use = ParameterUse.of_stages(
            {stage.index: list(stage.modules) for stage in stages}
        )
        plans = plan_parameters(parameters, settings, groups, use)
        itemsize = DTYPES[self.config.optimizer.params_dtype].itemsize
        sizes = ElementBytes(itemsize, 0, lambda name: 0, False, False)
        held = predict_sets(plans, groups.rank_by_axes, sizes).total
        program = self.programs[pp]
        gathers, whole = gathers_of(self.config, plans, use, parameters, program)
        held += whole * itemsize
        # Its traffic: gathers, what its layers send, and hidden states.
        traffic = state_traffic(
            self.config,
            settings,
            groups,
            plans,
            parameters,
            gathers,
            self.microbatches,
        )
        for stage in stages:
            traffic.add_all(stage.run.traffic, self.microbatches)
        self._add_messages(traffic, program)
        traffic.add_all(plan.traffic)
        if shape.num_stages - 1 in shape.stages_of(pp):
            held += self.kept
        return replace(
            plan,
            traffic=traffic,
            beside=held,
            before=max(stage.run.at_work for stage in stages),
        )

    def _add_messages(self, traffic: Traffic, program: Program) -> None:
        sends = sum(i.op in SENDS for i in program)
        if sends:
            dtype = DTYPES[self.config.optimizer.params_dtype]
            message = torch.Size(boundary_shape(self.config)).numel() * dtype.itemsize
            traffic.add("send", "pp", self.grid.pp, sends * message, sends)


def weights_alone(config: RunConfig) -> ZeroSettings:
    """Return the settings of a replica that does not train."""
    settings = ZeroSettings.from_config(config)
    return replace(settings, frozen_masters=False, frozen_blocks=None)


def plan_teacher(
    student: RunConfig, grid: Grid, rank: int, device: str, microbatches: int
) -> TeacherPlan:
    """Return the plan of the teacher of a run. Arguments: as of `WorldPlan`. Reads the teacher's folder, and raises
    what a run raises."""
    config = teacher_config(student)
    mesh = fake_mesh(grid, rank)
    run = plan_run(config, describe_layers(config, mesh))
    mesh.place_stages(run.shape.placement)
    schedule = plan_schedule(config, microbatches, costs=run.stage_costs())
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "a plan begins with it"
    keep = keeper(student.of(DistillationConfig), vocab_size, mesh.group("tp"))
    # All stages, run forward without memory.
    with without_memory(device, config.train.kernels) as where:
        runner = ForwardRunner(config, mesh, run, where, keep)
        stages: list[FakeStage] = []
        for pp_rank in range(run.shape.size):
            stages += runner.stages_of(pp_rank)
    for stage in stages:
        stage.modules.requires_grad_(False)
    # What is kept of the predictions of a micro-batch.
    train = config.train
    size = (train.micro_batch_size, config.model.seq_length)
    predicted = blank_tokens(student, *size, torch.device("meta"))
    return TeacherPlan(
        config,
        grid,
        run,
        sorted(stages, key=lambda stage: stage.index),
        forward_only(schedule),
        microbatches,
        predicted.nbytes * microbatches,
    )


class ForwardRunner(StageRunner):
    """Runs stages forward, without gradients; keep: in place of the loss."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        plan: RunPlan,
        device: torch.device,
        keep: Callable,
    ):
        super().__init__(config, mesh, plan, device, frozenset())
        self.keep = keep

    def run_stage(
        self, index: int, layers: Sequence[Layer], modules: nn.ModuleList
    ) -> StageRun:
        modules.requires_grad_(False)
        stage = self._stage(index, modules)
        batch = replace(planned_batch(self.config, self.device), training=False)
        between = None if stage.is_first else self._between()
        self.mesh.traffic.clear()
        # All that is alive at a time, less what the caller has made.
        with LiveBytes(peak=True) as live, torch.no_grad(), stage.computing(self.keep):
            stage.forward(0, batch, between, 1.0)
        traffic = Traffic()
        traffic.add_all(self.mesh.traffic)
        return StageRun(0, live.peak, traffic=traffic)
