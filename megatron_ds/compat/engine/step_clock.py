"""`StepClock`: "wall_clock_breakdown" of an engine's JSON, the times of its forward, backward and step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...pipeline.timeline import Timeline

FORWARD = "fwd"
BACKWARD = "bwd"
STEP = "step"
EVERY = 10  # updates between two lines where "steps_per_print" asks for none


class StepClock:
    """Times phases of this rank. On a GPU they are events of the stream, which only `line` waits for."""

    def __init__(self, is_on: bool, device: torch.device):
        self.is_on = is_on
        self._timeline = Timeline(device) if is_on else None
        self._updates = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of this context belongs to the phase `name`."""
        if self._timeline is None:
            yield
            return
        start = self._timeline.now()
        yield
        self._timeline.add(name, start)  # type: ignore[arg-type]  # it keeps any name

    def count_update(self) -> None:
        """An update is complete."""
        self._updates += 1

    def line(self) -> str:
        """ "time (ms) | fwd: 1.20 | bwd: 2.40 | step: 0.90", means of an update since the last call.

        The host waits for the device.
        """
        assert self._timeline is not None  # without times no line is asked for
        seconds = dict.fromkeys((FORWARD, BACKWARD, STEP), 0.0)
        for name, start, end in self._timeline.read():
            seconds[name] += end - start  # type: ignore[index]  # as above
        means = [
            f"{name}: {1000 * total / self._updates:.2f}"
            for name, total in seconds.items()
        ]
        self._updates = 0
        return " | ".join(["time (ms)", *means])
