"""Bytes of the buffers in which gradients fill up before they are summed into shards (`zero/grad_shards.py`).

    backward of micro-batch k    ..w4..w3..|..w2..|..w1..b1..|    k + 1
    filling                      |-- bucket 0 ----|
                                         |---- bucket 1 ----|     two at a layer that two buckets share
                                 |------- bucket 2 ---------|     and the one of a weight that the head uses, too
    summed                                        |bucket 0 |     at most UNDER_WAY; one more fills when it ends

A pool keeps every buffer that was ever needed at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..mpu.managed_parameter import spec_of
from ..zero.exchange import UNDER_WAY
from ..zero.set_plan import SetPlan
from ..zero.settings import ZeroSettings

# Number of buckets that fill together if the gradients of a layer go to more than one.
OF_A_LAYER = 2


@dataclass(frozen=True)
class Filling:
    """The buffers of a set of parameters, in elements.

    stage    the pipeline stage whose backward fills them; None: of any stage
    whole    all of them together
    at_once  those that fill at the same time
    longest  the longest one
    """

    stage: int | None
    whole: int
    at_once: int
    longest: int


def fillings_of(
    plans: Sequence[SetPlan],
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    used_twice: frozenset[nn.Parameter],
) -> Iterator[Filling]:
    """Return the buffers of each set of parameters whose gradients are split over ranks.

    parameters: the indices in the plans are positions in it
    used_twice: parameters that two layers of a stage use, so that their buffers fill during all of its backward
    """
    for plan in plans:
        if plan.policy.gradient is None:
            continue
        members = [parameters[i] for i in plan.members]
        sizes = [bucket.stop - bucket.start for bucket in plan.layout.buckets]
        # Stage 3 reduces the buckets of a layer with the layer.
        if plan.units:
            sizes = [sum(sizes[first:last]) for _, first, last in plan.units]
        longest = max(sizes, default=0)
        is_cut = not plan.units and settings.overlap
        may_lack = any("ep" in spec_of(p).distinct_over for p in members)
        # Buckets that are reduced as they fill have buffers of one length; the others are kept for a backward.
        evenly = is_cut and plan.policy.parameter is None and not may_lack
        at_once = min(len(sizes), OF_A_LAYER + any(p in used_twice for p in members))
        whole = len(sizes) * longest if evenly else sum(sizes)
        filling = at_once * longest if evenly or plan.units else whole
        yield Filling(None if plan.tied else plan.stage, whole, filling, longest)


def gradient_buffers(
    fillings: Sequence[Filling], *, microbatches: int, kept_whole: bool
) -> int:
    """Elements of all buffers of a rank.

    microbatches: of a step. kept_whole: gradients are reduced after the last one only
    """
    everything = sum(filling.whole for filling in fillings)
    if kept_whole and microbatches > 1:
        return everything
    # Backwards of two stages do not overlap. Buffers that belong to no stage fill with each of them.
    stages = {filling.stage for filling in fillings}
    of_stages = []
    for stage in stages:
        here = [f.at_once for f in fillings if f.stage in (stage, None)]
        of_stages.append(sum(here))
    # While the next buffer fills, UNDER_WAY - 1 others are being summed.
    longest = max((filling.longest for filling in fillings), default=0)
    at_once = max(of_stages, default=0) + (UNDER_WAY - 1) * longest
    # A single micro-batch fills each bucket once.
    return min(everything, at_once) if microbatches == 1 else at_once
