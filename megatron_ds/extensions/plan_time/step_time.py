"""`StepTime`: seconds of a planned step, by what they are spent on.

    stages        each phase of each stage takes what its recorded events take (stage_time.py). Gathers of ZeRO stage 3,
                  and reductions that follow each micro-batch, take at least their bytes, and what does not overlap
    schedule      the schedule of the plan, simulated with these times and those of its transfers
    gradients     are reduced while the last backward of a stage runs, and what follows it on its rank, or behind all
                  backwards without --overlap-grad-reduce
    update        reads and writes the state of the optimizer once, and waits for state that is offloaded
    gathers       of updated weights, behind the update

Gradients of the whole step of a rank are in its plan, so the reductions are those that the run will make.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...config import RunConfig
from ...pipeline.instruction import COMPUTE, SENDS, Instruction, Op
from ...pipeline.simulate import Simulation, simulate
from ...planning.flops import layers_of_run, model_flops
from ...planning.rank_plan import RankPlan
from ...planning.run_model import DTYPES, boundary_shape
from ...training.distributed import is_memory_scarce
from ...zero.settings import ZeroSettings
from ..dry_run.world_plan import WorldPlan
from .cluster import Cluster
from .link_time import Links
from .stage_time import PhaseTime, phase_time

BACKWARDS = frozenset({Op.B, Op.W})
DATA = ("dp", "edp")  # first axis of the groups that share gradients and weights
REDUCES = ("all_reduce", "reduce_scatter", "all_to_all", "all_to_all_v")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they follow from.

    pipeline    from the first forward to the last backward
    reduction   of gradients, beyond that
    update      of the weights
    gather      of updated weights
    phases      stage → phase → its time
    """

    plan: WorldPlan
    cluster: Cluster
    pipeline: float
    reduction: float
    update: float
    gather: float
    phases: Sequence[Mapping[Op, PhaseTime]] = field(repr=False)
    simulation: Simulation = field(repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.pipeline + self.reduction + self.update + self.gather

    @cached_property
    def flops(self) -> float:
        """Model FLOPs of a step, without recomputation."""
        config = self.plan.config
        return model_flops(
            layers_of_run(config),
            self.samples,
            config.model.seq_length,
            config.padded_vocab_size,
        )

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of a device."""
        return self.flops / self.seconds / self.plan.grid.world_size

    @property
    def hardware_flops_per_device(self) -> float:
        """FLOP/s of a device with those of recomputation."""
        again = self.plan.again_flops * self.samples
        return (self.flops + again) / self.seconds / self.plan.grid.world_size

    @property
    def peak(self) -> float:
        """FLOP/s of a device by its data sheet, in the dtype of the weights."""
        return self.cluster.device.peak_of(
            DTYPES[self.plan.config.optimizer.params_dtype]
        )

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak."""
        return self.flops_per_device / self.peak

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return (
            self.plan.microbatches
            * self.plan.config.train.micro_batch_size
            * self.plan.grid.dp
        )

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of a step, as a mean over the pipeline ranks, by what it is spent on; they add up to 1."""
        seconds: dict[str, float] = {}
        ranks = len(self.plan.schedule)
        for program in self.plan.schedule:
            counts = Counter((i.stage, i.op) for i in program if i.op in COMPUTE)
            for (stage, op), count in counts.items():
                _add_phase(seconds, self.phases[stage][op], count / ranks)
        busy = sum(seconds.values())
        seconds["bubble"] = max(0.0, self.pipeline - busy)
        seconds["data-parallel traffic"] = self.reduction + self.gather
        seconds["update"] = self.update
        whole = sum(seconds.values())
        return {name: value / whole for name, value in seconds.items() if value > 0}


def _add_phase(seconds: dict[str, float], phase: PhaseTime, factor: float) -> None:
    """Add what a phase is spent on; what neither computing nor a wait explains is a wait for gathers."""
    add = lambda name, value: seconds.__setitem__(
        name, seconds.get(name, 0.0) + value * factor
    )
    for kind, value in phase.by_kind.items():
        add(kind, value)
    for axes, value in phase.waits.items():
        add(TRAFFIC.get(axes, f"{axes} traffic"), value)
    rest = phase.seconds - sum(phase.by_kind.values()) - sum(phase.waits.values())
    if rest > 1e-12:
        add("data-parallel traffic", rest)


TRAFFIC = {
    "tp": "tensor-parallel traffic",
    "cp": "context-parallel traffic",
    "ep": "expert traffic",
    "etp": "expert-tensor traffic",
}


def step_time(plan: WorldPlan, cluster: Cluster) -> StepTime:
    """Return the time of a step of a plan whose stages were recorded."""
    # What each phase of each stage takes.
    cluster = in_run(cluster, plan.config, plan.device)
    links = Links(cluster, plan.grid, plan.rank)
    ranks = plan.pipeline_ranks
    phases = _phases(plan, cluster, links, ranks)
    message = _message_seconds(plan, links)

    def cost(i: Instruction) -> float:
        if i.op in COMPUTE:
            return phases[i.stage][i.op].seconds
        return message if i.op in SENDS else 0.0

    # The schedule with these times, and what ends behind its last backward.
    simulation = simulate(plan.schedule, cost)
    pipeline = simulation.span
    behind = max(
        _reduction_behind(plan, simulation, at, rank, links)
        for at, rank in enumerate(ranks)
    )
    return StepTime(
        plan,
        cluster,
        pipeline,
        max(0.0, behind - pipeline),
        max(_update_seconds(rank, cluster) for rank in ranks),
        max(_gather_seconds(plan, rank, links) for rank in ranks),
        phases,
        simulation,
    )


def in_run(cluster: Cluster, config: RunConfig, device: str) -> Cluster:
    """Return the cluster with the constants of a run: new pages take time where a processor's memory is scarce.

    device: planned, "cpu" or "cuda"
    """
    if device == "cpu" and is_memory_scarce(config):
        return cluster
    keeping = cluster.device.constants.keeping_pages()
    return replace(cluster, device=replace(cluster.device, constants=keeping))


def _phases(
    plan: WorldPlan, cluster: Cluster, links: Links, ranks: Sequence[RankPlan]
) -> list[dict[Op, PhaseTime]]:
    """Return the times of all stages. Gathers and reductions within a phase take at least their bytes."""
    known: dict[int, dict[Op, PhaseTime]] = {}
    found = []
    for stage in plan.stages:
        work = stage.run.work
        # Stages of one sort have one record.
        if id(work) not in known:
            known[id(work)] = {
                phase: phase_time(events, cluster.device, links)
                for phase, events in work.phases.items()
            }
        least = _least_seconds(
            plan, ranks[plan.run.shape.placement[stage.index]], links
        )
        found.append(
            {
                phase: _at_least(time, least.get(phase, 0.0), cluster.overlap)
                for phase, time in known[id(work)].items()
            }
        )
    return found


def _at_least(time: PhaseTime, seconds: float, overlap: float) -> PhaseTime:
    """Return a phase with messages of some seconds beside it.

    overlap: share of these in which the phase goes on
    """
    whole = max(seconds, time.seconds + (1 - overlap) * seconds)
    return PhaseTime(whole, time.waits, time.by_kind)


def _least_seconds(plan: WorldPlan, rank: RankPlan, links: Links) -> dict[Op, float]:
    """Phase → seconds of the gathers and reductions that belong to each of its micro-batches."""
    program = plan.schedule[plan.run.shape.placement[rank.stages[0]]]
    count = lambda ops: sum(i.op in ops for i in program)
    zero = plan.config.zero
    least: dict[Op, float] = {}
    if zero.stage == 3:
        each = _data_seconds(rank, links, ("all_gather",)) / max(
            1, count((Op.F, Op.B, Op.I))
        )
        least |= dict.fromkeys((Op.F, Op.B, Op.I), each)
    if _reduces_each(plan):
        phase = Op.W if count((Op.W,)) else Op.B
        each = _data_seconds(rank, links, REDUCES) / max(1, count(BACKWARDS))
        least[phase] = least.get(phase, 0.0) + each
    return least


def _reduces_each(plan: WorldPlan) -> bool:
    """Return whether the gradients of each micro-batch are reduced."""
    zero = plan.config.zero
    return zero.stage >= 2 and zero.zero_accumulate == "sharded"


def _data_seconds(rank: RankPlan, links: Links, operations: Sequence[str]) -> float:
    """Seconds of the messages of a step among data-parallel ranks."""
    traffic = rank.traffic
    return sum(
        links.seconds(
            operation, axes, size, nbytes, traffic.calls[operation, axes, size]
        )
        for (operation, axes, size), nbytes in traffic.bytes.items()
        if operation in operations and axes.split("-")[0] in DATA
    )


def _message_seconds(plan: WorldPlan, links: Links) -> float:
    """Seconds of hidden states from one pipeline rank to the next."""
    if plan.grid.pp == 1:
        return 0.0
    numbers = 1
    for size in boundary_shape(plan.config):
        numbers *= size
    width = DTYPES[plan.config.optimizer.params_dtype].itemsize
    return links.seconds("send", "pp", plan.grid.pp, numbers * width)


def _reduction_behind(
    plan: WorldPlan, simulation: Simulation, at: int, rank: RankPlan, links: Links
) -> float:
    """Return when the reductions of a pipeline rank have ended, from the begin of the step."""
    program = plan.schedule[at]
    ends = simulation.ends[at]
    if _reduces_each(plan):
        return ends[-1] if ends else 0.0
    last: dict[int, int] = {
        i.stage: number for number, i in enumerate(program) if i.op in BACKWARDS
    }
    whole = _data_seconds(rank, links, REDUCES)
    done = max(ends[number] for number in last.values())
    if plan.config.zero.overlap_comm is False:
        return done + whole
    # The stages of the rank share its gradients by their parameters.
    parameters = {stage: _elements(plan, stage) for stage in last}
    total = sum(parameters.values()) or 1
    settings = ZeroSettings.from_config(plan.config)
    bucket = settings.elements_of_bucket(rank.parameters, plan.grid.size("dp", "cp"))
    clock = 0.0
    for stage, number in sorted(last.items(), key=lambda pair: pair[1]):
        its_own = whole * parameters[stage] / total
        one = its_own * min(1.0, bucket / max(1, parameters[stage]))
        begun = max(clock, simulation.starts[at][number])
        clock = max(begun + its_own, ends[number] + one)
    # What keeps the processors is behind the last backward in any case.
    return max(clock, done + (1 - links.cluster.overlap) * whole)


def _elements(plan: WorldPlan, stage: int) -> int:
    return sum(p.numel() for p in plan.stages[stage].parameters)


def _update_seconds(rank: RankPlan, cluster: Cluster) -> float:
    """Seconds of the update: state is read and written, gradients are read for the norm and for the update."""
    state = rank.state
    kept = state.masters + state.optimizer
    moved = 2 * kept + 2 * state.gradients + state.parameters
    device = cluster.device
    away = sum(rank.away.values())
    waits = 2 * away / cluster.host_link if away else 0.0
    return moved / (device.bandwidth * device.constants.memory) + waits


def _gather_seconds(plan: WorldPlan, rank: RankPlan, links: Links) -> float:
    """Seconds in which the ranks gather updated weights; stage 3 gathers them when they are used."""
    if plan.config.zero.stage == 3:
        return 0.0
    return _data_seconds(rank, links, ("all_gather",))
