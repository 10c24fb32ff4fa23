"""`SpikeGuard`: whether the gradient of a step is so large that its update is dropped (--skip-spikes).

    bound = factor × quantile of the norms of the last `window` updates

A norm beyond the bound is a *spike*. Only norms of updates that were made enter the window, so that a spike does
not raise the bound; nothing is a spike until the window is full. The norm is that of all ranks, and the host has it
before the update anyway: ranks decide alike without a message, and without another wait for the device.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.options.training import TrainConfig
from ..errors import MegatronDSError


class SpikesError(MegatronDSError):
    """Too many steps in a row were spikes. Raised on all ranks together."""

    on_all_ranks = True


@dataclass(frozen=True)
class Spike:
    """A step whose update is dropped. bound: of its norm; in_a_row: spikes since the last update."""

    norm: float
    bound: float
    in_a_row: int


class SpikeGuard:
    """Checks the norm of the gradient of each step.

    factor    of the quantile; above 1
    quantile  above 0, at most 1 (nearest rank: one of the norms, nothing is interpolated)
    window    updates whose norms are kept
    """

    def __init__(self, factor: float, quantile: float, window: int):
        self.factor = factor
        self.quantile = quantile
        self.norms: deque[float] = deque(maxlen=window)
        self.in_a_row = 0

    @property
    def bound(self) -> float:
        """The largest norm that is no spike; infinite until the window is full."""
        if len(self.norms) < self.norms.maxlen:
            return math.inf
        rank = math.ceil(self.quantile * len(self.norms))
        return self.factor * sorted(self.norms)[rank - 1]

    def check(self, norm: float) -> Spike | None:
        """The spike that this norm is, or None; then it enters the window.

        A norm that is not finite is neither: the step is skipped for overflow.
        """
        if not math.isfinite(norm):
            return None
        bound = self.bound
        if norm > bound:
            self.in_a_row += 1
            return Spike(norm, bound, self.in_a_row)
        self.norms.append(norm)
        self.in_a_row = 0
        return None

    def state(self) -> dict[str, Any]:
        """Plain values for run.json, which keeps every bit of a float."""
        return {"norms": list(self.norms), "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; of a larger window the newest norms. {}: begin anew."""
        self.norms.clear()
        self.norms.extend(state.get("norms", ()))
        self.in_a_row = state.get("in_a_row", 0)


def make_spike_guard(train: TrainConfig) -> SpikeGuard | None:
    """The guard of --skip-spikes; None without it."""
    if train.skip_spikes is None:
        return None
    return SpikeGuard(
        train.skip_spikes, train.skip_spikes_quantile, train.skip_spikes_window
    )


def check_spikes_in_a_row(spike: Spike, step: int, most: int) -> None:
    """Raises SpikesError when `most` steps, up to `step`, were spikes without an update between them."""
    if spike.in_a_row < most:
        return
    raise SpikesError(
        f"{spike.in_a_row} steps in a row were spikes, up to iteration {step}: the norm of the gradient was "
        f"{spike.norm:.4g}, and --skip-spikes drops the update beyond {spike.bound:.4g}. None of them was "
        "applied; the last checkpoint is not affected. Continue from it with a lower learning rate or other "
        "data, or with a larger --skip-spikes if norms of this size are right."
    )
