"""Ranks that divide the layers, and the order in which they run."""

import math

from megatron_ds.config import parse
from megatron_ds.models import MODELS
from megatron_ds.pipeline.instruction import Op
from megatron_ds.planning.run_plan import plan_run, plan_schedule
from tests.harness.layout_comparison import parse_layout
from tests.harness.layout_runs import STEPS
from tests.harness.model_runs import context_of

from .axis import (
    TWO_CHUNKS,
    Axis,
    Shown,
    chunks,
    layers,
    layout_axis,
    micro_batches,
)

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "zb-auto")


def of_schedule(name: str) -> dict[str, str]:
    """Keys of the layout."""
    return {"schedule": name} | ({"chunks": "2"} if name in TWO_CHUNKS else {})


def stages(shown: Shown) -> None:
    """Each rank has the stages of its place, and each stage a layer or more."""
    case, seen = shown.case, shown.run.seen
    held = [len({n for n in s.layers if n.endswith("linear_qkv")}) for s in seen]
    assert sum(held) == layers(case) * len(seen) // case["pp"]
    assert all(held)
    last = 2 * case["pp"] - 1
    for rank, of_rank in enumerate(seen):
        place = rank // (case["tp"] * case["cp"] * case["dp"])
        if case["schedule"] == "zb-v":
            assert of_rank.stages == (place, last - place)
        else:
            expected = (chunk * case["pp"] + place for chunk in range(chunks(case)))
            assert of_rank.stages == tuple(expected)


def order(shown: Shown) -> None:
    """The micro-batches that are alive at once, and the weight halves of split backwards."""
    case, seen = shown.case, shown.run.seen
    halves = micro_batches(case) * chunks(case) * case["schedule"].startswith("zb")
    assert {s.weight_halves for s in seen} == {halves}
    for rank, of_rank in enumerate(seen):
        place = rank // (case["tp"] * case["cp"] * case["dp"])
        assert of_rank.peak_alive == most_alive(shown, place)


def most_alive(shown: Shown, place: int) -> int:
    """Micro-batches, times stages, whose F is done and whose B or I is not."""
    case = shown.case
    p, m = case["pp"], micro_batches(case) // STEPS
    limit = {
        "none": 1,
        "gpipe": m,
        "1f1b": p - place,
        "zb-h1": p - place,
        "zb-h2": 2 * (p - place) - 1,
        "interleaved": 2 * (p - place - 1) + p + 1,
        "zb-auto": p,
    }.get(case["schedule"], math.inf)
    is_closed = case["schedule"] not in ("zb-v", "zb-auto")
    if case["schedule"] == "interleaved":
        is_closed = m % p == 0
    if case["schedule"] == "zb-h2":
        is_closed = m >= 2 * p - 1
    if is_closed:
        return min(m * chunks(case), limit)
    planned = alive_in_plan(shown, m, place)
    assert planned <= limit or case["schedule"] == "interleaved"
    return planned


def alive_in_plan(shown: Shown, m: int, place: int) -> int:
    """The same in the planned order of instructions."""
    request = parse_layout(shown.layout)
    config = parse([*shown.job, *request.flags], world_size=request.world_size)
    plan = plan_run(config, MODELS[config.model.model](config.model, context_of()))
    alive = [0]
    for i in plan_schedule(config, m, costs=plan.stage_costs())[place]:
        alive.append(alive[-1] + (i.op is Op.F) - (i.op in (Op.B, Op.I)))
    return max(alive)


AXES = (
    layout_axis("pp", 1, 2, 4, shows=stages),
    Axis(
        "schedule",
        {"none": {}} | {name: of_schedule(name) for name in SCHEDULES},
        needs=(lambda schedule, pp: (schedule == "none") == (pp == 1),),
        shows=order,
    ),
)
