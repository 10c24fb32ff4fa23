"""`--dry-run`: print the plan of a run and exit. No GPU, no other process, no data; nothing is written.

A launch would meet the same errors, in the same words and with the same exit code: the rules over the configuration have been
checked before; the cut, the schedule and the layers are checked here.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..config import RunConfig
from ..config.flags import read_flags
from ..config.training_schedule import make_batch_size, make_token_drop
from ..mpu.grid import Grid, ranks_in_short
from ..mpu.launch import Launch
from ..mpu.traffic import RING_FACTOR
from ..pipeline.picture import draw
from .flops import model_flops, token_drop_savings
from .rank_plan import RankPlan
from .run_model import boundary_shape, last_step
from .run_plan import order
from .world_plan import WorldPlan, plan_world, wire_bytes, with_vocabulary

logger = logging.getLogger(__name__)


def names_its_world(argv: Sequence[str]) -> bool:
    """--dry-run with a --world-size: what launcher there is, if any, does not matter."""
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    return given.get("plan.dry_run", "off") != "off" and "plan.world_size" in given


def dry_run(as_given: RunConfig, launch: Launch) -> int:
    """Print the plan on rank 0; returns the exit code."""
    if launch.rank:
        return 0
    gc.freeze()             # a schedule is many small objects: leave those of the imports out of every collection
    config, unchecked = with_vocabulary(as_given)
    plan = plan_world(config, config.plan.rank, config.plan.dry_run)
    logger.info("%s", plan_text(plan, [*unchecked, *_unchecked(config)]))
    return 0


def _unchecked(config: RunConfig) -> list[str]:
    """What a launch would check and a plan does not, one line each."""
    data, zero, checkpoint = config.data, config.zero, config.checkpoint
    given = data.data_path or data.train_data_path or [*filter(None, (data.data_args_path, data.per_split_data_args_path))]
    files = f"the data in {' '.join(given)}" if given else "" if data.mock_data else "the data: none are given"
    folders = [f"write access to {folder}" for folder in (checkpoint.save, *dict.fromkeys(zero.disk_folders().values()))
               if folder]
    loads = [f"the checkpoint in {checkpoint.load}"] if checkpoint.load else []
    pins = ["--zero3-pin-stage auto, which depends on the memory of the devices; planned as off"] \
        if zero.stage == 3 and zero.zero3_pin_stage == "auto" else []
    cuts = ["the times of layers, which --pipeline-cut measured needs; cut by FLOPs in this plan"] \
        if config.parallel.pipeline_cut == "measured" else []
    devices = "memory and speed of the devices, the network between them, and memory that libraries and allocators take"
    return [*filter(None, [files]), *folders, *loads, *pins, *cuts, devices]


MOST_ROWS = 8
SHARES = {"flops": "FLOPs", "measured": "FLOPs", "parameters": "parameters held", "uniform": "decoder layers"}
DRAWN_RANKS, DRAWN_MICROBATCHES = 4, 8


def plan_text(plan: WorldPlan, unchecked: Sequence[str]) -> str:
    """All of it. unchecked: what a launch would look at and a plan did not."""
    parts = (grid_text(plan.grid, plan.rank, is_tied(plan)), stages_text(plan), schedule_text(plan), memory_text(plan),
             traffic_text(plan), flops_text(plan), proof_text(plan), ["not checked:", *(f"  {line}" for line in unchecked)])
    return "\n\n".join("\n".join(part) for part in parts)


# ------------------------------------------------------------------ grid
def is_tied(plan: WorldPlan) -> bool:
    """Two ranks hold the embedding: the model's ends share it, and live apart."""
    ends = plan.run.shape.placement[0], plan.run.shape.placement[-1]
    return not plan.config.model.untie_embeddings_and_output_weights and ends[0] != ends[1]


