"""`OffloadedLeaves`: the update of state that is not on the device, of a run that offloads none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .shard_optimizer import Rates, ShardOptimizer

if TYPE_CHECKING:
    from .offload import SubGroup


class OffloadedLeaves:
    """There are none; `OffloadedUpdate` (offload.py) has those of a run that offloads.

    groups: in the order of their update
    """

    groups: Sequence["SubGroup"] = ()

    @property
    def working_bytes(self) -> int:
        """Bytes of the buffers in which state is brought to the host."""
        return 0

    def optimizers(self) -> dict[int, ShardOptimizer]:
        """Return the optimizer of each leaf, by the `id` of the leaf's tensor."""
        return {}

    def add(self, *parts: Any) -> "SubGroup":
        """Make a sub-group, of a run that offloads."""
        raise NotImplementedError

    def step(self, lr: Rates, weight_decay: float, divisor: float) -> None:
        """Update all sub-groups in turn, with the numbers of `ShardOptimizer.step`."""
