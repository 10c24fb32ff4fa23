"""`SwitchedExchange`: a sum of gradients that is left out where ranks exchange something else."""

from collections.abc import Iterator

from ..mpu.group import DONE, Work
from .data_groups import Hierarchy
from .exchange import BucketGradient, FullPrecisionExchange, Sent


class SwitchedExchange(FullPrecisionExchange):
    """A `FullPrecisionExchange` that can be switched off: buckets are then not reduced.

    Plans are for the greater part of a run, in which it is off.
    """

    is_off = False

    def sent(self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool) -> Iterator[Sent]:
        return iter(())

    def reduce(self, bucket: BucketGradient) -> Work:
        return DONE if self.is_off else super().reduce(bucket)
