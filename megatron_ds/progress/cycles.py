r"""DeepSpeed's OneCycle and LRRangeTest: ramps (see ramps.py) of the learning rate and of Adam's beta1.

OneCycle (Smith 2018, arXiv:1803.09820) raises the learning rate in a line, lowers it again, and then lets it
decay; beta1 goes the opposite way.

    highest         /\                      highest  __            ____ …   beta1
                   /  \                                \          /
    lowest   _____/    \_____               lowest      \________/
             0    a    a+b   \__ decay                  a        a+b

LRRangeTest raises the learning rate from the start to the end, to find the one at which training diverges.

As in DeepSpeed's schedulers, i = completed steps − 1, which is −1 at the first step, and skipped steps do not
count. All values equal those of DeepSpeed 0.19.8 except one: it sets beta2 to 0.99, and here beta2 stays.
"""

import math
from dataclasses import dataclass

from ..errors import ConfigError
from .ramps import Progress


@dataclass(frozen=True)
class Cycle:
    """The position in a cycle of `first` rising and `second` falling steps, at least 1 in all.

    first_stairs, second_stairs   steps of equal height in each half; 0: a line
    decay_every                   unit of the decay after the cycle, in steps; 0: no decay
    batch                         samples of a step, which convert samples to steps
    """

    batch: int
    first: int = 2000
    second: int = 2000
    first_stairs: int = 0
    second_stairs: int = 0
    decay_every: int = 0

    @property
    def steps(self) -> int:
        """Steps of both halves."""
        return self.first + self.second

    def place(self, progress: Progress) -> int:
        """Return i, the number of completed steps − 1."""
        return progress.scheduled_samples // self.batch - 1

    def height(self, i: int) -> float:
        """Return the height in the cycle, from 0 through 1 and back, for 0 ≤ i < steps."""
        n = (i + 1) % self.steps
        part, half, stairs = (
            (n, self.first, self.first_stairs)
            if n <= self.first
            else (self.steps - n, self.second, self.second_stairs)
        )
        return part * stairs // half / stairs if stairs else part / half

    def decayed(self, i: int, rate: float) -> float:
        """1 + rate × intervals since the end of the cycle, for i ≥ steps; 1 without decay."""
        return (
            1 + rate * (i - self.steps + 1) / self.decay_every
            if self.decay_every
            else 1.0
        )


@dataclass(frozen=True)
class CycleRate:
    """The learning rate: `lowest` at the first step, `highest` in the middle, `lowest` / decay at the end."""

    cycle: Cycle
    highest: float
    lowest: float
    decay_rate: float = 0.0

    def __call__(self, progress: Progress) -> float:
        return self.at(self.cycle.place(progress))

    def at(self, i: int) -> float:
        """Return the learning rate of the step that follows i + 1 completed steps."""
        if i < 0:
            return self.lowest
        if i < self.cycle.steps:
            return self.lowest + (self.highest - self.lowest) * self.cycle.height(i)
        return self.lowest / self.cycle.decayed(i, self.decay_rate)


@dataclass(frozen=True)
class CycledBeta:
    """beta1 of Adam, highest where the learning rate is lowest.

    As DeepSpeed's, it is `lowest` at the first step, and *grows* with the decay rate after the cycle; an
    error ends the run before it reaches 1.
    """

    cycle: Cycle
    highest: float
    lowest: float
    decay_rate: float = 0.0

    def __call__(self, progress: Progress) -> float:
        return self.at(self.cycle.place(progress))

    def at(self, i: int) -> float:
        """Return beta1 of the step that follows i + 1 completed steps. Raises ConfigError if it is not below 1."""
        if i < 0:
            return self.lowest
        if i < self.cycle.steps:
            return self.highest - (self.highest - self.lowest) * self.cycle.height(i)
        beta = self.highest * self.cycle.decayed(i, self.decay_rate)
        if beta >= 1:
            grown = (
                math.ceil(
                    (1 / self.highest - 1) / self.decay_rate * self.cycle.decay_every
                )
                - 1
            )
            raise ConfigError(
                f"beta1 of step {i + 2} would be {beta:.4g}, and Adam's must be below 1: after "
                f"the cycle it grows from --cycle-max-mom {self.highest:g} by "
                f"--decay-mom-rate {self.decay_rate:g}. Lower that rate, or train for at most "
                f"{self.cycle.steps + grown + 1} steps."
            )
        return beta


@dataclass(frozen=True)
class RangeTest:
    """DeepSpeed's LRRangeTest: `lowest` × (1 + rate × steps / size), in stairs of `size` steps if asked."""

    batch: int
    lowest: float = 1e-3
    size: int = 2000
    rate: float = 1.0
    in_stairs: bool = False

    def __call__(self, progress: Progress) -> float:
        return self.at(progress.scheduled_samples // self.batch - 1)

    def at(self, i: int) -> float:
        """Return the learning rate of the step that follows i + 1 completed steps."""
        done = i + 1
        return self.lowest * (
            1 + self.rate * (done // self.size if self.in_stairs else done / self.size)
        )