def grid_text(grid: Grid, rank: int, tied: bool) -> Iterator[str]:
    at = grid.coordinates(rank)
    where = ", ".join(f"{axis} {at[axis]}" for axis in ("tp", "pp", "dp"))
    yield (f"grid: {grid.world_size:,} rank{'s' * (grid.world_size > 1)} = tensor {grid.tp} × pipeline {grid.pp} × data "
           f"{grid.dp}, order {grid.order}; rank {rank} is {where}")
    names = {"tp": "tensor (tp)", "pp": "pipeline (pp)", "dp-cp": "data (dp-cp)", "tp-pp": "model (tp-pp)"}
    names |= {"embd": "tied embedding (embd)"} if tied else {}
    rows = [["group", "size", "groups", f"of rank {rank}"]]
    for name, title in names.items():
        ranks = (next(g for g in grid.embedding_groups() if rank in g) if name == "embd"
                 else grid.group_of(rank, *name.split("-")))
        count = grid.world_size // len(ranks) if name != "embd" else grid.world_size // grid.pp
        rows.append([title, str(len(ranks)), f"{count:,}", ranks_in_short(ranks)])
    yield from _left(rows)
    if grid.pp * grid.dp > 1:
        yield f"  ranks of each tensor group, [ ] holds rank {rank}:"
        yield from _picture(grid, at)


def _left(rows: list[list[str]]) -> list[str]:
    """The last column flush left."""
    width = max(len(row[-1]) for row in rows)
    return [line.rstrip() for line in table([[*row[:-1], row[-1].ljust(width)] for row in rows])]


def _picture(grid: Grid, at: dict[str, int]) -> list[str]:
    """Stages downward, data-parallel ranks to the right."""
    columns = _some(grid.dp, at["dp"], 5)
    rows = [["", *("…" if d is None else f"dp {d}" for d in columns)]]
    for pp in _some(grid.pp, at["pp"], 5):
        if pp is None:
            rows.append(["…"])
            continue
        row = [f"pp {pp}"]
        for dp in columns:
            ranks = () if dp is None else grid.group_of(grid.rank_of(pp=pp, dp=dp), "tp")
            text = ranks_in_short(ranks) if ranks else "…"
            row.append(f"[{text}]" if (pp, dp) == (at["pp"], at["dp"]) else f" {text} ")
        rows.append(row)
    return table(rows, indent="    ")


def _some(count: int, must: int, most: int) -> list[int | None]:
    """The first ones, the last one and `must`; None where others are left out."""
    if count <= most:
        return list(range(count))
    chosen = sorted({0, 1, must, count - 1})
    result: list[int | None] = []
    for number in chosen:
        if result and result[-1] != number - 1:
            result.append(None)
        result.append(number)
    return result


# ------------------------------------------------------------------ stages and schedule
def stages_text(plan: WorldPlan) -> Iterator[str]:
    shares, config = plan.run.stage_cost_shares(), plan.config
    counted = SHARES[config.parallel.pipeline_cut]
    how = f"--pipeline-layout {config.parallel.pipeline_layout}" if config.parallel.pipeline_layout else \
        f"cut to minimize the costliest stage, by {counted}"
    yield f"stages: {len(plan.stages)} of {len(plan.run.layers)} layers (embedding, final norm and head included), {how}"
    several = len(plan.stages) > plan.grid.pp
    rows = [["stage", *(["pp"] * several), "layers", "parameters", counted, "what"]]
    for stage in plan.stages:
        what = stage.names[0] if len(stage.names) == 1 else f"{stage.names[0]} … {stage.names[-1]}"
        count = sum(p.spec.numel for p in stage.parameters)
        rows.append([str(stage.index), *([str(plan.run.shape.placement[stage.index])] * several), str(len(stage.names)),
                     in_large(count), f"{shares[stage.index]:.2%}", what])
    rows = _left([row if len(row) > 1 else row for row in rows])
    shown = in_short([[row] for row in rows[1:]], MOST_ROWS)
    yield rows[0]
    yield from (line if line != "…" else "  …" for [line] in shown)
    copies = sum(p.spec.numel for stage in plan.stages for p in stage.parameters) - plan.parameters
    tied = f", and a tied copy of {copies:,} on another stage" if copies else ""
    yield f"  the model has {plan.parameters:,} parameters ({in_large(plan.parameters)}){tied}"


