"""`WorldPlan`: what follows from a configuration for all its ranks, as `--dry-run` shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...config import RunConfig, Source
from ...data.tokenizers import build_tokenizer
from ...errors import ConfigError, DataError
from ...models import Layer
from ...mpu.fake_group import fake_mesh
from ...mpu.grid import Grid
from ...mpu.group import RING_FACTOR
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import ParamSpec
from ...pipeline.instruction import COMPUTE, Schedule, StageCosts
from ...pipeline.simulate import Simulation, simulate
from ...planning.fake_stages import FakeStage, MakeRecorder, fake_stages
from ...planning.made_flops import beside_model
from ...planning.rank_plan import RankPlan, data_groups, plan_rank
from ...planning.run_model import describe_layers, last_step
from ...planning.run_plan import RunPlan, microbatches_of, plan_run, plan_schedule


@dataclass(frozen=True)
class WorldPlan:
    """The plan of all ranks of a configuration.

    rank      the planned rank (--rank)
    device    kind of the devices for which activations are counted: "cpu" or "cuda"
    schedule  for a full batch, with transfers and collectives
    stages    of the whole model, as the tensor-parallel rank of `rank` holds them
    """

    config: RunConfig
    grid: Grid
    rank: int
    device: str
    run: RunPlan
    costs: StageCosts
    microbatches: int
    schedule: Schedule
    stages: tuple[FakeStage, ...]

    @cached_property
    def computations(self) -> Schedule:
        """The schedule without transfers."""
        return tuple(
            tuple(i for i in program if i.op in COMPUTE) for program in self.schedule
        )

    def stages_of(self, pp_rank: int) -> list[FakeStage]:
        """Return the stages of a pipeline rank."""
        return [self.stages[index] for index in self.run.shape.stages_of(pp_rank)]

    @cached_property
    def metrics(self) -> frozenset[str]:
        """Names that the layers of all stages add to the ledger."""
        return frozenset().union(*(stage.run.metrics for stage in self.stages))

    def rank_plan(self, rank: int) -> RankPlan:
        """Memory and traffic of any rank."""
        pp = self.grid.coordinates(rank)["pp"]
        groups = data_groups(self.config, self.grid, rank, self.run.shape.placement)
        plan = plan_rank(
            self.config,
            rank,
            groups,
            self.stages_of(pp),
            self.schedule[pp],
            self.messages_held[pp],
            len(self.metrics),
            self.device,
        )
        return plan if self.objective is None else self.objective.added_to(plan)

    @cached_property
    def objective(self) -> Any | None:
        """The plan of what the objective needs besides the model; None if it needs nothing."""
        objective = self.config.objective
        if objective is None or objective.plan is None:
            return None
        return objective.plan(
            self.config, self.grid, self.rank, self.device, self.microbatches
        )

    @cached_property
    def messages_held(self) -> tuple[int, ...]:
        """`Simulation.peak_messages` of the schedule."""
        return Simulation(self.schedule, (), ()).peak_messages

    @cached_property
    def pipeline_ranks(self) -> tuple[RankPlan, ...]:
        """The first rank of each pipeline position: its shards are at least as large as the others'."""
        return tuple(
            self.rank_plan(self.grid.rank_of(pp=pp)) for pp in range(self.grid.pp)
        )

    @property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.pipeline_ranks, key=lambda plan: plan.peak)

    @property
    def busiest(self) -> RankPlan:
        """The rank that sends the most bytes, if every collective is a ring."""
        return max(self.pipeline_ranks, key=wire_bytes)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule with times in FLOPs and free transfers."""
        return simulate(self.computations, self.costs.of)

    @cached_property
    def specs(self) -> tuple[ParamSpec, ...]:
        """The logical tensors of the model, tied ones once."""
        by_name: dict[str, ParamSpec] = {}
        for stage in self.stages:
            by_name |= {spec_of(p).name: spec_of(p) for p in stage.parameters}
        return tuple(by_name.values())

    @property
    def parameters(self) -> int:
        """Parameters of the model without padding, tied weights counted once."""
        return sum(spec.numel for spec in self.specs)

    @cached_property
    def again_flops(self) -> float:
        """FLOPs of one sequence by `recomputed_flops`, of all layers."""
        return sum(recomputed_flops(self.config, stage.layers) for stage in self.stages)


def plan_world(
    config: RunConfig,
    rank: int = 0,
    device: str = "cuda",
    recorder: MakeRecorder | None = None,
) -> WorldPlan:
    """Return the plan of all ranks. config: must have the size of the vocabulary.

    recorder: of the work of each stage, which `StageRun.work` then has

    Raises what a launch raises: the cut and the schedule are checked here, the layers when they run on the
    meta device; `config.parse` has checked the rules of the configuration.
    """
    grid = config.grid()
    if not 0 <= rank < grid.world_size:
        raise ConfigError(
            f"--rank {rank} is not one of {grid.world_size} ranks. Use 0 to "
            f"{grid.world_size - 1}, or a larger --world-size."
        )
    # The cut into stages. A plan measures nothing.
    mesh = fake_mesh(grid, rank)
    layers = describe_layers(config, mesh)
    by_flops = config.with_values(
        {"parallel.pipeline_cut": "flops"}, Source("derived", "the plan")
    )
    run = plan_run(
        by_flops if config.parallel.pipeline_cut == "measured" else config, layers
    )
    microbatches = microbatches_of(config)
    mesh.place_stages(run.shape.placement)
    # The schedule, and a run of the stages without memory.
    keep_gathered = config.zero.stage == 3 and config.zero.zero3_pin_stage == "on"
    costs = run.stage_costs()
    schedule = plan_schedule(config, microbatches, keep_gathered, costs)
    stages = fake_stages(config, mesh, run, schedule, device, recorder)
    return WorldPlan(
        config, grid, rank, device, run, costs, microbatches, schedule, tuple(stages)
    )


def with_vocabulary(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(the configuration with the size of the vocabulary, a line about the tokenizer if it was not checked).

    The size is the tokenizer's, as in a run, or --vocab-size if the tokenizer's files are not here.
    """
    try:
        tokenizer = build_tokenizer(config.data, config.model)
    except (ConfigError, DataError, ImportError, OSError) as problem:
        if config.model.vocab_size is None:
            raise ConfigError(
                f"{problem} A plan needs only the size of the vocabulary: --vocab-size N."
            ) from problem
        reason = (
            str(problem).rstrip(".") if config.data.tokenizer_type else "none is given"
        )
        return config, [
            f"the tokenizer: {reason}; --vocab-size {config.model.vocab_size} is assumed"
        ]
    source = Source("derived", "the tokenizer")
    return config.with_values({"model.vocab_size": tokenizer.vocab_size}, source), []


