"""`SwitchedExchange`: a sum of gradients that is left out where ranks exchange something else; `NoiseShare`:
what is measured where it is made, to know the norm of the sum where it is not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ...mpu.group import DONE, Waitable
from ...zero.data_groups import Hierarchy
from ...zero.exchange import BucketGradient, FullPrecisionExchange, Sent
from ...zero.norm import squared_norm

KEPT = 0.95  # weight of the earlier measurements at each new one


class SwitchedExchange(FullPrecisionExchange):
    """A `FullPrecisionExchange` that can be switched off: buckets are then not reduced.

    Plans are for the greater part of a run, in which it is off.

    measured   name of a bucket → parts of its gradient whose squares are counted before the sum
    squares    their sum in this step, float64; None: no part was counted
    """

    is_off = False
    measured: Mapping[str, list[torch.Tensor]] = {}
    squares: torch.Tensor | None = None

    def sent(
        self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool
    ) -> Iterator[Sent]:
        return iter(())

    def reduce(self, bucket: BucketGradient) -> Waitable:
        if self.is_off:
            return DONE
        if views := self.measured.get(bucket.name):
            found = squared_norm(views, bucket.whole.device)
            self.squares = found if self.squares is None else self.squares + found
        return super().reduce(bucket)


@dataclass
class NoiseShare:
    """A running mean ν of measurements, as state of a run.

    With gradients g_i = G + noise_i of P ranks, E ‖mean‖² = ‖G‖² + σ²/P and E ‖g_i‖² = ‖G‖² + σ². So the mean
    of ‖g_i‖² over ranks is 1 + (P - 1) ν times ‖mean‖² with ν = (σ²/P) / ‖mean‖² (McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1). At a given global batch ν does not depend on P.
    """

    value: float = 0.0
    count: int = 0

    def add(self, excess: float, ranks: int) -> None:
        """excess: the mean of ‖g_i‖² over `ranks` ranks, over ‖mean‖²."""
        self.count += 1
        share = min(max((excess - 1) / (ranks - 1), 0.0), 1.0)
        self.value += (share - self.value) * max(1 / self.count, 1 - KEPT)

    def ratio(self, ranks: int) -> float:
        """Return the root of the mean of ‖g_i‖², over the norm of the mean."""
        return (1 + (ranks - 1) * self.value) ** 0.5
