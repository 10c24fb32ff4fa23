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

from ...config.options.training import TrainConfig
from ...errors import MegatronDSError
from ...training.build import Replica
from ...training.moments import Drop, RunStart, StepEnd
from ...training.observer import FIRST, Observer
from .spike_record import SpikeRecord

SPIKE = Drop("spike of the gradient norm")


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
        self.window = window
        self.norms: deque[float] = deque(maxlen=window)
        self.in_a_row = 0

    @property
    def bound(self) -> float:
        """The largest norm that is no spike; infinite until the window is full."""
        if len(self.norms) < self.window:
            return math.inf
        rank = math.ceil(self.quantile * len(self.norms))
        return self.factor * sorted(self.norms)[rank - 1]

    def find(self, norm: float) -> Spike | None:
        """Return the spike that the next step is with this norm; None: it is none.

        A norm that is not finite is none: the step is skipped for overflow.
        """
        bound = self.bound
        is_spike = math.isfinite(norm) and norm > bound
        return Spike(norm, bound, self.in_a_row + 1) if is_spike else None

    def count(self, norm: float, skipped: bool = False) -> Spike | None:
        """Count a step. Returns the spike that it is; None: its norm enters the window if the update was made.

        skipped: whether the update was left out
        """
        spike = self.find(norm)
        if spike is not None:
            self.in_a_row = spike.in_a_row
        elif math.isfinite(norm) and not skipped:
            self.norms.append(norm)
            self.in_a_row = 0
        return spike

    def state(self) -> dict[str, Any]:
        """Plain values for run.json, which keeps every bit of a float."""
        return {"norms": list(self.norms), "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; of a larger window the newest norms. {}: begin anew."""
        self.norms.clear()
        self.norms.extend(state.get("norms", ()))
        self.in_a_row = state.get("in_a_row", 0)


class DroppedSpikes(Observer):
    """--skip-spikes: leaves out the updates of spikes, records them, and ends a run that has too many in a row."""

    place = FIRST

    def built(self, replica: Replica) -> None:
        """Make the guard, whose window is part of a checkpoint."""
        train = replica.config.train
        self._guard = guard_of(train)
        replica.states["spikes"] = self._guard

    def run_started(self, start: RunStart) -> None:
        """Keep where spikes are recorded."""
        self._start = start
        self._most = start.config.train.skip_spikes_limit

    def update_checked(self, norm: float) -> Drop | None:
        """Leave out the update of a spike."""
        return None if self._guard.find(norm) is None else SPIKE

    def step_ended(self, end: StepEnd) -> None:
        """Count the step, and record it with its samples if it is a spike. Raises SpikesError after too many."""
        spike = self._guard.count(end.grad_norm, end.skipped)
        if spike is None:
            return
        first = end.samples - end.size
        self._start.write(
            SpikeRecord(
                step=end.step,
                samples=end.samples,
                loss=end.loss,
                grad_norm=spike.norm,
                norm_bound=spike.bound,
                in_a_row=spike.in_a_row,
                first_sample=first,
                sample_ids=tuple(self._start.loaders.train.indices(first, end.size)),
            )
        )
        check_spikes_in_a_row(spike, end.step, self._most)


def guard_of(train: TrainConfig) -> SpikeGuard:
    """Return the guard of --skip-spikes. Raises ValueError without the option."""
    if train.skip_spikes is None:
        raise ValueError("there is no guard against spikes without --skip-spikes")
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
