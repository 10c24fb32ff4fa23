"""The text that a run logs before its first step: grid, model, stages, schedule, memory, options."""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ...config import RunConfig
from ...config.messages import value_text
from ...config.run import RUN, non_default
from ...config.sources.without_effect import report_without_effect
from ...console import columns
from ...host.allocator import allocator_text
from ...models import Layer, build_stages
from ...mpu.fake_group import fake_mesh
from ...mpu.grid import Grid
from ...mpu.managed_parameter import spec_of
from ...planning.run_model import describe_layers
from ...planning.run_plan import RunPlan, microbatches_of, plan_schedule
from ...training.build import Replica

SHARES = {
    "flops": "FLOPs",
    "parameters": "parameters",
    "uniform": "decoder layers",
    "measured": "measured time",
}


def file_in(source: str) -> str:
    """Return the file of a source that is a line of it."""
    return Path(source.rpartition(":")[0]).name


# Kind of a value's source → title of the group in which the value is listed, from the name of the source.
GROUPS = {
    "flag": lambda name: "flags",
    "script": lambda name: name,
    "derived": lambda name: "derived",
    "yaml": file_in,
    RUN: file_in,
    "deepspeed": lambda name: Path(name.rpartition(" ")[0]).name,
}
WIDTH = 110
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES = 8
MOST_QUEUES = 32


def describe(replica: Replica, launch_source: str, given: RunConfig) -> str:
    """Return the start-up text of rank 0. given: the config before the tokenizer set the vocabulary size."""
    config = replica.config
    device = replica.mesh.device.type
    terminal = columns(sys.stdout)
    width = min(WIDTH, terminal or WIDTH)
    # Model, stages, schedule, state and options. Texts of absent features are empty.
    model = (
        grid_text(replica.mesh.grid, launch_source, device),
        _model(replica, given),
        experts_text(config),
    )
    stages = (_stages(replica.plan, SHARES[config.parallel.pipeline_cut]),)
    schedule = (_schedule(config, replica.plan, replica.keeps_gathered, terminal),)
    state = (
        _optimizer(config),
        allocator_text(),
        queues_text(os.environ, device),
        dropout_text(config, device),
        _zero(replica),
        _memory(replica),
        kept_inputs_text(config, device),
    )
    options = (
        values_text(config, width),
        report_without_effect(config),
        notes_text(config, width),
    )
    # A blank line separates the parts.
    parts = (model, stages, schedule, state, options)
    return "\n\n".join("\n".join(filter(None, part)) for part in parts)


def _optimizer(config: RunConfig) -> str:
    """Return the optimizer and the dtypes of its state."""
    o = config.optimizer
    return (
        f"optimizer: {o.optimizer}, {o.params_dtype} weights, "
        f"{o.gradient_dtype} gradients, fp32 optimizer state"
    )


def queues_text(environ: Mapping[str, str], device: str) -> str:
    """Return how many hardware queues the streams of a GPU share, in one line; empty on a CPU, and with all
    queues.
    """
    value = environ.get(QUEUES, "")
    if device != "cuda" or value == str(MOST_QUEUES):
        return ""
    is_set = f"is {value}" if value else f"is not set, which means {DEFAULT_QUEUES}"
    return (
        f"{QUEUES} {is_set}: streams that share a hardware queue wait for each "
        f"other. Results are the same; set it to {MOST_QUEUES}, "
        "so that transfers overlap with computation, unless other code of the "
        "process needs the order of one queue"
    )


def dropout_text(config: RunConfig, device: str) -> str:
    """Return what dropout of attention costs on a GPU, in one line; empty on a CPU, and without it."""
    p = config.model.attention_dropout
    if device != "cuda" or not p:
        return ""
    return (
        f"--attention-dropout {p:g} needs the probabilities, which fused attention does not have: attention takes "
        "several times as long. Set it to 0 unless the recipe needs it"
    )


def _memory(replica: Replica) -> str:
    """Bytes of rank 0 by what they are for, without those that are 0."""
    counts = asdict(replica.optimizer.memory())
    counts |= _activations(replica)
    listed = (f"{name} {n / 2**20:.1f}" for name, n in counts.items() if n)
    return f"memory of rank 0 (MiB): {', '.join(listed)}"


