"""What a step sends over the data-parallel ranks, as integers from the layouts, before anything is allocated. Pure.

Bytes that are sent over the data-parallel ranks in a step, with Ψ elements, padding included, and m
micro-batches (payload as in mpu/group.py, gradients in the dtype in which they are sent):

    stage 0   all-reduce Ψ
    stage 1   reduce-scatter Ψ, all-gather Ψ
    stage 2   reduce-scatter m Ψ (once if whole gradients are kept), all-gather Ψ
    stage 3   reduce-scatter as stage 2, all-gather 2 m Ψ (Ψ if the stage is kept gathered), less what
              `gathering` avoids, over an inner group of h; then over the outer one reduce-scatter 1/h of
              that, and all-gather Ψ/h

Weights and gradients in blocks are counted in the bytes of the blocks (number_blocks.py).

For m = 1 these are the 2Ψ, 2Ψ, 2Ψ and 3Ψ of section 7. gather_counts.py counts the gathers.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ..mpu.group import Group, Traffic
from .data_groups import Hierarchy
from .exchange import GradientExchange, Sent
from .set_plan import SHARED, SetPlan

# a stage is gathered for all of a step
KEEP = "keep_gathered"
RELEASE = "release_gathered"


def in_turn(
    stages: Iterable[int], microbatches: int, keeps_gathered: bool
) -> Iterator[tuple[str, int]]:
    """Yield the moments of a step in which all micro-batches pass one stage, then the next.

    How often a unit of a single stage is gathered is the same in every order that a schedule may have.
    """
    for stage in stages:
        yield from [(KEEP, stage)] * keeps_gathered
        for _ in range(microbatches):
            yield from (("forward", stage), ("backward", stage))
        yield from [(RELEASE, stage)] * keeps_gathered


def predict_traffic(
    plans: Sequence[SetPlan],
    ranks: Sequence[Hierarchy],
    gathers: Sequence[Sequence[int]],
    exchange: GradientExchange,
    *,
    microbatches: int,
    reduce_each: bool,
    parameter_bytes: int,
    further: Iterable[Sent] = (),
) -> Traffic:
    """Return what a step sends over the data-parallel ranks; nothing over groups of one.

    ranks: of each plan
    gathers: for each plan how often each of its units is gathered; empty if it has none
    reduce_each: sharded gradients are reduced after each micro-batch
    parameter_bytes: of an element, of plans without one
    further: messages besides, those of an `UpdateRule`
    """
    sent = Traffic()

    def add(operation: str, group: Group, nbytes: int, calls: int) -> None:
        if group.size > 1 and nbytes:
            sent.add(operation, group.axes, group.size, nbytes, calls)

    for plan, where, counts in zip(plans, ranks, gathers):
        layout = plan.layout
        buckets = len(plan.layout.buckets)
        sharded = plan.policy.optimizer is not None
        cycles = (
            microbatches
            if plan.policy.gradient and reduce_each and plan.stage != SHARED
            else 1
        )
        if not plan.frozen:
            for op, group, nbytes, calls in exchange.sent(
                layout.numel, buckets, where, sharded=sharded
            ):
                add(op, group, cycles * nbytes, cycles * calls)
        if not sharded:
            continue
        # Each collective of a gather sends so many bytes of a number of elements.
        each = plan.itemsize or parameter_bytes
        sends = plan.blocks.parts if plan.blocks else partial(_whole, each)
        for nbytes in sends(layout.numel // where.inner.size):
            add("all_gather", where.outer, nbytes, buckets)
        if not plan.units:
            add("all_gather", where.inner, layout.numel * each, buckets)
        for (_, first, stop), count in zip(plan.units, counts):
            numel = layout.buckets[stop - 1].stop - layout.buckets[first].start
            for nbytes in sends(numel):
                add("all_gather", where.inner, count * nbytes, count * (stop - first))
    for message in further:
        add(*message)
    return sent


def _whole(itemsize: int, numel: int) -> tuple[int, ...]:
    """Return the bytes of the one message of so many elements."""
    return (itemsize * numel,)
