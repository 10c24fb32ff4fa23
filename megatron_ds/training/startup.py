"""What a run says before its first step: grid, stages, schedule, kernels, and every value that is not default."""

from dataclasses import fields

from ..config import RunConfig
from ..config.dump import report_non_default, report_without_effect
from ..mpu.mesh import Mesh
from ..pipeline.draw import draw
from ..pipeline.simulate import simulate
from .activations import kept_by_stage, most_kept, workload_of
from .build import Engine
from .plan import RunPlan, microbatches_of, plan_schedule

SHARES = {"flops": "FLOPs", "parameters": "parameters", "uniform": "decoder layers", "measured": "measured time"}


def describe(engine: Engine, launch_source: str) -> str:
    """The whole start-up text of rank 0."""
    config, mesh = engine.config, engine.mesh
    return "\n".join((
        _grid(mesh, launch_source), "", _stages(engine.plan, SHARES[config.parallel.pipeline_cut]), "",
        _schedule(config, engine.plan, engine.pinned), "",
        f"optimizer: {config.optimizer.optimizer}, {config.optimizer.params_dtype} weights, {config.optimizer.gradient_dtype} "
        "gradients, fp32 optimizer state", _zero(engine), _memory(engine), "",
        report_non_default(config), *filter(None, (report_without_effect(config),))))


def _memory(engine: Engine) -> str:
    held = engine.optimizer.memory()
    kinds = {field.name: getattr(held, field.name) for field in fields(held)}
    words = ", ".join(f"{name} {count / 2**20:.1f}" for name, count in (kinds | _activations(engine)).items() if count)
    return f"memory of rank 0 for {sum(p.numel() for p in engine.parameters):,} parameters (MiB): {words}"


def _activations(engine: Engine) -> dict[str, int]:
    """What the micro-batches of a full batch keep at the worst moment, as --dry-run says it."""
    config, train = engine.config, engine.config.train
    work = workload_of(config, engine.mesh.device.type)
    program = plan_schedule(config, microbatches_of(config), engine.pinned, engine.plan.stage_costs())
    layers = {stage: engine.plan.kinds[engine.plan.slice_of(stage)] for stage in engine.stages}
    kept = {stage: kept_by_stage(work, kinds, train.recompute_granularity, train.recompute_num_layers)
            for stage, kinds in layers.items()}
    return {"activations": most_kept(program[engine.mesh.coordinate("pp")], kept)}


def _grid(mesh: Mesh, launch_source: str) -> str:
    g = mesh.grid
    sizes = " × ".join(f"{axis} {getattr(g, axis)}" for axis in ("tp", "cp", "ep", "pp", "dp"))
    return f"grid: {g.world_size} rank(s) = {sizes}, order {g.order}, launched by {launch_source}, device {mesh.device.type}"


def _zero(engine: Engine) -> str:
    """State and traffic of rank 0; the same numbers are measured on the buffers and counted in the collectives."""
    config, memory = engine.config, engine.optimizer.memory()
    sent = ", ".join(f"{operation.replace('_', '-')} over {axes} {count:,}"
                     for (operation, axes), count in sorted(engine.traffic().items()))
    places = engine.optimizer.memory_by_place()
    where = f" ({', '.join(f'{place} {count:,}' for place, count in places.items())})" if set(places) - {"device"} else ""
    return (f"ZeRO stage {config.zero.stage}: {memory.total:,} bytes of state on this rank{where}; payload of a step over the "
            f"data-parallel ranks: {sent or 'none'}" + (f"\n{engine.why_pinned}" if engine.why_pinned else ""))


def _stages(plan: RunPlan, counted: str) -> str:
    rows = [f"pipeline stages (share of the {counted}):"]
    for stage, share in enumerate(plan.stage_cost_shares()):
        names = plan.stage_names(stage)
        what = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names)
        where = f"rank {plan.shape.placement[stage]}   " if plan.shape.chunks > 1 else ""
        rows.append(f"  stage {stage}: {len(names):3d} layers, {share:5.1%}   {where}{what}")
    return "\n".join(rows)


def _schedule(config: RunConfig, plan: RunPlan, pinned: bool, widest: int = 16) -> str:
    shape, microbatches = plan.shape, microbatches_of(config)
    title = f"schedule: {shape.schedule}, {microbatches} micro-batch(es) a step"
    if shape.size == 1:
        return title
    costs = plan.stage_costs()
    result = simulate(plan_schedule(config, microbatches, pinned, costs), costs.of)
    shown = min(microbatches, widest)
    picture = draw(plan_schedule(config, shown, pinned, costs))
    note = "" if shown == microbatches else f"\n(drawn for {shown} micro-batches)"
    return f"{title}, bubble about {result.bubble:.1%} ({plan.times.source})\n{picture}{note}"
