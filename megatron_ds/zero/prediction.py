"""Bytes that a rank keeps for one set of parameters: integers from the layout, before anything is allocated.

    kind         bytes per element, padding included                       split from
    parameters   size of the model's dtype                                 stage 3, over all ranks or an inner group
    gradients    size of the gradients'                                        stage 2
    masters      4, none where the model itself is fp32                    stage 1
    optimizer    4 per state tensor (2 for Adam)                           stage 1

Rajbhandari et al. 2020, section 3.1, count 2 + 2 + 12 bytes for 16-bit Adam; gradients that accumulate in fp32, the default
here, make it 2 + 4 + 12. Not counted is working memory: what is gathered or filling up for a moment.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .data_groups import shard_of
from .layout import Layout
from .set_plan import SetPlan
from .settings import ShardPolicy
from .sub_groups import plan_places

FP32_BYTES = 4


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes by kind of state."""

    parameters: int
    gradients: int
    masters: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.optimizer

    def __add__(self, other: "ZeroMemory") -> "ZeroMemory":
        return ZeroMemory(self.parameters + other.parameters, self.gradients + other.gradients,
                          self.masters + other.masters, self.optimizer + other.optimizer)


def predict_memory(layout: Layout, shard: int, policy: ShardPolicy, *, parameter_bytes: int,
                   state_tensors: int = 2, gradient_bytes: int = FP32_BYTES, frozen: bool = False,
                   inner: int | None = None) -> ZeroMemory:
    """What the rank that owns `shard` keeps of one set. state_tensors: fp32 tensors of the optimizer per parameter.

    inner: over how many ranks parameters are split, where that is not all
    """
    held = lambda axis: layout.numel // {None: 1, "dp": layout.shards, "inner": inner}[axis]
    pieces = layout.slot_intersections(shard) if policy.optimizer else layout.whole_slots()
    updated = sum(piece.padded_numel for piece in pieces)
    return ZeroMemory(
        parameters=held(policy.parameter) * parameter_bytes,
        gradients=0 if frozen else held(policy.gradient) * gradient_bytes,
        masters=0 if parameter_bytes == FP32_BYTES else updated * FP32_BYTES,
        optimizer=0 if frozen else updated * FP32_BYTES * state_tensors)


def predict_sets(plans: Sequence[SetPlan], data_rank: int, expert_rank: int, *, parameter_bytes: int, state_tensors: int = 2,
                 gradient_bytes: int = FP32_BYTES) -> ZeroMemory:
    """The sum over the sets that a rank's parameters fall into (`sets.plan_sets`)."""
    return sum((predict_memory(plan.layout, _shard(plan, data_rank, expert_rank), plan.policy, inner=plan.inner,
                               parameter_bytes=parameter_bytes, state_tensors=state_tensors, gradient_bytes=gradient_bytes,
                               frozen=plan.frozen) for plan in plans), ZeroMemory(0, 0, 0, 0))


def _shard(plan: SetPlan, data_rank: int, expert_rank: int) -> int:
    return shard_of(expert_rank if plan.expert else data_rank, plan.layout.shards, plan.inner)


def predict_places(plans: Sequence[SetPlan], data_rank: int, expert_rank: int, *, parameter_bytes: int,
                   optimizer: str = "device", parameters: str = "device", ratio: float = 1.0, sub_group_elements: int = 1,
                   state_tensors: int = 2, gradient_bytes: int = FP32_BYTES) -> dict[str, int]:
    """The bytes of `predict_sets` by place. optimizer, parameters: where the one, and stage 3's shards, are offloaded to."""
    places: Counter = Counter()
    masters = 0 if parameter_bytes == FP32_BYTES else FP32_BYTES
    for plan in plans:
        shard = _shard(plan, data_rank, expert_rank)
        total = predict_memory(plan.layout, shard, plan.policy, parameter_bytes=parameter_bytes, state_tensors=state_tensors,
                               gradient_bytes=gradient_bytes, frozen=plan.frozen, inner=plan.inner).total
        shards = plan.layout.numel // plan.inner * parameter_bytes if plan.units else 0
        away = 0
        if optimizer != "device" and not plan.frozen:
            pieces = plan.layout.slot_intersections(shard) if plan.policy.optimizer else plan.layout.whole_slots()
            groups, _ = plan_places(plan.layout, pieces, sub_group_elements, ratio)
            away = sum(group.numel for group in groups) * (masters + FP32_BYTES * state_tensors)
        places[optimizer] += away
        places[parameters] += shards
        places["device"] += total - shards - away
    return {place: count for place, count in places.items() if count}