def kept_inputs_text(config: RunConfig, device: str) -> str:
    """Return where inputs of recomputed layers wait, in one line; empty if on the device, as usual."""
    if not config.train.checkpoint_in_cpu:
        return ""
    if device == "cpu":
        return "--checkpoint-in-cpu has no effect: the memory of this device is that of the host"
    return "inputs of recomputed layers wait in host memory"


def _activations(replica: Replica) -> dict[str, int]:
    """Maximum of what the micro-batches of a full batch keep, as --dry-run shows it; nothing on a CPU."""
    # The plan of a small model takes longer than its first steps.
    if replica.mesh.device.type == "cpu":
        return {}
    # Loaded by runs on GPUs.
    from ...planning.fake_stages import most_kept, run_own_stages

    # The order in which this rank computes, and what each of its stages keeps.
    schedule = plan_schedule(
        replica.config,
        microbatches_of(replica.config),
        replica.keeps_gathered,
        replica.plan.stage_costs(),
    )
    program = schedule[replica.mesh.coordinate("pp")]
    runs = run_own_stages(
        replica.config, replica.mesh, replica.plan, program, only_forward=True
    )
    kept = {stage: run.kept for stage, run in runs.items()}
    return {"activations": most_kept(program, kept)}


def grid_text(grid: Grid, launch_source: str, device: str) -> str:
    """Return the sizes of the mesh axes. Context and expert parallelism are left out if their size is 1.

    grid: 8 ranks = tp 2 × pp 2 × dp 2, order tp-dp-pp, launched by torchrun, device cuda
    """
    used = {axis: getattr(grid, axis) for axis in ("tp", "cp", "ep", "pp", "dp")}
    folded = f" (experts: etp {grid.etp})" if grid.folds else ""
    for axis in ("cp", "ep"):
        if used[axis] == 1:
            del used[axis]
    sizes = " × ".join(f"{axis} {size}" for axis, size in used.items())
    order = "-".join(axis for axis in grid.order.split("-") if axis in used)
    noun = "ranks" if grid.world_size > 1 else "rank"
    return (
        f"grid: {grid.world_size} {noun} = {sizes}{folded}, order {order}, "
        f"launched by {launch_source}, device {device}"
    )


def _model(replica: Replica, given: RunConfig) -> str:
    """Parameters of the model and of this rank, and the size of the vocabulary."""
    config = replica.config
    # Parameters of the whole model, and elements that rank 0 holds.
    found = config.model.vocab_size
    assert found is not None, "the tokenizer has set it"
    padded = config.padded_vocab_size
    here = sum(p.numel() for p in replica.parameters if p.requires_grad)
    whole = count_parameters(config, replica.mesh.grid)
    model = f"model: {whole.all:,} parameters"
    added = config.added_weights
    if added is not None:
        frozen = sum(p.numel() for p in replica.parameters) - here
        model += (
            f", of which {whole.trained:,} in {added.noun} are trained; rank 0 trains {here:,} and holds {frozen:,} "
            "frozen ones"
        )
    else:
        model += f"; rank 0 trains {here:,}"
    if padded != found:
        model += " with the padding of the vocabulary"
    # The tokenizer may have changed the size of the vocabulary that was given.
    adds_end = config.data.tokenizer_type == "NullTokenizer"
    vocabulary = vocabulary_text(given.model.vocab_size, found, padded, adds_end)
    return f"{model}\n{vocabulary}"


class ParameterCounts(NamedTuple):
    """Parameters of a model: all, and those that are trained."""

    all: int
    trained: int


def count_parameters(config: RunConfig, grid: Grid) -> ParameterCounts:
    """Parameters of the model: logical shapes without padding, tied weights counted once. Uses no memory."""
    layers = describe_layers(config, fake_mesh(grid, 0))
    parameters = build_stages({0: layers})[0].parameters()
    numbers = {spec_of(p).name: (spec_of(p).numel, p.requires_grad) for p in parameters}
    trained = sum(numel for numel, is_trained in numbers.values() if is_trained)
    return ParameterCounts(sum(numel for numel, _ in numbers.values()), trained)