def schedule_text(plan: WorldPlan) -> Iterator[str]:
    config, m = plan.config, plan.microbatches
    p = plan.grid.pp
    yield (f"schedule: {plan.run.shape.schedule}, {m:,} micro-batch{'es' * (m > 1)} of "
           f"{config.train.micro_batch_size} × {config.model.seq_length:,} tokens per step and data-parallel rank")
    if p == 1:
        yield "  one pipeline rank: no bubble"
        return
    busy, span = plan.simulation.busy, plan.simulation.span
    idle = [1 - time / span for time in busy]
    live = plan.simulation.peak_live
    yield (f"  bubble about {plan.simulation.bubble:.1%} ({plan.run.times.source}), rank by rank "
           f"{min(idle):.1%} to {max(idle):.1%}")
    yield f"  micro-batches alive at most, rank by rank: {_spread(live)}"
    yield from (f"  {line}" for line in _drawing(plan))


def _spread(numbers: Sequence[int]) -> str:
    if len(numbers) <= MOST_ROWS:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:3]))}, … {', '.join(map(str, numbers[-2:]))}"


def _drawing(plan: WorldPlan) -> list[str]:
    config, p, m = plan.config, plan.grid.pp, plan.microbatches
    small, few = min(p, DRAWN_RANKS), min(m, DRAWN_MICROBATCHES)
    schedule = plan.computations
    if (small, few) != (p, m):
        shape = replace(plan.run.shape, size=small)
        schedule = order(config, shape, few)
    note = [] if (small, few) == (p, m) else [f"(drawn for {small} ranks and {few} micro-batches, a backward as two forwards)"]
    return [*draw(schedule).splitlines(), *note]


# ------------------------------------------------------------------ bytes
def memory_text(plan: WorldPlan) -> Iterator[str]:
    worst, mine = plan.worst, plan.rank_plan(plan.rank)
    zero, o, train = plan.config.zero, plan.config.optimizer, plan.config.train
    recompute = f"recomputation {train.recompute_granularity}" if train.recompute_granularity else "no recomputation"
    yield (f"memory of a rank on {plan.device.upper()} devices: ZeRO stage {zero.stage}, {o.params_dtype} weights, "
           f"{o.gradient_dtype} gradients, {o.optimizer}, {recompute}")
    plans = [worst] if worst.rank == mine.rank else [worst, mine]
    heads = [f"worst: rank {worst.rank}", f"rank {mine.rank}"][:len(plans)]
    if len(plans) == 1:
        heads = [f"rank {mine.rank}, the worst"]
    rows = [["", *heads], *([name, *(value(p) for p in plans)] for name, value in MEMORY_ROWS)]
    places = dict.fromkeys(place for p in plans for place in p.away)
    rows[5:5] = [[f"  of these in {place}", *(in_bytes(p.away.get(place, 0)) for p in plans)] for place in places]
    yield from table(rows)


def _alive(p: RankPlan) -> str:
    return in_bytes(p.kept)


MEMORY_ROWS = (
    ("stage", lambda p: ", ".join(map(str, p.stages))),
    ("parameters", lambda p: f"{p.parameters:,}"),
    ("weights", lambda p: in_bytes(p.state.parameters)),
    ("gradients", lambda p: in_bytes(p.state.gradients)),
    ("optimizer", lambda p: in_bytes(p.state.masters + p.state.optimizer)),
    ("communication buffers, up to", lambda p: in_bytes(p.buffers)),
    ("activations", _alive),
    ("  of one micro-batch", lambda p: in_bytes(p.kept_each)),
    ("working memory, about", lambda p: in_bytes(p.at_work)),
    ("peak, about", lambda p: in_bytes(p.peak)))


def traffic_text(plan: WorldPlan) -> Iterator[str]:
    mine, busiest = plan.rank_plan(plan.rank), plan.busiest
    yield f"traffic of a step, payload of rank {plan.rank} (last column: the part sent in a ring):"
    rows = [["operation", "over", "ranks", "count", "bytes", "", "ring"]]
    for key in sorted(mine.traffic.bytes, key=lambda key: -mine.traffic.bytes[key]):
        operation, axes, size = key
        count = mine.traffic.bytes[key]
        rows.append([operation.replace("_", "-"), axes, str(size), f"{mine.traffic.calls[key]:,}", f"{count:,}",
                     in_bytes(count), in_bytes(count * RING_FACTOR[operation](size))])
    yield from table(rows, left=2) if len(rows) > 1 else ["  none"]
    if len(rows) > 1:
        yield (f"  in total {in_bytes(wire_bytes(mine))} per step; the highest of any rank: "
               f"{in_bytes(wire_bytes(busiest))}, rank {busiest.rank}")


