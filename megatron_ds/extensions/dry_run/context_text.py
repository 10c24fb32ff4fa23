"""The part of a dry run's text about context parallelism: the tokens of a rank, and what its attention sends
with each way of sharing keys, values and heads (`models.context_attention.COMM_TYPES`).

The core attention of each block runs alone, or its whole mixer where other parts travel in place of keys and values:
forward and backward, without memory and among simulated peers. So the bytes are those that the same code sends in a
run; tests compare them. Of the divisions of the ranks for a2a+p2p the one that sends least is listed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...batch.batch import Batch
from ...config import RunConfig, Source
from ...config.options.model import ModelConfig
from ...config.rules.context_parallel import context_parallel
from ...models import MODELS, Layer
from ...models.attention import attend, attend_again
from ...models.context_attention import COMM_TYPES
from ...models.core_choice import make_core
from ...models.mixers import Mixer, mixer_of
from ...mpu.context import ParallelContext
from ...mpu.fake_group import fake_mesh
from ...ops.attention_pattern import CAUSAL
from ...planning.fake_stages import without_memory
from ...planning.made_flops import MadeFlops
from ...planning.run_model import last_step, model_layers, parallel_context
from .plan_tables import in_bytes
from .world_plan import WorldPlan


def attention_bytes(plan: WorldPlan, config: RunConfig | None = None) -> float:
    """Bytes that attention of the planned rank sends to context-parallel ranks in a step, forward and
    backward; an all-gather is counted as a ring.

    config: with other values of --cp-comm-type than the plan; None: the plan's
    """
    config = config or plan.config
    sent = 0.0
    counted: Counter[tuple] = Counter()
    mesh = fake_mesh(plan.grid, plan.rank)
    layers = model_layers(config, parallel_context(config, mesh))
    by_name = {layer.name: layer for layer in layers}
    for stage in plan.stages_of(plan.grid.coordinates(plan.rank)["pp"]):
        counted.update(_blocks(config, [by_name[one.name] for one in stage.layers]))
    for (mixer, *how), number in counted.items():
        if mixer.head_sizes(config.model) is not None:
            each = _bytes_of_block(config, plan, mixer, *how)
            sent += number * plan.microbatches * each
    return sent


def _blocks(
    config: RunConfig, layers: Sequence[Layer]
) -> Iterator[tuple[Mixer, bool, str, int, str | None]]:
    """(mixer, whether something travels in place of keys and values, comm type, tokens of a sequence, what is
    recomputed) of each block of a stage."""
    length = config.model.seq_length
    drop = config.kept_tokens
    kinds = config.parallel.cp_comm_type
    kept = drop.kept_at(last_step(config), length) if drop else length
    for number, layer in enumerate(layer for layer in layers if layer.is_block):
        last = layer.name.rpartition(".")[2]
        block = int(last) if last.isdecimal() else 0
        index = block if len(kinds) > 1 else 0
        recomputes = (
            layer.recompute.num_layers is None or number < layer.recompute.num_layers
        )
        yield (
            mixer_of(config.model, block),
            isinstance(layer.flops(length, 0), MadeFlops),
            kinds[index],
            kept if layer.drops_tokens else length,
            layer.recompute.granularity if recomputes else None,
        )


def _bytes_of_block(
    config: RunConfig,
    plan: WorldPlan,
    mixer: Mixer,
    makes_keys: bool,
    comm_type: str,
    tokens: int,
    granularity: str | None,
) -> float:
    """Return the bytes that attention of a block sends to context-parallel ranks for one micro-batch, with the
    kernels of the planned device."""
    mesh = fake_mesh(plan.grid, plan.rank)
    ctx = parallel_context(config, mesh)
    model = replace(config.model, attention_dropout=0.0)
    # A simulated rank runs the attention of one block without allocating memory.
    with without_memory(plan.device, config.train.kernels) as where:
        batch = (
            MODELS[model.model]
            .data.blank(config.train.micro_batch_size, tokens, where)
            .cut(ctx.slice)
        )
        made = _mixed if makes_keys else _attended
        run = made(model, replace(ctx, device=where), mixer, comm_type, batch)
        # What is recomputed sends again.
        mesh.traffic.clear()
        if granularity == "full":
            with torch.no_grad():
                run(False)
        out = run(granularity == "selective")
        out.backward(torch.empty_like(out))
    sent = mesh.traffic.wire_bytes().items()
    return sum(count for (_, axes, _), count in sent if axes.startswith("cp"))


# (whether the core is recomputed) → the output
Run = Callable[[bool], torch.Tensor]


def _attended(
    model: ModelConfig,
    ctx: ParallelContext,
    mixer: Mixer,
    comm_type: str,
    batch: Batch,
) -> Run:
    """Return a run of the core alone. The bytes do not depend on the pattern of sparse attention."""
    sizes = mixer.head_sizes(model)
    assert sizes is not None, "it has scores"
    core = make_core(model, "attention", ctx, comm_type=comm_type)
    q, k, v = (
        torch.empty(
            batch.seq_length,
            batch.size,
            heads // ctx.tp.size,
            width,
            device=ctx.device,
            dtype=ctx.dtype,
            requires_grad=True,
        )
        for heads, width in (
            (sizes.heads, sizes.keys),
            (sizes.groups, sizes.keys),
            (sizes.groups, sizes.values),
        )
    )
    return lambda again: (attend_again if again else attend)(core, q, k, v, batch)


def _mixed(
    model: ModelConfig,
    ctx: ParallelContext,
    mixer: Mixer,
    comm_type: str,
    batch: Batch,
) -> Run:
    """Return a run of the mixer, from hidden states on."""
    attention = mixer.make(
        model,
        "attention",
        ctx,
        output_std=1.0,
        rotary=None,
        pattern=CAUSAL,
        comm_type=comm_type,
    )
    shape = ctx.slice.hidden_shape(batch.seq_length, batch.size, model.hidden_size)
    x = torch.empty(shape, device=ctx.device, dtype=ctx.dtype, requires_grad=True)

    def run(again: bool) -> torch.Tensor:
        attention.recompute_core = again
        return attention(x, batch)

    return run


def other_types(config: RunConfig) -> dict[str, RunConfig | str]:
    """Return comm type → the configuration with it for all layers, or why it is impossible; not the present one."""
    found: dict[str, RunConfig | str] = {}
    for comm_type in COMM_TYPES:
        if set(config.parallel.cp_comm_type) == {comm_type}:
            continue
        if comm_type == "a2a+p2p":
            found |= _divisions(config)
            continue
        changed = _with_type(config, comm_type, (1,))
        if not [*context_parallel(changed)]:
            found[comm_type] = changed
        elif comm_type == "a2a":
            found[comm_type] = "this number of heads"
        else:
            found[comm_type] = "sequences of this length"
    return found


def _with_type(config: RunConfig, comm_type: str, sizes: tuple[int, ...]) -> RunConfig:
    return config.with_values(
        {
            "parallel.cp_comm_type": (comm_type,),
            "parallel.hierarchical_context_parallel_sizes": sizes,
        },
        Source("derived", "the plan"),
    )


def _divisions(config: RunConfig) -> dict[str, RunConfig]:
    """ "a2a+p2p", ranks that exchange heads × ranks that pass keys on → the configuration, for each division
    of the context-parallel ranks that this number of heads allows."""
    found = {}
    c = config.parallel.context_parallel_size
    for inner in range(2, c):
        if c % inner == 0:
            changed = _with_type(config, "a2a+p2p", (inner, c // inner))
            if not [*context_parallel(changed)]:
                found[f"a2a+p2p {inner} × {c // inner}"] = changed
    return found


def context_text(plan: WorldPlan) -> Iterator[str]:
    """Yield lines; none for a single context-parallel rank."""
    config = plan.config
    cp = plan.grid.cp
    if cp == 1:
        return
    length = config.model.seq_length
    chosen = _in_words(config.parallel.cp_comm_type)
    held = "two chunks" if config.is_zigzag else "one run"
    yield (
        f"context: each of {cp} ranks holds {length // cp:,} of the {length:,} tokens of a sequence, in "
        f"{held}"
    )
    # The chosen communication is compared with each that could replace it.
    others = other_types(config)
    sent = {chosen: attention_bytes(plan)} | {
        name: attention_bytes(plan, other)
        for name, other in others.items()
        if isinstance(other, RunConfig)
    }
    divisions = sorted(
        (name for name in sent if name.startswith("a2a+p2p ")), key=sent.__getitem__
    )
    # Only the best division is of interest.
    sent = {name: count for name, count in sent.items() if name not in divisions[1:]}
    if not sent[chosen]:
        return
    # Impossible communications are listed with their reason.
    listed = [
        f"{in_bytes(count)} by {name}{' (chosen)' if name == chosen else ''}"
        for name, count in sent.items()
    ]
    listed += [
        f"{name} cannot divide {other}"
        for name, other in others.items()
        if isinstance(other, str)
    ]
    yield f"  attention of rank {plan.rank} sends in a step {', '.join(listed)}"
    yield f"  {_least(chosen, sent)}"


def _in_words(kinds: Sequence[str]) -> str:
    """Return the type of all layers, or the layers of each: "p2p in 1 layer, a2a in 2"."""
    counts = Counter(kinds)
    if len(counts) == 1:
        return kinds[0]
    (first, count), *rest = counts.items()
    words = [
        f"{first} in {count} layer{'s' if count > 1 else ''}",
        *(f"{kind} in {n}" for kind, n in rest),
    ]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _least(chosen: str, sent: dict[str, float]) -> str:
    """Return which way sends the fewest bytes, and by how much."""
    name = chosen if chosen in COMM_TYPES else "the chosen types"
    least, most = (of(sent.values()) for of in (min, max))
    if sent[chosen] > least:
        cheaper = min(sent, key=sent.__getitem__)
        kind, _, sizes = cheaper.replace(" × ", " ").partition(" ")
        how = f"{kind} --hierarchical-context-parallel-sizes {sizes}" if sizes else kind
        return (
            f"least by --cp-comm-type {how}: {in_bytes(sent[chosen] - least)} less than {name}, "
            f"{1 - least / sent[chosen]:.1%}"
        )
    others = [count for count in sent.values() if count > least]
    if not others:
        return "all of them send the same"
    return f"least by {name}: {in_bytes(most - least)} less than the most, {1 - least / most:.1%}"
