"""The text that a run logs before its first step: grid, model, stages, schedule, memory, options."""

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..config import RunConfig
from ..config.messages import value_text
from ..config.moe_notes import moe_notes
from ..config.run import non_default
from ..config.sources.config_text import report_without_effect
from ..host.allocator import allocator_text
from ..models import Layer, build_stages
from ..mpu.fake_group import fake_mesh
from ..mpu.grid import Grid
from ..pipeline.picture import draw
from ..pipeline.simulate import simulate
from ..planning.fake_stages import most_kept, run_own_stages
from ..planning.run_model import describe_layers
from ..planning.run_plan import RunPlan, microbatches_of, plan_schedule
from .build import Replica

SHARES = {
    "flops": "FLOPs",
    "parameters": "parameters",
    "uniform": "decoder layers",
    "measured": "measured time",
}
# Kind of a value's source → title of the group in which the value is listed, from the name of the source.
GROUPS = {
    "flag": lambda name: "flags",
    "script": lambda name: name,
    "derived": lambda name: "derived",
    "yaml": lambda name: Path(name.rpartition(":")[0]).name,
    "deepspeed": lambda name: Path(name.rpartition(" ")[0]).name,
}
WIDTH = 110
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES = 8
MOST_QUEUES = 32


def describe(engine: Replica, launch_source: str, given: RunConfig) -> str:
    """The start-up text of rank 0. given: the config before the tokenizer set the vocabulary size."""
    config = engine.config
    mesh = engine.mesh
    # Blank lines separate model, stages, schedule and options; texts of absent features are left out.
    return "\n".join(
        (
            grid_text(mesh.grid, launch_source, mesh.device.type),
            _model(engine, given),
            *filter(None, (experts_text(config),)),
            "",
            _stages(engine.plan, SHARES[config.parallel.pipeline_cut]),
            "",
            _schedule(config, engine.plan, engine.keeps_gathered),
            "",
            f"optimizer: {config.optimizer.optimizer}, {config.optimizer.params_dtype} weights, "
            f"{config.optimizer.gradient_dtype} gradients, fp32 optimizer state",
            *filter(
                None,
                (
                    allocator_text(),
                    queues_text(os.environ, mesh.device.type),
                    dropout_text(config, mesh.device.type),
                ),
            ),
            _zero(engine),
            _memory(engine),
            *filter(None, (kept_inputs_text(config, mesh.device.type),)),
            "",
            values_text(config),
            *filter(None, (report_without_effect(config), notes_text(config))),
        )
    )


def queues_text(environ: Mapping[str, str], device: str) -> str:
    """How many hardware queues the streams of a GPU share, in one line; empty on a CPU, and with all queues."""
    value = environ.get(QUEUES, "")
    if device != "cuda" or value == str(MOST_QUEUES):
        return ""
    is_set = f"is {value}" if value else f"is not set, which means {DEFAULT_QUEUES}"
    return (
        f"{QUEUES} {is_set}: streams that share a hardware queue wait for each other. Results are the same; set "
        f"it to {MOST_QUEUES}, so that transfers overlap with computation, unless other code of the process needs "
        "the order of one queue"
    )


def dropout_text(config: RunConfig, device: str) -> str:
    """What dropout of attention costs on a GPU, in one line; empty on a CPU, and without it."""
    p = config.model.attention_dropout
    if device != "cuda" or not p:
        return ""
    return (
        f"--attention-dropout {p:g} needs the probabilities, which fused attention does not have: attention takes "
        "several times as long. Set it to 0 unless the recipe needs it"
    )


def _memory(engine: Replica) -> str:
    counts = asdict(engine.optimizer.memory()) | _activations(engine)
    listed = (f"{name} {n / 2**20:.1f}" for name, n in counts.items() if n)
    return f"memory of rank 0 (MiB): {', '.join(listed)}"


def kept_inputs_text(config: RunConfig, device: str) -> str:
    """Where inputs of recomputed layers wait, in one line; empty if on the device, as usual."""
    if not config.train.checkpoint_in_cpu:
        return ""
    if device == "cpu":
        return "--checkpoint-in-cpu has no effect: the memory of this device is that of the host"
    return "inputs of recomputed layers wait in host memory"


def _activations(engine: Replica) -> dict[str, int]:
    """Maximum of what the micro-batches of a full batch keep, as --dry-run shows it; nothing on a CPU."""
    # The plan of a small model takes longer than its first steps.
    if engine.mesh.device.type == "cpu":
        return {}
    schedule = plan_schedule(
        engine.config,
        microbatches_of(engine.config),
        engine.keeps_gathered,
        engine.plan.stage_costs(),
    )
    program = schedule[engine.mesh.coordinate("pp")]
    runs = run_own_stages(
        engine.config, engine.mesh, engine.plan, program, only_forward=True
    )
    return {
        "activations": most_kept(
            program, {stage: run.kept for stage, run in runs.items()}
        )
    }