# ------------------------------------------------------------------ FLOPs and proof
def flops_text(plan: WorldPlan) -> Iterator[str]:
    config, s, drop = plan.config, plan.config.model.seq_length, make_token_drop(plan.config)
    batch = make_batch_size(config).final
    dropping = (len(drop.blocks), drop.kept_at(last_step(config), s)) if drop else ()
    model = model_flops(config.model, batch, s, config.padded_vocab_size, *dropping)
    whole = model + batch * plan.again_flops
    tokens = batch * s
    yield f"FLOPs of a step: {tokens:,} tokens in {batch:,} sequences"
    yield from table([["", "per step", "per token", "per rank and step"],
                      *([name, in_large(n, "FLOP"), in_large(n / tokens, "FLOP"), in_large(n / plan.grid.world_size, "FLOP")]
                        for name, n in (("model", model), ("with recomputation", whole)))])
    if drop:
        saving = token_drop_savings(config, drop)
        yield (f"  this is the last step; blocks {', '.join(map(str, drop.blocks))} keep {saving.first:,} of {s:,} tokens in "
               f"the first step, {saving.last:,} in the last")
        yield (f"  over the run the blocks process {saving.layer_tokens:,} tokens, {saving.token_share:.1%} of all; "
               f"model FLOPs {saving.flop_share:.1%}")


def proof_text(plan: WorldPlan) -> Iterator[str]:
    ran = [stage for stage in plan.stages if stage.ran]
    mine = plan.stages_of(plan.grid.coordinates(plan.rank)["pp"])
    shape = list(boundary_shape(plan.config))
    yield (f"proof: rank {plan.rank}'s modules were built on the meta device among {plan.grid.world_size:,} simulated "
           "ranks, with a forward and a backward of one micro-batch")
    for stage in mine:
        given = "tokens" if stage.index == 0 else f"{shape}"
        made = "the loss" if stage.index == len(plan.stages) - 1 else f"{shape}"
        yield (f"  stage {stage.index}: {given} → {made}, and back; {len(stage.parameters)} parameters, "
               f"{sum(p.numel() for p in stage.parameters):,} elements")
    others = [str(stage.index) for stage in ran if stage not in mine]
    if others:
        yield (f"  also checked, one stage of each other kind: {', '.join(others)}. Stages send {shape}, "
               f"{plan.config.optimizer.params_dtype}")


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "  ") -> list[str]:
    """Rows of cells as lines; the first `left` columns are flush left, numbers flush right."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    align = lambda i, cell: cell.ljust(widths[i]) if i < left else cell.rjust(widths[i])
    return [(indent + "  ".join(align(i, cell) for i, cell in enumerate(row))).rstrip() for row in rows]


def in_bytes(count: float) -> str:
    """Four digits and a unit: 1.234 MiB, 12.34 MiB, 123.4 MiB."""
    unit = 0
    while count >= 1023.95 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{_digits(count, 4) if unit else f'{count:,.0f}'} {UNITS[unit]}"


def in_large(count: float, unit: str = "") -> str:
    """1.008 T, 12.3 G."""
    for size, letter in LARGE:
        if count >= size:
            return f"{_digits(count / size, 4)} {letter}{unit}"
    return f"{count:,.0f} {unit}".rstrip()


def _digits(number: float, digits: int) -> str:
    whole = len(str(int(number)))
    return f"{number:.{max(digits - whole, 0)}f}"


def in_short(rows: Sequence[Sequence[str]], most: int) -> list[Sequence[str]]:
    """At most about `most` rows, those in the middle left out for a row that says so."""
    if len(rows) <= most + 1:
        return list(rows)
    head = (most + 1) // 2
    return [*rows[:head], ["…"], *rows[len(rows) - most + head:]]