def vocabulary_text(given: int | None, found: int, padded: int, adds_end: bool) -> str:
    """Return the size of the vocabulary and its derivation.

    given     --vocab-size, if any
    found     tokens of the tokenizer
    padded    rows of the embedding
    adds_end  the tokenizer has `given` tokens and an end-of-document token
    """
    tokens = f"vocabulary: {found:,} tokens"
    if given is not None and adds_end:
        tokens += f" (--vocab-size {given} and one for the end of a document)"
    elif given is not None and given != found:
        tokens += f" (of the tokenizer; --vocab-size {given} is not used)"
    if padded != found:
        tokens += f", padded to {padded:,} rows (--make-vocab-size-divisible-by)"
    return tokens


def experts_text(config: RunConfig) -> str:
    """Return the experts in one line, empty without any.

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
    listed = []
    for number, of_layers in numbers.items():
        listed.append(f"{number} in {ranges_text(of_layers)}")
    layers = "; ".join(listed)
    # What computes beside the experts, where they lie, and how they are chosen.
    shared = model.moe_shared_expert_intermediate_size
    beside = ""
    if shared:
        beside = f", beside shared experts of width {shared}"
    if model.mlp_type == "residual":
        beside = f", beside a dense feed-forward of width {model.ffn_size}"
    held = "all on every data-parallel rank"
    if ep > 1:
        held = f"divided among {ep} expert-parallel ranks"
    chosen = f"{model.moe_router_topk} for a token"
    if model.moe_choice == "expert_choice":
        chosen = "chosen by the experts"
    return (
        f"experts: {layers}; of width {model.expert_ffn_size}{beside}; {chosen}; {held}"
    )


def ranges_text(numbers: Sequence[int]) -> str:
    """Layers, counted from 0, as text: [3] → "layer 3", [1, 2, 3, 7] → "layers 1 to 3, 7"; a regular
    distance is written "layers 1, 3, … 11"."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    # A regular distance of more than 1.
    first = numbers[0]
    last = numbers[-1]
    step = numbers[1] - first
    if len(numbers) > 3 and step > 1:
        if list(numbers) == list(range(first, last + 1, step)):
            return f"layers {first}, {numbers[1]}, … {last}"
    # Otherwise the runs of numbers that follow each other.
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return f"layers {', '.join(texts)}"


