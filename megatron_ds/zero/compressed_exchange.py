"""`SwitchedExchange`: a sum of gradients that is left out where ranks exchange something else."""

from collections.abc import Iterator, Mapping

import torch

from ..mpu.group import DONE, Work
from .data_groups import Hierarchy
from .exchange import BucketGradient, FullPrecisionExchange, Sent
from .norm import squared_norm


class SwitchedExchange(FullPrecisionExchange):
    """A `FullPrecisionExchange` that can be switched off: buckets are then not reduced.

    Plans are for the greater part of a run, in which it is off.

    measured   name of a bucket → parts of its gradient whose squares are counted before the sum
    squares    their sum in this step, float64; None: no part was counted
    """

    is_off = False
    measured: Mapping[str, list[torch.Tensor]] = {}
    squares: torch.Tensor | None = None

    def sent(self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool) -> Iterator[Sent]:
        return iter(())

    def reduce(self, bucket: BucketGradient) -> Work:
        if self.is_off:
            return DONE
        if views := self.measured.get(bucket.name):
            found = squared_norm(views, bucket.whole.device)
            self.squares = found if self.squares is None else self.squares + found
        return super().reduce(bucket)
