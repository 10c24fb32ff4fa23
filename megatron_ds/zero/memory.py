"""Bytes that a rank keeps for one set of parameters: integers from the layout, before anything is allocated.

    kind         bytes per element, padding included                       split from
    parameters   size of the model's dtype                                 stage 3
    gradients    4                                                         stage 2
    masters      4, none where the model itself is fp32                    stage 1
    optimizer    4 per state tensor (2 for Adam)                           stage 1

Rajbhandari et al. 2020, section 3.1, count 2 + 2 + 12 bytes for 16-bit Adam; here gradients accumulate in fp32, which
makes it 2 + 4 + 12.
"""

from dataclasses import dataclass

from .layout import Layout
from .policy import ShardPolicy

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
                   state_tensors: int = 2) -> ZeroMemory:
    """What the rank that owns `shard` keeps. state_tensors: fp32 tensors of the optimizer per parameter."""
    pieces = layout.slot_intersections(shard) if policy.optimizer else layout.whole_slots()
    masters = layout.shard_numel if policy.optimizer else layout.numel
    return ZeroMemory(
        parameters=layout.numel * parameter_bytes,
        gradients=layout.numel * FP32_BYTES,
        masters=0 if parameter_bytes == FP32_BYTES else masters * FP32_BYTES,
        optimizer=sum(piece.padded_numel for piece in pieces) * FP32_BYTES * state_tensors)
