"""`--dry-run`: print the plan of a run and exit. No GPU, no other process, no data; nothing is written.

A launch raises the same errors, with the same messages and exit code: the rules of the configuration are
checked before (`config.parse`); the cut, the schedule and the layers are checked here.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..config import RunConfig
from ..config.sources.flags import read_flags
from ..config.training_schedule import make_batch_size, make_token_drop
from ..mpu.grid import Grid, ranks_in_short
from ..mpu.group import RING_FACTOR
from ..mpu.launch import Launch
from ..pipeline.picture import draw
from .context_text import context_text
from .device_fit import DeviceMemory, device_memory, fit_text, fits, remedies_text
from .expert_text import expert_rows, experts_text, has_experts
from .flops import model_flops, token_drop_savings
from .keep_gathered import is_automatic
from .plan_tables import in_bytes, in_large, in_short, table
from .rank_plan import RankPlan
from .run_model import boundary_shape, last_step
from .run_plan import order
from .world_plan import WorldPlan, plan_world, wire_bytes, with_vocabulary

logger = logging.getLogger(__name__)
MOST_ROWS = 8
COUNTED = {
    "flops": "FLOPs",
    "measured": "FLOPs",
    "parameters": "parameters held",
    "uniform": "decoder layers",
}
DRAWN_RANKS = 4
DRAWN_MICROBATCHES = 8


def names_its_world(argv: Sequence[str]) -> bool:
    """Whether --dry-run comes with --world-size. Then the launcher, if any, is ignored."""
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    return given.get("plan.dry_run", "off") != "off" and "plan.world_size" in given


def dry_run(as_given: RunConfig, launch: Launch) -> int:
    """Print the plan on rank 0; returns the exit code: 1 if a rank does not fit its device."""
    if launch.rank:
        return 0
    gc.freeze()  # a schedule is many small objects: each collection would visit those of the imports, too
    config, unchecked = with_vocabulary(as_given)
    memory = device_memory(config, config.plan.dry_run)
    plan = plan_world(config, config.plan.rank, config.plan.dry_run)
    logger.info(
        "%s", plan_text(plan, [*unchecked, *_unchecked(config, memory)], memory)
    )
    if memory is None or fits(plan, memory):
        return 0
    logger.info("%s", "\n".join(["", *remedies_text(plan, memory)]))
    return 1


def _unchecked(config: RunConfig, memory: DeviceMemory | None) -> Iterator[str]:
    """What a launch checks and a plan does not, one line each."""
    data = config.data
    checkpoint = config.checkpoint
    # Files: a plan opens none.
    given = (
        data.data_path
        or data.train_data_path
        or [*filter(None, (data.data_args_path, data.per_split_data_args_path))]
    )
    if given:
        yield f"the data in {' '.join(given)}"
    elif not data.mock_data:
        yield "the data: none are given"
    for folder in filter(
        None, (checkpoint.save, *dict.fromkeys(config.zero.disk_folders().values()))
    ):
        yield f"write access to {folder}"
    if checkpoint.load:
        yield f"the checkpoint in {checkpoint.load}"
    # Choices that a launch makes by measuring devices or data.
    if is_automatic(config):
        yield "--zero3-pin-stage auto, which depends on the memory of the devices; planned as off"
    if config.parallel.pipeline_cut == "measured":
        yield "the times of layers, which --pipeline-cut measured needs; cut by FLOPs in this plan"
    if any(most is not None for *_, most in expert_rows(config)):
        yield "the loads of the experts, which depend on the data; planned as equal"
    if memory is None:
        yield "whether each rank fits its device: --device-memory 80GB compares the peak with that"
    yield "speed of the devices and of the network, and memory that libraries and allocators take"


def plan_text(
    plan: WorldPlan, unchecked: Sequence[str], memory: DeviceMemory | None = None
) -> str:
    """The whole text. unchecked: what a launch checks and the plan did not. memory: of a device, if known"""
    experts = experts_text(plan, plan.rank_plan(plan.rank))
    context = context_text(plan)
    parts = (
        grid_text(plan.grid, plan.rank, is_tied(plan), has_experts(plan.config)),
        stages_text(plan),
        context,
        experts,
        schedule_text(plan),
        memory_text(plan),
        fit_text(plan, memory),
        traffic_text(plan),
        flops_text(plan),
        proof_text(plan),
        ["not checked:", *(f"  {line}" for line in unchecked)],
    )
    return "\n\n".join(filter(None, ("\n".join(part) for part in parts)))


# ------------------------------------------------------------------ grid
def is_tied(plan: WorldPlan) -> bool:
    """Whether two ranks hold the embedding: the first and the last stage share it from different ranks."""
    ends = plan.run.shape.placement[0], plan.run.shape.placement[-1]
    return (
        not plan.config.model.untie_embeddings_and_output_weights and ends[0] != ends[1]
    )


def grid_text(
    grid: Grid, rank: int, tied: bool, experts: bool = False
) -> Iterator[str]:
    """Sizes of the mesh, and the groups of one rank.

    tied: whether the embedding has a group. experts: whether the model has any
    """
    # Sizes of the axes, and the coordinates of the rank.
    at = grid.coordinates(rank)
    axes = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}
    if grid.cp == 1:
        del axes["cp"]
    where = ", ".join(f"{axis} {at[axis]}" for axis in axes)
    sizes = " × ".join(f"{name} {grid.size(axis)}" for axis, name in axes.items())
    yield (
        f"grid: {grid.world_size:,} rank{'s' if grid.world_size > 1 else ''} = {sizes}, order {grid.order}; rank "
        f"{rank} is {where}"
    )
    # One row for each group of the rank; groups of absent features are left out.
    names = {axis: f"{axes[axis]} ({axis})" for axis in axes if axis != "dp"}
    names |= {"dp-cp": "data (dp-cp)", "tp-pp": "model (tp-pp)"}
    names |= {"ep": "expert (ep)", "edp": "expert data (edp)"} if experts else {}
    names |= {"embd": "tied embedding (embd)"} if tied else {}
    rows = [["group", "size", "groups", f"of rank {rank}"]]
    for name, title in names.items():
        ranks = (
            next(g for g in grid.embedding_groups() if rank in g)
            if name == "embd"
            else grid.group_of(rank, *name.split("-"))
        )
        count = (
            grid.world_size // len(ranks)
            if name != "embd"
            else grid.world_size // grid.pp
        )
        rows.append([title, str(len(ranks)), f"{count:,}", ranks_in_short(ranks)])
    yield from table(rows, last_left=True)
    if grid.pp * grid.dp * grid.cp > 1:
        yield f"  ranks of each tensor group, [ ] holds rank {rank}:"
        yield from _picture(grid, at)


def _picture(grid: Grid, at: dict[str, int]) -> list[str]:
    """The tensor groups: a row for each pipeline rank, a column for each data- and context-parallel rank."""
    # The header: data- and context-parallel coordinates, with gaps in large grids.
    columns = _some(grid.dp * grid.cp, at["dp"] * grid.cp + at["cp"], 5)
    places = {
        i: dict(zip(("dp", "cp"), divmod(i, grid.cp))) for i in columns if i is not None
    }
    names = [axis for axis in ("dp", "cp") if axis == "dp" or grid.cp > 1]
    rows = [
        [
            "",
            *(
                "…"
                if i is None
                else " ".join(f"{axis} {places[i][axis]}" for axis in names)
                for i in columns
            ),
        ]
    ]
    # A row for each pipeline rank, with the group of the planned rank in brackets.
    for pp in _some(grid.pp, at["pp"], 5):
        if pp is None:
            rows.append(["…"])
            continue
        row = [f"pp {pp}"]
        for i in columns:
            ranks = (
                ()
                if i is None
                else grid.group_of(grid.rank_of(pp=pp, **places[i]), "tp")
            )
            text = ranks_in_short(ranks) if ranks else "…"
            here = i is not None and {"pp": pp, **places[i]}.items() <= at.items()
            row.append(f"[{text}]" if here else f" {text} ")
        rows.append(row)
    return table(rows, indent="    ")


def _some(count: int, must: int, most: int) -> list[int | None]:
    """0 to `count` - 1; if more than `most`, only the first two, `must` and the last; None is a gap."""
    chosen = range(count) if count <= most else sorted({0, 1, must, count - 1})
    result: list[int | None] = []
    for number in chosen:
        if result and result[-1] != number - 1:
            result.append(None)
        result.append(number)
    return result


# ------------------------------------------------------------------ stages and schedule
def stages_text(plan: WorldPlan) -> Iterator[str]:
    """How the model is cut: a row for each stage, and the parameters of the model."""
    # How the layers were divided.
    shares = plan.run.stage_cost_shares()
    config = plan.config
    counted = COUNTED[config.parallel.pipeline_cut]
    layout = config.parallel.pipeline_layout
    how = (
        f"--pipeline-layout {layout}"
        if layout
        else f"cut to minimize the costliest stage, by {counted}"
    )
    yield (
        f"stages: {len(plan.stages)} of {len(plan.run.layers)} layers (embedding, final norm and head "
        f"included), {how}"
    )
    # One row for each stage. The rank is named where a rank has several.
    several = len(plan.stages) > plan.grid.pp
    rows = [["stage", *(["pp"] * several), "layers", "parameters", counted, "what"]]
    for stage in plan.stages:
        what = (
            stage.names[0]
            if len(stage.names) == 1
            else f"{stage.names[0]} … {stage.names[-1]}"
        )
        count = sum(p.spec.numel for p in stage.parameters)
        rows.append(
            [
                str(stage.index),
                *([str(plan.run.shape.placement[stage.index])] * several),
                str(len(stage.names)),
                in_large(count),
                f"{shares[stage.index]:.2%}",
                what,
            ]
        )
    title, *lines = table(rows, last_left=True)
    yield title
    yield from in_short(lines, MOST_ROWS)
    # The size of the model, in which tied weights count once.
    copies = (
        sum(p.spec.numel for stage in plan.stages for p in stage.parameters)
        - plan.parameters
    )
    tied = f", and a tied copy of {copies:,} on another stage" if copies else ""
    yield f"  the model has {plan.parameters:,} parameters ({in_large(plan.parameters)}){tied}"


def schedule_text(plan: WorldPlan) -> Iterator[str]:
    """The schedule: idle time and live micro-batches, rank by rank, and a drawing."""
    config = plan.config
    m = plan.microbatches
    p = plan.grid.pp
    yield (
        f"schedule: {plan.run.shape.schedule}, {m:,} micro-batch{'es' if m > 1 else ''} of "
        f"{config.train.micro_batch_size} × {config.model.seq_length:,} tokens per step and data-parallel "
        "rank"
    )
    if p == 1:
        yield "  one pipeline rank: no bubble"
        return
    simulation = plan.simulation
    idle = [1 - time / simulation.span for time in simulation.busy]
    yield (
        f"  bubble about {simulation.bubble:.1%} ({plan.run.times.source}), rank by rank "
        f"{min(idle):.1%} to {max(idle):.1%}"
    )
    yield f"  micro-batches alive at most, rank by rank: {_spread(simulation.peak_live)}"
    yield from (f"  {line}" for line in _drawing(plan))


def _spread(numbers: Sequence[int]) -> str:
    if len(numbers) <= MOST_ROWS:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:3]))}, … {', '.join(map(str, numbers[-2:]))}"


def _drawing(plan: WorldPlan) -> list[str]:
    p = plan.grid.pp
    m = plan.microbatches
    small = min(p, DRAWN_RANKS)
    few = min(m, DRAWN_MICROBATCHES)
    if (small, few) == (p, m):
        return draw(plan.computations).splitlines()
    schedule = order(plan.config, replace(plan.run.shape, size=small), few)
    return [
        *draw(schedule).splitlines(),
        f"(drawn for {small} ranks and {few} micro-batches, a backward as two forwards)",
    ]


# ------------------------------------------------------------------ bytes
def memory_text(plan: WorldPlan) -> Iterator[str]:
    """Bytes of the rank that needs the most, and of the planned rank."""
    worst = plan.worst
    mine = plan.rank_plan(plan.rank)
    zero = plan.config.zero
    o = plan.config.optimizer
    train = plan.config.train
    granularity = train.recompute_granularity
    yield (
        f"memory of a rank on {plan.device.upper()} devices: ZeRO stage {zero.stage}, {o.params_dtype} "
        f"weights, {o.gradient_dtype} gradients, {o.optimizer}, "
        + (f"recomputation {granularity}" if granularity else "no recomputation")
    )
    # One column for each of the two ranks, or one if they are the same.
    plans = [worst, mine]
    heads = [f"worst: rank {worst.rank}", f"rank {mine.rank}"]
    if worst.rank == mine.rank:
        plans = [mine]
        heads = [f"rank {mine.rank}, the worst"]
    rows = [["", *heads]]
    places = dict.fromkeys(place for p in plans for place in p.away)
    # Rows that not every plan has stand below those that they are part of.
    for name, value in MEMORY_ROWS:
        rows.append([name, *(value(p) for p in plans)])
        if name == "activations" and plan.device == "cuda":
            rows.append(
                ["  in allocator segments", *(in_bytes(p.reserved) for p in plans)]
            )
        if name == "working memory, about" and any(p.in_update for p in plans):
            rows.append(
                ["  in the update of matrices", *(in_bytes(p.in_update) for p in plans)]
            )
        if name == "  of one micro-batch" and any(p.in_host for p in plans):
            rows.append(
                ["activations in host memory", *(in_bytes(p.in_host) for p in plans)]
            )
        if name == "parameters" and has_experts(plan.config):
            rows.append(
                ["  of these of experts", *(f"{p.of_experts:,}" for p in plans)]
            )
        if name == "optimizer":
            rows += [
                [
                    f"  of these in {place}",
                    *(in_bytes(p.away.get(place, 0)) for p in plans),
                ]
                for place in places
            ]
    yield from table(rows)


MEMORY_ROWS: tuple[tuple[str, Callable[[RankPlan], str]], ...] = (
    ("stage", lambda p: ", ".join(map(str, p.stages))),
    ("parameters", lambda p: f"{p.parameters:,}"),
    ("weights", lambda p: in_bytes(p.state.parameters)),
    ("gradients", lambda p: in_bytes(p.state.gradients)),
    ("optimizer", lambda p: in_bytes(p.state.masters + p.state.optimizer)),
    ("communication buffers, up to", lambda p: in_bytes(p.buffers)),
    ("activations", lambda p: in_bytes(p.kept)),
    ("  of one micro-batch", lambda p: in_bytes(p.kept_each)),
    ("working memory, about", lambda p: in_bytes(p.at_work)),
    ("peak, about", lambda p: in_bytes(p.peak)),
)


def traffic_text(plan: WorldPlan) -> Iterator[str]:
    """Payload of the planned rank in a step: a row for each operation over a group."""
    mine = plan.rank_plan(plan.rank)
    busiest = plan.busiest
    yield f"traffic of a step, payload of rank {plan.rank} (last column: the part sent in a ring):"
    # The operations, those with the most bytes first.
    rows = [["operation", "over", "ranks", "count", "bytes", "", "ring"]]
    for key in sorted(mine.traffic.bytes, key=lambda key: -mine.traffic.bytes[key]):
        operation, axes, size = key
        count = mine.traffic.bytes[key]
        rows.append(
            [
                operation.replace("_", "-"),
                axes,
                str(size),
                f"{mine.traffic.calls[key]:,}",
                f"{count:,}",
                in_bytes(count),
                in_bytes(count * RING_FACTOR[operation](size)),
            ]
        )
    if len(rows) == 1:
        yield "  none"
        return
    yield from table(rows, left=2)
    yield (
        f"  in total {in_bytes(wire_bytes(mine))} per step; the highest of any rank: "
        f"{in_bytes(wire_bytes(busiest))}, rank {busiest.rank}"
    )


# ------------------------------------------------------------------ FLOPs and proof
def flops_text(plan: WorldPlan) -> Iterator[str]:
    """FLOPs of the last step, and what token dropping saves over the run."""
    config = plan.config
    s = plan.config.model.seq_length
    # The last step, in which the batch and the kept tokens have their final sizes.
    drop = make_token_drop(plan.config)
    batch = make_batch_size(config).final
    dropping = (drop.blocks, drop.kept_at(last_step(config), s)) if drop else ()
    model = model_flops(config.model, batch, s, config.padded_vocab_size, *dropping)
    whole = model + batch * plan.again_flops
    tokens = batch * s
    yield f"FLOPs of a step: {tokens:,} tokens in {batch:,} sequences"
    parts = 1, tokens, plan.grid.world_size
    yield from table(
        [
            ["", "per step", "per token", "per rank and step"],
            *(
                [name, *(in_large(flops / part, "FLOP") for part in parts)]
                for name, flops in (("model", model), ("with recomputation", whole))
            ),
        ]
    )
    # Savings change during the run, so they are also given for all steps together.
    if drop:
        saving = token_drop_savings(config, drop)
        yield (
            f"  this is the last step; blocks {', '.join(map(str, drop.blocks))} keep {saving.first:,} of "
            f"{s:,} tokens in the first step, {saving.last:,} in the last"
        )
        yield (
            f"  over the run the blocks process {saving.layer_tokens:,} tokens, {saving.token_share:.1%} "
            f"of all; model FLOPs {saving.flop_share:.1%}"
        )


def proof_text(plan: WorldPlan) -> Iterator[str]:
    """Which stages ran forward and backward on the meta device, with their shapes."""
    ran = [stage for stage in plan.stages if stage.ran]
    mine = plan.stages_of(plan.grid.coordinates(plan.rank)["pp"])
    shape = list(boundary_shape(plan.config))
    yield (
        f"proof: rank {plan.rank}'s modules were built on the meta device among {plan.grid.world_size:,} "
        "simulated ranks, with a forward and a backward of one micro-batch"
    )
    for stage in mine:
        given = "tokens" if stage.index == 0 else f"{shape}"
        made = "the loss" if stage.index == len(plan.stages) - 1 else f"{shape}"
        yield (
            f"  stage {stage.index}: {given} → {made}, and back; {len(stage.parameters)} parameters, "
            f"{sum(p.numel() for p in stage.parameters):,} elements"
        )
    others = [str(stage.index) for stage in ran if stage not in mine]
    if others:
        yield (
            f"  also checked, one stage of each other kind: {', '.join(others)}. Stages send {shape}, "
            f"{plan.config.optimizer.params_dtype}"
        )
