"""`RanKernels`: names the kernels that rank 0 ran, below the line of the first step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...ops.kernel_table import Ran, implementations_recorded, kernels_text
from ..moments import RunStart
from ..observer import Observer
from .records import TrainRecord

logger = logging.getLogger(__name__)


class RanKernels(Observer):
    """Records the first step of the process."""

    def run_started(self, start: RunStart) -> None:
        """Wait for the first step."""
        self._is_first_rank = start.replica.mesh.rank == 0
        self._is_first_step = True
        self._ran: Ran = {}

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record what runs in the first step."""
        if not self._is_first_step:
            yield
            return
        with implementations_recorded() as self._ran:
            yield

    def step_logged(self, step: int, record: TrainRecord | None) -> None:
        """Log what ran in the first step."""
        if self._is_first_step and self._is_first_rank:
            logger.info("%s", kernels_text(self._ran))
        self._is_first_step = False
