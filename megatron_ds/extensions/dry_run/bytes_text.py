"""The part of a dry run's text about bytes: memory of the ranks, and what one of them sends.

memory of a rank on CPU devices: ZeRO stage 0, float32 weights, float32 gradients, adam, no recomputation
                                rank 0, the worst
  weights                               1.698 MiB
  …
traffic of a step, payload of rank 5 (last column: the part sent in a ring):
  operation       over         ranks  count      bytes                  ring
  reduce-scatter  dp-cp            2      1    502,272  490.5 KiB  245.2 KiB
  …
"""

import os
from collections.abc import Callable, Iterator

from ...mpu.group import RING_FACTOR
from ...planning.rank_plan import RankPlan
from .expert_text import has_experts
from .nccl_buffers import nccl_buffers
from .plan_tables import in_bytes, table
from .world_plan import WorldPlan, wire_bytes


def memory_text(plan: WorldPlan) -> Iterator[str]:
    """Bytes of the rank that needs the most, and of the planned rank."""
    # The bytes mean something only with the settings on which they depend.
    o = plan.config.optimizer
    stage = plan.config.zero.stage
    granularity = plan.config.train.recompute_granularity
    recomputation = "no recomputation"
    if granularity:
        recomputation = f"recomputation {granularity}"
    yield (
        f"memory of a rank on {plan.device.upper()} devices: "
        f"ZeRO stage {stage}, {o.params_dtype} weights, "
        f"{o.gradient_dtype} gradients, {o.optimizer}, {recomputation}"
    )
    # The planned rank may be the worst one.
    worst = plan.worst
    mine = plan.rank_plan(plan.rank)
    if worst.rank == mine.rank:
        plans = [mine]
        heads = [f"rank {mine.rank}, the worst"]
    else:
        plans = [worst, mine]
        heads = [f"worst: rank {worst.rank}", f"rank {mine.rank}"]
    rows = [["", *heads]]
    places: dict[str, None] = {}
    for p in plans:
        places |= dict.fromkeys(p.away)
    # Some rows are part of the row above them, and not every plan has such bytes:
    # these are added if one of the plans has some.
    add = lambda name, value: rows.append([name, *map(value, plans)])
    for name, value in MEMORY_ROWS:
        add(name, value)
        if name == "activations" and plan.device == "cuda":
            add("  in allocator segments", lambda p: in_bytes(p.reserved))
        if name in ROWS_BELOW:
            title, count = ROWS_BELOW[name]
            if any(map(count, plans)):
                add(title, lambda p, count=count: in_bytes(count(p)))
        if name == "parameters" and has_experts(plan.config):
            add("  of these of experts", lambda p: f"{p.of_experts:,}")
        if name == "optimizer":
            # Offloaded state, by the memory or disk that holds it.
            for place in places:
                in_place = lambda p, place=place: in_bytes(p.away.get(place, 0))
                add(f"  of these in {place}", in_place)
    if plan.device == "cuda" and plan.config.world_size > 1:
        buffers = lambda p: nccl_buffers(p, plan.config, plan.grid, os.environ)
        add("NCCL buffers (estimate)", lambda p: in_bytes(buffers(p)))
    yield from table(rows)


# Row → (title, bytes of a rank) of a row below it that only some plans have.
ROWS_BELOW: dict[str, tuple[str, Callable[[RankPlan], int]]] = {
    "communication buffers, up to": (
        "copy for --async-save, up to",
        lambda p: p.copied,
    ),
    "optimizer": ("the teacher's weights and predictions", lambda p: p.beside),
    "  of one micro-batch": ("activations in host memory", lambda p: p.in_host),
    "working memory, about": ("  in the update of matrices", lambda p: p.in_update),
}
# (title, its value of a rank), in the order of the text
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
    yield f"traffic of a step, payload of rank {plan.rank} (last column: the part sent in a ring):"
    # The operations with the most bytes come first.
    traffic = mine.traffic
    rows = [["operation", "over", "ranks", "count", "bytes", "", "ring"]]
    for key in sorted(traffic.bytes, key=lambda key: -traffic.bytes[key]):
        operation, axes, size = key
        count = traffic.bytes[key]
        factor = RING_FACTOR[operation](size)
        in_ring = count * factor
        row = [
            operation.replace("_", "-"),
            axes,
            str(size),
            f"{traffic.calls[key]:,}",
            f"{count:,}",
            in_bytes(count),
            in_bytes(in_ring),
        ]
        rows.append(row)
    if len(rows) == 1:
        yield "  none"
        return
    # The first two columns are words.
    yield from table(rows, left=2)
    # The busiest rank shows whether the planned one is typical.
    total = in_bytes(wire_bytes(mine))
    busiest = plan.busiest
    most = in_bytes(wire_bytes(busiest))
    yield (
        f"  in total {total} per step; "
        f"the highest of any rank: {most}, rank {busiest.rank}"
    )
