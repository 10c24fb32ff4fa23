"""`Stopping`: what ends a run early: a signal, --exit-duration-in-mins, a file.

Each rank votes in the reduction of a step, so all of them stop after the same one; then they exchange the reasons.
"""

import time

from ..cli import StopRequest
from ..config import RunConfig
from ..mpu.collectives import all_gather_object
from ..mpu.mesh import Mesh
from .step_metrics import stop_reason
from .trigger_files import exit_file


class Stopping:
    """The votes of this rank. request: receives signals; began: time.monotonic() at the start of the process"""

    def __init__(
        self, config: RunConfig, mesh: Mesh, request: StopRequest, began: float
    ):
        self.request = request
        self._train = config.train
        self._mesh = mesh
        self._began = began

    def is_asked(self) -> bool:
        """Return whether this rank votes for the end of the run."""
        return (
            bool(self.request.received)
            or self._passed_limit() is not None
            or self._found_file() is not None
        )

    def reason(self) -> str:
        """Return why any rank voted for it. Collective over the world."""
        asked = (self.request.received, self._passed_limit(), self._found_file())
        return stop_reason(all_gather_object(asked, self._mesh.group("world")))

    def _passed_limit(self) -> float | None:
        """Return the time limit in minutes, if it has passed."""
        minutes = self._train.exit_duration_in_mins
        if minutes is None or time.monotonic() - self._began <= minutes * 60:
            return None
        return minutes

    def _found_file(self) -> str | None:
        """Return the file that asks for the end of the run, if rank 0 sees it."""
        return exit_file(self._train) if self._mesh.rank == 0 else None
