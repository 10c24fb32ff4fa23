"""`OneBitRule`: the `UpdateRule` of optimizers whose ranks exchange one bit for each element."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...mpu.group import Group
from ...zero.data_groups import DataGroups, Hierarchy
from ...zero.exchange import Sent
from ...zero.layout import Layout
from ...zero.parameter_norms import ParameterNorms
from ...zero.update_hook import UpdateHook
from ...zero.update_rule import UpdateRule
from .compressed_mean import FP32_BYTES, messages
from .compressed_update import CompressedUpdate
from .phases import Phases
from .switched_exchange import SwitchedExchange


@dataclass(frozen=True)
class OneBitRule(UpdateRule):
    """phases: what is exchanged in each step."""

    phases: Phases
    exchange = SwitchedExchange
    keeps_gradients = True

    @property
    def keeps_masters(self) -> bool:  # type: ignore[override]  # the base has a constant, which is read alone
        """Whether ranks make steps of their own."""
        return self.phases.sums_locally

    def check(self, *, gradients_are_split: bool, state_is_split: bool) -> None:
        if gradients_are_split:
            raise ConfigError(
                "a 1-bit optimizer adds the whole gradient of each rank to what it compresses, but ZeRO "
                "stages 2 and 3 and offloading keep parts of it. Use --zero-stage 0 or 1 without "
                "--offload-optimizer, or another optimizer, such as adam."
            )
        if state_is_split and self.phases.sums_locally:
            raise ConfigError(
                "zero_one_adam makes steps of its own on each rank between exchanges, for which every rank "
                "needs all of the optimizer state, but ZeRO splits it. Use --zero-stage 0, or onebit_adam "
                "with --zero-stage 1."
            )

    def messages(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        ranks: Hierarchy,
        groups: DataGroups,
    ) -> Iterator[Sent]:
        return messages(layout, parameters, ranks.data, groups)

    def norm_messages(self, norms: ParameterNorms) -> Iterator[tuple[Group, int]]:
        """Return the maxima of 1-bit LAMB, the only optimizer here that asks for norms."""
        return norms.sent_of_largest()

    def state_bytes(self, layout: Layout, shard: int | None) -> int:
        """Errors of a worker and a server, momentum of other ranks' shards, padding between buckets."""
        pieces = (
            layout.whole_slots() if shard is None else layout.slot_intersections(shard)
        )
        buffers = 1 + self.phases.sums_locally
        whole = layout.numel * (1 + buffers) + layout.shard_numel
        in_leaves = sum(piece.padded_numel for piece in pieces)
        return FP32_BYTES * (whole - buffers * in_leaves)

    def make_hook(self, **parts: Any) -> UpdateHook:
        return CompressedUpdate(self.phases, **parts)