def notes_text(config: RunConfig, width: int = WIDTH) -> str:
    """Differences of layers with experts from those of Megatron and DeepSpeed; empty without any."""
    if not config.model.num_experts:
        return ""
    from .moe_notes import moe_notes

    lines = ["experts, compared with Megatron and DeepSpeed:"]
    for note in moe_notes(config):
        filled = textwrap.fill(
            note,
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        lines.append(filled)
    return "\n".join(lines) if len(lines) > 1 else ""


def values_text(config: RunConfig, width: int = WIDTH) -> str:
    """All values that differ from their defaults, grouped by source.

    not at their defaults:
      gpt.yaml  num_layers 12, hidden_size 768, …
      flags     lr 0.0006
      derived   vocab_size 50257 (the tokenizer)
    """
    groups: dict[str, list[str]] = {}
    for option, value in non_default(config):
        # The name of its flag: zero_stage, where its field is `stage`.
        name = option.flag.removeprefix("--").replace("-", "_")
        source = config.sources.get(option.path)
        text = f"{name} {value_text(value)}"
        group = GROUPS[source.kind](source.name) if source else "default"
        if group == "derived":
            text += f" ({source})"
        groups.setdefault(group, []).append(text)
    if not groups:
        return "every option is at its default"
    # One paragraph for each group, with the titles in one column.
    titles = max(map(len, groups))
    order = sorted(groups, key="derived".__eq__)  # the user's values first
    lines = (_wrapped(f"  {group:{titles}}  ", groups[group], width) for group in order)
    return "\n".join(("not at their defaults:", *lines))


def _wrapped(title: str, values: Sequence[str], width: int) -> str:
    """`title` and the values in lines of at most `width` characters; lines break between values only."""
    lines = []
    line = title
    # All values but the last end with a comma.
    listed = [f"{value}," for value in values[:-1]]
    listed += values[-1:]
    for value in listed:
        is_full = len(line) + len(value) > width
        if is_full and line.strip() and line != title:
            lines.append(line.rstrip())
            line = " " * len(title)
        line += value + " "
    lines.append(line.rstrip())
    return "\n".join(lines)


def _zero(replica: Replica) -> str:
    """State and traffic of rank 0. Tests compare them with the buffers and with counted collectives."""
    config = replica.config
    memory = replica.optimizer.memory()
    # Traffic by operation and group, and state by place.
    sent = []
    for (operation, axes), count in sorted(replica.traffic().items()):
        name = operation.replace("_", "-")
        sent.append(f"{name} over {axes} {count:,}")
    places = replica.optimizer.memory_by_place()
    listed = ", ".join(f"{place} {count:,}" for place, count in places.items())
    where = f" ({listed})" if set(places) - {"device"} else ""
    text = (
        f"ZeRO stage {config.zero.stage}: {memory.total:,} bytes of state on this "
        f"rank{where}; payload of a step over the data-parallel ranks: "
        f"{', '.join(sent) or 'none'}"
    )
    if replica.why_gathered:
        text += f"\n{replica.why_gathered}"
    return text


def _stages(plan: RunPlan, counted: str) -> str:
    """Return a row for each stage: its share, its layers by kind, and the first and last of them."""
    rows = []
    for stage, share in enumerate(plan.stage_cost_shares()):
        names = plan.stage_names(stage)
        span = "".join(names)
        if len(names) > 1:
            span = f"{names[0]} … {names[-1]}"
        # The rank is named where it has several stages.
        where = ""
        if plan.shape.chunks > 1:
            where = f"rank {plan.shape.placement[stage]}"
        text = layers_text(plan.stage_layers(stage))
        rows.append((share, where, text, span))
    # Columns are as wide as their widest cells; that of ranks may be absent.
    _, all_where, all_texts, _ = zip(*rows)
    ranks = max(map(len, all_where))
    layers = max(map(len, all_texts))
    gap = "  " if ranks else ""
    lines = [f"pipeline stages (share of the {counted}):"]
    for stage, (share, where, text, span) in enumerate(rows):
        lines.append(
            f"  stage {stage}: {share:6.1%}  "
            f"{where:{ranks}}{gap}{text:{layers}}   {span}"
        )
    return "\n".join(lines)


def layers_text(layers: Sequence[Layer]) -> str:
    """Layers as text, blocks first: "2 blocks, embedding, final norm, output head"."""
    blocks = sum(layer.is_block for layer in layers)
    words = []
    if blocks:
        words.append("1 block" if blocks == 1 else f"{blocks} blocks")
    others = [layer for layer in layers if not layer.is_block]
    nouns = Counter(layer.noun or layer.kind for layer in others)
    for noun, count in nouns.items():
        words.append(noun if count == 1 else f"{count} × {noun}")
    return ", ".join(words) or "no layers"


def _schedule(
    config: RunConfig,
    plan: RunPlan,
    keeps_gathered: bool,
    width: int | None,
    most: int = 16,
) -> str:
    """Return the schedule with its bubble and its picture: of at most `most` micro-batches, and of those that fit the
    columns of a terminal."""
    microbatches = microbatches_of(config)
    noun = "micro-batches" if microbatches > 1 else "micro-batch"
    title = f"schedule: {plan.shape.schedule}, {microbatches} {noun} a step"
    if plan.shape.size == 1:
        return title
    # Loaded by runs with several pipeline ranks.
    from ...pipeline.simulate import simulate
    from ..report.picture import draw

    # The bubble is that of all micro-batches.
    costs = plan.stage_costs()
    whole = plan_schedule(config, microbatches, keeps_gathered, costs)
    bubble = simulate(whole, costs.of).bubble
    for shown in range(min(microbatches, most), 0, -1):
        picture = draw(plan_schedule(config, shown, keeps_gathered, costs))
        if width is None or max(map(len, picture.splitlines())) <= width:
            break
    lines = [
        f"{title}, bubble about {bubble:.1%} ({plan.times.source})",
        picture,
    ]
    if shown < microbatches:
        lines.append(f"(drawn for {shown} micro-batches)")
    return "\n".join(lines)
