"""Do the weights of a pipeline stage fit whole, for the length of a step (ZeRO 3)? A comparison of integers. Pure.

    memory   |-- spared --|-- state --|-- gradients --|-- activations --|-- whole weights --|-- left --|

Pinned is the stage of every rank or of none: the schedule is one, and the tightest rank decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SPARED = 10         # one in so many bytes is left alone: for allocators, libraries, and what a plan does not know


@dataclass(frozen=True)
class PinBudget:
    """Bytes of one rank.

    memory       what was free before anything of the model was there
    state        what the rank keeps, of it in this memory
    gradients    buffers in which they fill up
    activations  allowance for them
    weights      of the stage, gathered
    """

    memory: int
    state: int
    gradients: int
    activations: int
    weights: int

    @property
    def needed(self) -> int:
        return self.state + self.gradients + self.activations + self.weights

    @property
    def left(self) -> int:
        return self.memory - self.memory // SPARED - self.needed


@dataclass(frozen=True)
class PinDecision:
    """rank, budget: of the tightest one."""

    pinned: bool
    rank: int
    budget: PinBudget


def decide_pinning(budgets: Sequence[PinBudget]) -> PinDecision:
    """budgets: of all ranks, in order. Where nothing is gathered there is nothing to pin."""
    tightest = min(range(len(budgets)), key=lambda rank: budgets[rank].left)
    fits = budgets[tightest].left >= 0 and any(budget.weights for budget in budgets)
    return PinDecision(fits, tightest, budgets[tightest])


def gradient_buffers(layers: Sequence[int], under_way: int, *, kept_whole: bool, gradient_bytes: int) -> int:
    """Bytes in which gradients fill up. layers: elements of each; under_way: reductions at a time; kept_whole: until the last
    micro-batch. Else one more fills, and one that head and embedding share does so all the while."""
    return (sum(layers) if kept_whole else min(sum(layers), (under_way + 2) * max(layers, default=0))) * gradient_bytes
