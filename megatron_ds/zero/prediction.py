"""What a rank keeps for its sets of parameters, as integers from the layouts, before anything is allocated. Pure.

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
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .data_groups import Axes, shard_of
from .memory import ZeroMemory
from .offload_settings import DEVICE, OffloadSettings
from .set_plan import SetPlan
from .sub_groups import plan_sub_groups

FP32_BYTES = 4


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

    def of(self, plan: SetPlan) -> "ElementBytes":
        """Return the sizes of a set, whose dtype may be another than the model's."""
        if plan.itemsize is None:
            return self
        return replace(self, parameter=plan.itemsize)

    @property
    def master(self) -> int:
        """Bytes of the fp32 copy of a weight; 0 for fp32 weights that are updated themselves."""
        return (
            0 if self.parameter == FP32_BYTES and not self.keeps_masters else FP32_BYTES
        )


def predict_memory(plan: SetPlan, shard: int, sizes: ElementBytes) -> ZeroMemory:
    """Return what the rank that owns `shard` keeps of one set."""
    sizes = sizes.of(plan)
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
    of_model = sizes
    for plan in plans:
        sizes = of_model.of(plan)
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
