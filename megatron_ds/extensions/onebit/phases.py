"""What the data-parallel ranks exchange in each step of an optimizer that compresses it to one bit an
element: functions of the number of the step, from 1. Pure.

    1-bit Adam, 1-bit LAMB (arXiv:2102.02888, algorithm 1)
        step ≤ freeze_step           gradients in full precision; the second moment follows them
        after it                     momentum, compressed; the second moment stays
    0/1 Adam (arXiv:2202.06009, algorithm 1)
        step ≤ var_freeze_step       gradients, in full precision at refreshes, which are the multiples of an
                                     interval that doubles after every `var_update_scaler` of them, else
                                     compressed; the second moment follows the former only
        after it                     the sum of the ranks' own updates, compressed, at the multiples of
                                     another interval, which doubles after every `local_step_scaler` steps up
                                     to `local_step_clipper`; between them nothing
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Exchange(Enum):
    """What is exchanged in a step. Only FULL is not compressed."""

    FULL = "gradients in full precision"
    GRADIENT = "gradients"
    MOMENTUM = "momentum"
    SUM = "the sum of updates"
    NONE = "nothing"


class Phases(Protocol):
    """The exchanges of a run."""

    def at(self, step: int) -> Exchange:
        """Return the exchange of a step."""

    def variance_updates(self, step: int) -> int:
        """Return how often the second moment was updated after a step, for its bias correction."""

    @property
    def sums_locally(self) -> bool:
        """Whether weights differ between ranks in some steps."""


@dataclass(frozen=True)
class FrozenVariance:
    """The exchanges of 1-bit Adam and 1-bit LAMB."""

    freeze_step: int
    sums_locally = False

    def at(self, step: int) -> Exchange:
        """Return the exchange of a step."""
        return Exchange.FULL if step <= self.freeze_step else Exchange.MOMENTUM

    def variance_updates(self, step: int) -> int:
        """Updates of the second moment after a step."""
        return min(step, self.freeze_step)


@dataclass(frozen=True)
class ZeroOnePhases:
    """The exchanges of 0/1 Adam."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int
    sums_locally = True

    def at(self, step: int) -> Exchange:
        """Return the exchange of a step."""
        if step <= self.var_freeze_step:
            is_refresh = self.variance_updates(step) > self.variance_updates(step - 1)
            return Exchange.FULL if is_refresh else Exchange.GRADIENT
        return Exchange.NONE if step % self.local_interval(step) else Exchange.SUM

    def variance_updates(self, step: int) -> int:
        """Updates of the second moment after a step."""
        step = min(step, self.var_freeze_step)
        last = 0
        interval = 1
        count = 0
        while True:
            first = (last // interval + 1) * interval
            last = first + (self.var_update_scaler - 1) * interval
            if step <= last:
                return count + max(0, (step - first) // interval + 1)
            count += self.var_update_scaler
            interval *= 2

    def local_interval(self, step: int) -> int:
        """Return the interval after the freeze: synchronization is at its multiples."""
        doublings = (step - self.var_freeze_step - 1) // self.local_step_scaler
        return min(self.local_step_clipper, 1 << min(doublings, 62))
