"""`--dry-run`: print the plan of a run and exit. No GPU, no other process, no data; nothing is written.

A launch raises the same errors, with the same messages and exit code: the rules of the configuration are
checked before (`config.parse`); the cut, the schedule and the layers are checked here.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...config import RunConfig
from ...config.training_schedule import make_batch_size
from ...features import features, used
from ...mpu.launch_facts import Launch
from ...mpu.managed_parameter import spec_of
from ...planning.fake_stages import FakeStage
from ...planning.flops import layers_of_run, model_flops
from ...planning.keep_gathered import is_automatic
from ...planning.run_model import boundary_shape, last_step
from ...planning.run_plan import order
from ..report.picture import draw
from .bytes_text import memory_text, traffic_text
from .context_text import context_text
from .device_fit import DeviceMemory, device_memory, fit_text, fits, remedies_text
from .expert_text import expert_rows, experts_text, has_experts
from .grid_text import grid_text, is_tied
from .kept_tokens import savings
from .plan_tables import in_large, in_short, table
from .world_plan import WorldPlan, plan_world, with_vocabulary

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


def dry_run(as_given: RunConfig, launch: Launch) -> int:
    """Print the plan on rank 0; returns the exit code: 1 if a rank does not fit its device."""
    if launch.rank:
        return 0
    gc.freeze()  # a schedule has many small objects, and each collection would visit those of the imports, too
    config, unchecked = with_vocabulary(as_given)
    memory = device_memory(config, config.plan.dry_run)
    additions = [
        feature.planned(config)
        for feature in features()
        if feature.planned is not None and used(feature, config)
    ]
    recorders = [addition.recorder for addition in additions]
    plan = plan_world(
        config, config.plan.rank, config.plan.dry_run, next(iter(recorders), None)
    )
    not_checked = [*unchecked, *_unchecked(config, memory)]
    logger.info("%s", plan_text(plan, not_checked, memory))
    for addition in additions:
        logger.info("%s", "\n".join(["", *addition.lines(plan)]))
    # Remedies take as long as a plan each, so they are sought only if the plan does not fit.
    if memory is None or fits(plan, memory):
        return 0
    logger.info("%s", "\n".join(["", *remedies_text(plan, memory)]))
    return 1


def _unchecked(config: RunConfig, memory: DeviceMemory | None) -> Iterator[str]:
    """Yield a line for everything that a launch checks and a plan does not."""
    data = config.data
    checkpoint = config.checkpoint
    # A plan opens no files.
    lists = filter(None, (data.data_args_path, data.per_split_data_args_path))
    given = data.data_path or data.train_data_path or [*lists]
    if given:
        yield f"the data in {' '.join(given)}"
    elif not data.mock_data:
        yield "the data: none are given"
    disks = dict.fromkeys(config.zero.disk_folders().values())
    for folder in filter(None, (checkpoint.save, *disks)):
        yield f"write access to {folder}"
    if checkpoint.load:
        yield f"the checkpoint in {checkpoint.load}"
    # A launch makes some choices by measuring devices or data.
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
    """Return the whole text. unchecked: what a launch checks and the plan did not. memory: of a device, if known"""
    # Parts of absent features have no lines and are left out.
    parts = (
        grid_text(plan.grid, plan.rank, is_tied(plan), has_experts(plan.config)),
        stages_text(plan),
        context_text(plan),
        experts_text(plan, plan.rank_plan(plan.rank)),
        schedule_text(plan),
        memory_text(plan),
        fit_text(plan, memory),
        traffic_text(plan),
        flops_text(plan),
        proof_text(plan),
        ["not checked:", *(f"  {line}" for line in unchecked)],
    )
    texts = ["\n".join(part) for part in parts]
    return "\n\n".join(filter(None, texts))


# ------------------------------------------------------------------ stages and schedule
def stages_text(plan: WorldPlan) -> Iterator[str]:
    """Yield how the model is cut: a row for each stage, and the parameters of the model."""
    # The shares of cost depend on the rule of the cut, so it is named.
    shares = plan.run.stage_cost_shares()
    config = plan.config
    counted = COUNTED[config.parallel.pipeline_cut]
    layout = config.parallel.pipeline_layout
    how = f"cut to minimize the costliest stage, by {counted}"
    if layout:
        how = f"--pipeline-layout {layout}"
    yield (
        f"stages: {len(plan.stages)} of {len(plan.run.layers)} layers (embedding, "
        f"final norm and head included), {how}"
    )
    # The pipeline rank is named if it has several stages.
    several = len(plan.stages) > plan.grid.pp
    rows = [["stage", *(["pp"] * several), "layers", "parameters", counted, "what"]]
    for stage in plan.stages:
        what = stage.names[0]
        if len(stage.names) > 1:
            what = f"{stage.names[0]} … {stage.names[-1]}"
        pp = plan.run.shape.placement[stage.index]
        row = [
            str(stage.index),
            *([str(pp)] * several),
            str(len(stage.names)),
            in_large(_elements(stage)),
            f"{shares[stage.index]:.2%}",
            what,
        ]
        rows.append(row)
    title, *lines = table(rows, last_left=True)
    yield title
    yield from in_short(lines, MOST_ROWS)
    # Tied weights count once in the size of the model.
    copies = sum(map(_elements, plan.stages)) - plan.parameters
    tied = ""
    if copies:
        tied = f", and a tied copy of {copies:,} on another stage"
    yield f"  the model has {plan.parameters:,} parameters ({in_large(plan.parameters)}){tied}"


def _elements(stage: FakeStage) -> int:
    """Elements of the parameters of a stage, in their logical shapes."""
    return sum(spec_of(p).numel for p in stage.parameters)


def schedule_text(plan: WorldPlan) -> Iterator[str]:
    """Yield the schedule: idle time and live micro-batches, rank by rank, and a drawing."""
    config = plan.config
    m = plan.microbatches
    p = plan.grid.pp
    yield (
        f"schedule: {plan.run.shape.schedule}, {m:,} "
        f"micro-batch{'es' if m > 1 else ''} of {config.train.micro_batch_size} × "
        f"{config.model.seq_length:,} tokens per step and data-parallel rank"
    )
    if p == 1:
        yield "  one pipeline rank: no bubble"
        return
    simulation = plan.simulation
    idle = [1 - time / simulation.span for time in simulation.busy]
    yield (
        f"  bubble about {simulation.bubble:.1%} ({plan.run.times.source}), "
        f"rank by rank {min(idle):.1%} to {max(idle):.1%}"
    )
    yield f"  micro-batches alive at most, rank by rank: {_spread(simulation.peak_live)}"
    yield from (f"  {line}" for line in _drawing(plan))


def _spread(numbers: Sequence[int]) -> str:
    """Return the numbers as text; of many only the first three and the last two."""
    texts = list(map(str, numbers))
    if len(texts) <= MOST_ROWS:
        return ", ".join(texts)
    first = ", ".join(texts[:3])
    last = ", ".join(texts[-2:])
    return f"{first}, … {last}"


def _drawing(plan: WorldPlan) -> list[str]:
    """Return the schedule as text; of a large one, that of fewer ranks and micro-batches."""
    p = plan.grid.pp
    m = plan.microbatches
    small = min(p, DRAWN_RANKS)
    few = min(m, DRAWN_MICROBATCHES)
    if (small, few) == (p, m):
        return draw(plan.computations).splitlines()
    schedule = order(plan.config, replace(plan.run.shape, size=small), few)
    return [
        *draw(schedule).splitlines(),
        f"(drawn for {small} ranks and {few} micro-batches, "
        "a backward as two forwards)",
    ]


# ------------------------------------------------------------------ FLOPs and proof
def flops_text(plan: WorldPlan) -> Iterator[str]:
    """FLOPs of the last step, and what token dropping saves over the run."""
    config = plan.config
    s = config.model.seq_length
    # The last step, in which the batch and the kept tokens have their final sizes.
    drop = config.kept_tokens
    batch = make_batch_size(config).final
    kept = drop.kept_at(last_step(config), s) if drop else None
    layers = layers_of_run(config)
    model = model_flops(layers, batch, s, config.padded_vocab_size, kept)
    whole = model + batch * plan.again_flops
    tokens = batch * s
    yield f"FLOPs of a step: {tokens:,} tokens in {batch:,} sequences"
    parts = (1, tokens, plan.grid.world_size)
    rows = [["", "per step", "per token", "per rank and step"]]
    for name, flops in {"model": model, "with recomputation": whole}.items():
        shares = [in_large(flops / part, "FLOP") for part in parts]
        rows.append([name, *shares])
    yield from table(rows)
    # Savings change during the run, so they are also given for all steps together.
    if drop:
        saving = savings(config, drop)
        yield (
            f"  this is the last step; blocks {', '.join(map(str, drop.blocks))} "
            f"keep {saving.first:,} of {s:,} tokens in the first step, "
            f"{saving.last:,} in the last"
        )
        yield (
            f"  over the run the blocks process {saving.layer_tokens:,} tokens, "
            f"{saving.token_share:.1%} of all; model FLOPs {saving.flop_share:.1%}"
        )


def proof_text(plan: WorldPlan) -> Iterator[str]:
    """Yield which stages ran forward and backward on the meta device, with their shapes."""
    ran = [stage for stage in plan.stages if stage.ran]
    mine = plan.stages_of(plan.grid.coordinates(plan.rank)["pp"])
    shape = list(boundary_shape(plan.config))
    yield (
        f"proof: rank {plan.rank}'s modules were built on the meta device among "
        f"{plan.grid.world_size:,} simulated ranks, with a forward and a backward "
        "of one micro-batch"
    )
    for stage in mine:
        is_last = stage.index == len(plan.stages) - 1
        given = "tokens" if stage.index == 0 else f"{shape}"
        made = "the loss" if is_last else f"{shape}"
        yield (
            f"  stage {stage.index}: {given} → {made}, and back; "
            f"{len(stage.parameters)} parameters, "
            f"{sum(p.numel() for p in stage.parameters):,} elements"
        )
    others = [str(stage.index) for stage in ran if stage not in mine]
    if others:
        yield (
            f"  also checked, one stage of each other kind: {', '.join(others)}. "
            f"Stages send {shape}, {plan.config.optimizer.params_dtype}"
        )
