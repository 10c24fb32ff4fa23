"""What a rank keeps and sends for its sets of parameters, as integers from the layouts, before anything is
allocated. Pure.

Bytes that are kept:

    kind         bytes per element, padding included     split from
    parameters   size of the model's dtype               stage 3, over all ranks or an inner group; in blocks
                                                         also over all ranks, and the blocks over the group
    gradients    size of the gradients'                  stage 2
    masters      4, none if the model itself is fp32     stage 1
    optimizer    4 per state tensor (2 for Adam)         stage 1

Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1, count 2 + 2 + 12 bytes for 16-bit Adam; gradients
that accumulate in fp32, the default here, make it 2 + 4 + 12. Not counted is what is gathered or fills up
temporarily.

Bytes that are sent over the data-parallel ranks in a step, with Ψ elements, padding included, and m
micro-batches (payload as in mpu/group.py, gradients in the dtype in which they are sent):

    stage 0   all-reduce Ψ
    stage 1   reduce-scatter Ψ, all-gather Ψ
    stage 2   reduce-scatter m Ψ (once if whole gradients are kept), all-gather Ψ
    stage 3   reduce-scatter as stage 2, all-gather 2 m Ψ (Ψ if the stage is kept gathered), less what
              `gathering` avoids, over an inner group of h; then over the outer one reduce-scatter 1/h of
              that, and all-gather Ψ/h

Weights and gradients in blocks are counted in the bytes of the blocks (number_blocks.py).

For m = 1 these are the 2Ψ, 2Ψ, 2Ψ and 3Ψ of section 7. Gathers are counted by running `LayerGathering` on
units that only count.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..mpu.group import Group, Traffic
from .data_groups import Axes, Hierarchy, shard_of
from .exchange import GradientExchange, Sent
from .gathering import GatherUnit, LayerGathering
from .offload import plan_sub_groups
from .set_plan import SHARED, SetPlan
from .tiers import DEVICE, OffloadSettings

FP32_BYTES = 4


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes by kind of state."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    def __add__(self, other: "ZeroMemory") -> "ZeroMemory":
        return ZeroMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.optimizer + other.optimizer,
        )


@dataclass(frozen=True)
class ElementBytes:
    """Sizes per element.

    state_tensors: name of a parameter → number of fp32 optimizer tensors. keeps_masters: also of fp32 weights
    frozen_masters: also of frozen weights
    """

    parameter: int
    gradient: int = FP32_BYTES
    state_tensors: Callable[[str], int] = lambda name: 2
    keeps_masters: bool = False
    frozen_masters: bool = True

    @property
    def master(self) -> int:
        """Bytes of the fp32 copy of a weight; 0 for fp32 weights that are updated themselves."""
        return (
            0 if self.parameter == FP32_BYTES and not self.keeps_masters else FP32_BYTES
        )


def predict_memory(plan: SetPlan, shard: int, sizes: ElementBytes) -> ZeroMemory:
    """Return what the rank that owns `shard` keeps of one set."""
    held = lambda axis: (
        plan.layout.numel
        // {None: 1, "dp": plan.layout.shards, "inner": plan.inner}[axis]
    )
    masters = states = 0
    master = sizes.master
    if plan.frozen and not sizes.frozen_masters:
        master = 0
    for piece in _updated(plan, shard):
        masters += piece.padded_numel * master
        if not plan.frozen:
            # The optimizer sees no padding of a whole tensor.
            numel = piece.stop - piece.start if plan.whole else piece.padded_numel
            states += (
                numel
                * FP32_BYTES
                * sizes.state_tensors(plan.layout.slots[piece.slot].name)
            )
    parameters = held(plan.policy.parameter) * sizes.parameter
    if plan.blocks is not None:
        parameters = plan.blocks.nbytes(held(plan.policy.parameter))
        # The owner also keeps trained weights that are encoded after each update.
        if not plan.encoded:
            parameters += held("dp") * sizes.parameter
    return ZeroMemory(
        parameters=parameters,
        gradients=0 if plan.frozen else held(plan.policy.gradient) * sizes.gradient,
        masters=masters,
        optimizer=states,
    )


def predict_sets(
    plans: Sequence[SetPlan], ranks: Mapping[Axes, int], sizes: ElementBytes
) -> ZeroMemory:
    """Return the sum over all sets of a rank. ranks: its position along the axes over which gradients are summed."""
    return sum(
        (predict_memory(plan, _shard(plan, ranks), sizes) for plan in plans),
        ZeroMemory(),
    )


def predict_places(
    plans: Sequence[SetPlan],
    ranks: Mapping[Axes, int],
    sizes: ElementBytes,
    offload: OffloadSettings,
) -> dict[str, int]:
    """Return the bytes of `predict_sets` by place: "device", "cpu", "nvme"."""
    places: Counter = Counter()
    for plan in plans:
        shard = _shard(plan, ranks)
        total = predict_memory(plan, shard, sizes).total
        shards = plan.layout.numel // plan.inner * sizes.parameter if plan.units else 0
        away = 0
        if offload.optimizer != DEVICE and not plan.frozen:
            groups, _ = plan_sub_groups(
                plan.layout,
                _updated(plan, shard),
                offload.sub_group_elements,
                offload.ratio,
            )
            for piece in (piece for group in groups for piece in group.pieces):
                states = sizes.state_tensors(plan.layout.slots[piece.slot].name)
                away += piece.padded_numel * (sizes.master + FP32_BYTES * states)
        places[offload.optimizer] += away
        places[offload.parameters] += shards
        places[DEVICE] += total - shards - away
    return dict(+places)  # of several bytes: + drops places without any


def _updated(plan: SetPlan, shard: int) -> Sequence:
    return (
        plan.layout.slot_intersections(shard)
        if plan.policy.optimizer
        else plan.layout.whole_slots()
    )


def _shard(plan: SetPlan, ranks: Mapping[Axes, int]) -> int:
    return shard_of(ranks[plan.reduced_over], plan.layout.shards, plan.inner)


# ---------------------------------------------------------------------------------------------------- traffic
@dataclass
class Meter:
    """Elements that are whole: now, and the maximum so far."""

    now: int = 0
    most: int = 0


class CountedUnit(GatherUnit):
    """A `GatherUnit` without memory that counts how often it is gathered."""

    def __init__(self, numel: int, whole: Meter | None = None):
        super().__init__(numel, is_free=True)
        self.gathers = 0
        self._whole = whole or Meter()

    def start(self) -> None:
        if self.is_free:
            self.is_free = False
            self.gathers += 1
            self._whole.now += self.numel
            self._whole.most = max(self._whole.most, self._whole.now)

    def free(self) -> None:
        if not self.is_free:
            self.is_free = True
            self._whole.now -= self.numel


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


def count_gathers(
    gatherings: Mapping[int, LayerGathering], moments: Iterable[tuple[str, int]]
) -> tuple[dict[GatherUnit, int], int]:
    """(how often each unit is gathered in a step, the most elements that are whole at a time).

    gatherings: by stage. moments: (KEEP, "forward", "backward" or RELEASE; stage) in the program's order.
    """
    whole = Meter()
    units = chain.from_iterable(gathering.units for gathering in gatherings.values())
    counted = {unit: CountedUnit(unit.numel, whole) for unit in units}
    of = lambda lists: [[counted[unit] for unit in units] for units in lists]
    plans = {
        stage: LayerGathering(of(g.needs), of(g.in_backward), g.prefetch, stage=stage)
        for stage, g in gatherings.items()
    }
    for moment, stage in moments:
        if (gathering := plans.get(stage)) is None:
            continue
        if moment in (KEEP, RELEASE):
            getattr(gathering, moment)()
            continue
        order = range(len(gathering.needs))
        for layer in order if moment == "forward" else reversed(order):
            gathering.enter(layer, moment == "backward")
            gathering.leave(layer, moment == "backward")
    return {unit: count.gathers for unit, count in counted.items()}, whole.most


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
        sends = (
            plan.blocks.parts
            if plan.blocks
            else lambda numel: (numel * parameter_bytes,)
        )
        for nbytes in sends(layout.numel // where.inner.size):
            add("all_gather", where.outer, nbytes, buckets)
        if not plan.units:
            add("all_gather", where.inner, layout.numel * parameter_bytes, buckets)
        for (_, first, stop), count in zip(plan.units, counts):
            numel = layout.buckets[stop - 1].stop - layout.buckets[first].start
            for nbytes in sends(numel):
                add("all_gather", where.inner, count * nbytes, count * (stop - first))
    for message in further:
        add(*message)
    return sent