def recomputed_flops(config: RunConfig, layers: Sequence[Layer]) -> float:
    """FLOPs that recomputation adds to the backward of one sequence, for a stage with these layers, and those that
    ranks spend on each other's tokens."""
    train = config.train
    length = config.model.seq_length
    dropping = config.kept_tokens
    kept = dropping.kept_at(last_step(config), length) if dropping else 0
    blocks = [
        layer.flops(kept if layer.drops_tokens else length, 0)
        for layer in layers
        if layer.is_block
    ]
    again = {
        None: lambda flops: flops.again,
        "full": lambda flops: flops.forward,
        "selective": lambda flops: flops.scores / 3 + flops.again,
    }[train.recompute_granularity]
    most = (
        len(blocks)
        if train.recompute_num_layers is None
        else train.recompute_num_layers
    )
    # What ranks compute of each other's tokens, they compute in each forward, and for each gradient.
    recomputes = train.recompute_granularity is not None
    beside = sum(
        beside_model(flops, recomputes and number < most)
        for number, flops in enumerate(blocks)
    )
    recomputed = sum(map(again, blocks[:most]))
    return beside + recomputed + sum(flops.again for flops in blocks[most:])


def wire_bytes(plan: RankPlan) -> float:
    """Bytes that a rank sends in a step, if every collective is a ring."""
    return sum(
        count * RING_FACTOR[op](n) for (op, _, n), count in plan.traffic.bytes.items()
    )