def grid_text(grid: Grid, launch_source: str, device: str) -> str:
    """The sizes of the mesh axes. Context and expert parallelism are left out if their size is 1."""
    axes = [
        axis
        for axis in grid.order.split("-")
        if axis not in ("cp", "ep") or getattr(grid, axis) > 1
    ]
    sizes = " × ".join(
        f"{axis} {getattr(grid, axis)}"
        for axis in ("tp", "cp", "ep", "pp", "dp")
        if axis in axes
    )
    return (
        f"grid: {grid.world_size} rank{'s' if grid.world_size > 1 else ''} = {sizes}, order {'-'.join(axes)}, "
        f"launched by {launch_source}, device {device}"
    )


def _model(engine: Replica, given: RunConfig) -> str:
    """Parameters of the model and of this rank, and the size of the vocabulary."""
    config = engine.config
    found = config.model.vocab_size
    padded = config.padded_vocab_size
    here = sum(p.numel() for p in engine.parameters)
    note = " with the padding of the vocabulary" if padded != found else ""
    adds_end = config.data.tokenizer_type == "NullTokenizer"
    whole = count_parameters(config, engine.mesh.grid)
    return (
        f"model: {whole:,} parameters; rank 0 trains {here:,}{note}\n"
        + vocabulary_text(given.model.vocab_size, found, padded, adds_end)
    )


def count_parameters(config: RunConfig, grid: Grid) -> int:
    """Parameters of the model: logical shapes without padding, tied weights counted once. Uses no memory."""
    layers = describe_layers(config, fake_mesh(grid, 0))
    modules = build_stages({0: layers})[0]
    return sum({p.spec.name: p.spec.numel for p in modules.parameters()}.values())


def vocabulary_text(given: int | None, found: int, padded: int, adds_end: bool) -> str:
    """The size of the vocabulary and its derivation.

    given: --vocab-size, if any; found: tokens of the tokenizer; padded: rows of the embedding; adds_end: the
    tokenizer has `given` tokens and an end-of-document token
    """
    tokens = f"vocabulary: {found:,} tokens"
    if given is not None and adds_end:
        tokens += f" (--vocab-size {given} and one for the end of a document)"
    elif given is not None and given != found:
        tokens += f" (of the tokenizer; --vocab-size {given} is not used)"
    return tokens + (
        f", padded to {padded:,} rows (--make-vocab-size-divisible-by)"
        if padded != found
        else ""
    )


def experts_text(config: RunConfig) -> str:
    """The experts in one line, empty without any.

    experts: 8 in layers 1, 3, … 11; of width 128; 2 for a token; divided among 4 expert-parallel ranks
    """
    model = config.model
    ep = config.parallel.expert_model_parallel_size
    # Layers with equally many experts are listed together.
    numbers: dict[int, list[int]] = {}
    for layer, number in enumerate(model.experts):
        if number:
            numbers.setdefault(number, []).append(layer)
    if not numbers:
        return ""
    layers = "; ".join(
        f"{number} in {ranges_text(of_layers)}" for number, of_layers in numbers.items()
    )
    # What computes beside the experts, where they lie, and how they are chosen.
    shared = model.moe_shared_expert_intermediate_size
    beside = f", beside shared experts of width {shared}" if shared else ""
    if model.mlp_type == "residual":
        beside = f", beside a dense feed-forward of width {model.ffn_size}"
    held = (
        f"divided among {ep} expert-parallel ranks"
        if ep > 1
        else "all on every data-parallel rank"
    )
    chosen = (
        "chosen by the experts"
        if model.moe_choice == "expert_choice"
        else (f"{model.moe_router_topk} for a token")
    )
    return (
        f"experts: {layers}; of width {model.expert_ffn_size}{beside}; {chosen}; {held}"
    )


