"""`WorldPlan`: what follows from a config for all its ranks; what `--dry-run` shows.

A launch would meet the same errors: the rules over the configuration have spoken before (`config.parse`), the cut and the
schedule speak here, and the layers themselves when they are built and run on the meta device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..config import RunConfig, Source
from ..data.tokenizers import build_tokenizer
from ..errors import ConfigError, DataError
from ..mpu.grid import Grid
from ..mpu.imagined import imagined_mesh
from ..mpu.traffic import RING_FACTOR
from ..pipeline.instruction import Instruction, Op, Schedule
from ..pipeline.passes import COMPUTE, stage_ranks
from ..pipeline.simulate import Simulation, simulate
from .build import RunPlan, describe_layers, microbatches_of, plan_run, plan_schedule
from .flops import layer_flops
from .imagine import ImaginedStage, imagine_stages
from .rank_plan import RankPlan, place_of, plan_rank

# A backward costs twice a forward, its halves as much as a forward each.
FORWARDS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}


@dataclass(frozen=True)
class WorldPlan:
    """What follows from a config for all its ranks.

    rank      the one that was asked for
    device    kind of devices that activations are counted for
    schedule  lowered, for a full batch
    stages    of the whole model, as the tensor-parallel rank of `rank` holds them
    """

    config: RunConfig
    grid: Grid
    rank: int
    device: str
    run: RunPlan
    microbatches: int
    pinned: bool
    schedule: Schedule
    stages: tuple[ImaginedStage, ...]

    @cached_property
    def computations(self) -> Schedule:
        """The schedule without transfers."""
        return tuple(tuple(i for i in program if i.op in COMPUTE) for program in self.schedule)

    @cached_property
    def stage_ranks(self) -> dict[int, int]:
        """Stage → pipeline rank."""
        return stage_ranks(self.computations)

    def stages_of(self, pp_rank: int) -> list[ImaginedStage]:
        return [stage for stage in self.stages if self.stage_ranks[stage.index] == pp_rank]

    def rank_plan(self, rank: int) -> RankPlan:
        place = place_of(self.config, self.grid, rank)
        pp = place.at["pp"]
        return plan_rank(self.config, place, self.stages_of(pp), self.schedule[pp], self.microbatches, self.pinned, self.device)

    @cached_property
    def pipeline_ranks(self) -> tuple[RankPlan, ...]:
        """One rank of each pipeline position: the first, whose shards are never smaller than the others'."""
        return tuple(self.rank_plan(self.grid.rank_of(pp=pp)) for pp in range(self.grid.pp))

    @property
    def worst(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.pipeline_ranks, key=lambda plan: plan.peak)

    @property
    def busiest(self) -> RankPlan:
        """The rank that sends the most, if every collective is a ring."""
        return max(self.pipeline_ranks, key=wire_bytes)

    @cached_property
    def simulation(self) -> Simulation:
        """With time in FLOPs, transfers free."""
        return simulate(self.computations, self._cost)

    @cached_property
    def parameters(self) -> int:
        """Of the model: true shapes, tied weights once."""
        shapes = {p.spec.name: p.spec.numel for stage in self.stages for p in stage.parameters}
        return sum(shapes.values())

    @cached_property
    def forward_flops(self) -> tuple[float, ...]:
        """Of each layer, one sequence."""
        return tuple(cost / 3 for cost in self.run.costs)

    @cached_property
    def again_flops(self) -> tuple[float, ...]:
        """What each layer computes again in backward."""
        return tuple(flops for stage in self.stages for flops in recomputed_flops(self.config, stage.kinds))

    def _cost(self, i: Instruction) -> float:
        if i.op not in COMPUTE:
            return 0.0
        layers = slice(*self.run.bounds[i.stage:i.stage + 2])
        again = sum(self.again_flops[layers]) if i.op in (Op.B, Op.I) else 0.0
        return FORWARDS[i.op] * sum(self.forward_flops[layers]) + again


def plan_world(config: RunConfig, rank: int = 0, device: str = "cuda") -> WorldPlan:
    """config: with the size of the vocabulary. Raises what a launch would raise."""
    p = config.parallel
    grid = Grid.fit(config.world_size, tp=p.tensor_model_parallel_size, cp=p.context_parallel_size,
                    ep=p.expert_model_parallel_size, pp=p.pipeline_model_parallel_size, order=p.rank_order)
    if not 0 <= rank < grid.world_size:
        raise ConfigError(f"--rank {rank} is not one of {grid.world_size} ranks. Use 0 to {grid.world_size - 1}, or a larger "
                          "--world-size.")
    mesh = imagined_mesh(grid, rank)
    layers = describe_layers(config, mesh)
    run, microbatches = plan_run(config, layers), microbatches_of(config)
    pinned = config.zero.stage == 3 and config.zero.zero3_pin_stage == "on"
    schedule = plan_schedule(config, microbatches, pinned)
    here = {i.stage for i in schedule[mesh.coordinate("pp")] if i.op in COMPUTE}
    stages = imagine_stages(config, mesh, run, layers, tuple(here))
    return WorldPlan(config, grid, rank, device, run, microbatches, pinned, schedule, tuple(stages))


def with_vocabulary(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """(the config with the size of the vocabulary, what was not checked for want of files).

    The tokenizer says it, as in a run; where its files are not on this machine, --vocab-size does.
    """
    try:
        tokenizer = build_tokenizer(config.data, config.model)
    except (ConfigError, DataError, ImportError, OSError) as problem:
        if config.model.vocab_size is None:
            raise ConfigError(f"{problem} For a plan the size of the vocabulary is enough: --vocab-size N.") from problem
        return config, [f"the tokenizer: {str(problem).rstrip('.')}; its vocabulary is taken to be "
                        f"--vocab-size {config.model.vocab_size:,}"]
    return config.with_values({"model.vocab_size": tokenizer.vocab_size}, Source("derived", "the tokenizer")), []


def recomputed_flops(config: RunConfig, kinds: Sequence[str]) -> list[float]:
    """For each layer of a stage, the FLOPs of one sequence that its backward computes again."""
    train, model, s = config.train, config.model, config.model.seq_length
    attention = 2.0 * s * s * model.num_attention_heads * model.head_dim           # scores and values, causal, forward
    again, blocks = [], 0
    for kind in kinds:
        blocks += kind == "block"
        recomputes = kind == "block" and train.recompute_granularity and blocks <= (train.recompute_num_layers or blocks)
        whole = layer_flops(model, "block", s, 0) / 3
        again.append((whole if train.recompute_granularity == "full" else attention) if recomputes else 0.0)
    return again


def wire_bytes(plan: RankPlan) -> float:
    return sum(count * RING_FACTOR[op](n) for (op, _, n), count in plan.traffic.bytes.items())