def ranges_text(numbers: Sequence[int]) -> str:
    """Layers, counted from 0, as text: [3] → "layer 3", [1, 2, 3, 7] → "layers 1 to 3, 7"; a regular
    distance is written "layers 1, 3, … 11"."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    step = numbers[1] - numbers[0]
    if (
        step > 1
        and len(numbers) > 3
        and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step))
    ):
        return f"layers {numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "layers " + ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs
    )


def notes_text(config: RunConfig) -> str:
    """Differences of layers with experts from those of Megatron and DeepSpeed; empty without any."""
    lines = [
        textwrap.fill(
            note,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for note in moe_notes(config)
    ]
    return (
        "\n".join(("experts, compared with Megatron and DeepSpeed:", *lines))
        if lines
        else ""
    )


def values_text(config: RunConfig) -> str:
    """All values that differ from their defaults, grouped by source.

    not at their defaults:
      gpt.yaml  num_layers 12, hidden_size 768, …
      flags     lr 0.0006
      derived   vocab_size 50257 (the tokenizer)
    """
    groups: dict[str, list[str]] = {}
    for option, value in non_default(config):
        name = option.flag.removeprefix("--").replace(
            "-", "_"
        )  # zero_stage; its field is `stage`
        source = config.sources.get(option.path)
        text = f"{name} {value_text(value)}"
        group = GROUPS[source.kind](source.name) if source else "default"
        groups.setdefault(group, []).append(
            f"{text} ({source})" if group == "derived" else text
        )
    if not groups:
        return "every option is at its default"
    width = max(map(len, groups))
    order = sorted(groups, key="derived".__eq__)  # the user's values first
    lines = (_wrapped(f"  {group:{width}}  ", groups[group]) for group in order)
    return "\n".join(("not at their defaults:", *lines))


def _wrapped(title: str, values: Sequence[str]) -> str:
    """`title` and the values in lines of at most `WIDTH` characters; lines break between values only."""
    lines = []
    line = title
    for number, value in enumerate(values):
        value += "," if number + 1 < len(values) else ""
        if len(line) + len(value) > WIDTH and line.strip() and line != title:
            lines.append(line.rstrip())
            line = " " * len(title)
        line += value + " "
    return "\n".join((*lines, line.rstrip()))


def _zero(engine: Replica) -> str:
    """State and traffic of rank 0. Tests compare them with the buffers and with counted collectives."""
    config = engine.config
    memory = engine.optimizer.memory()
    sent = ", ".join(
        f"{operation.replace('_', '-')} over {axes} {count:,}"
        for (operation, axes), count in sorted(engine.traffic().items())
    )
    places = engine.optimizer.memory_by_place()
    listed = ", ".join(f"{place} {count:,}" for place, count in places.items())
    where = f" ({listed})" if set(places) - {"device"} else ""
    return (
        f"ZeRO stage {config.zero.stage}: {memory.total:,} bytes of state on this rank{where}; payload "
        "of a step over the data-parallel ranks: "
        f"{sent or 'none'}"
        + (f"\n{engine.why_gathered}" if engine.why_gathered else "")
    )


def _stages(plan: RunPlan, counted: str) -> str:
    """A row for each stage: its share, its layers by kind, and the first and last of them."""
    rows = []
    for stage, share in enumerate(plan.stage_cost_shares()):
        names = plan.stage_names(stage)
        span = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names)
        where = f"rank {plan.shape.placement[stage]}" if plan.shape.chunks > 1 else ""
        rows.append((share, where, layers_text(plan.stage_layers(stage)), span))
    ranks, layers = (max(len(row[column]) for row in rows) for column in (1, 2))
    lines = (
        f"  stage {stage}: {share:6.1%}  {where:{ranks}}{'  ' if ranks else ''}{text:{layers}}   {span}"
        for stage, (share, where, text, span) in enumerate(rows)
    )
    return "\n".join((f"pipeline stages (share of the {counted}):", *lines))


def layers_text(layers: Sequence[Layer]) -> str:
    """Layers as text, blocks first: "2 blocks, embedding, final norm, output head"."""
    blocks = sum(layer.is_block for layer in layers)
    words = []
    if blocks:
        words.append(f"{blocks} block{'s' if blocks > 1 else ''}")
    for noun, count in Counter(
        layer.noun or layer.kind for layer in layers if not layer.is_block
    ).items():
        words.append(noun if count == 1 else f"{count} × {noun}")
    return ", ".join(words) or "no layers"


def _schedule(
    config: RunConfig, plan: RunPlan, keeps_gathered: bool, widest: int = 16
) -> str:
    shape = plan.shape
    microbatches = microbatches_of(config)
    title = f"schedule: {shape.schedule}, {microbatches} micro-batch{'es' if microbatches > 1 else ''} a step"
    if shape.size == 1:
        return title
    costs = plan.stage_costs()
    result = simulate(
        plan_schedule(config, microbatches, keeps_gathered, costs), costs.of
    )
    shown = min(microbatches, widest)
    picture = draw(plan_schedule(config, shown, keeps_gathered, costs))
    note = "" if shown == microbatches else f"\n(drawn for {shown} micro-batches)"
    return f"{title}, bubble about {result.bubble:.1%} ({plan.times.source})\n{picture}{note}"
