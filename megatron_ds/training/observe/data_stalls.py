"""`DataStalls`: warns once a run that its steps wait for data."""

import logging

from ..moments import RunStart
from ..observer import Observer
from .records import TrainRecord

logger = logging.getLogger(__name__)
STALLED = 0.1  # fraction of a step that may be waiting for data without a warning


class DataStalls(Observer):
    """Compares the wait for data with the time of a step, at each log line."""

    def run_started(self, start: RunStart) -> None:
        """Keep what the warning names."""
        self._data = start.config.data
        self._has_warned = False

    def step_logged(self, step: int, record: TrainRecord | None) -> None:
        """Warn, unless it is the first step, which waits for the start of the loader."""
        if record is None or record.step == 1 or self._has_warned:
            return
        share = record.data_seconds / record.step_seconds
        if share > STALLED:
            self._has_warned = True
            text = stall_text(share, self._data.num_workers, self._data.mock_data)
            logger.warning("%s", text)


def stall_text(share: float, workers: int, mock: bool) -> str:
    """Return the warning that a fraction `share` of a step waits for data. workers: --num-workers."""
    if mock:
        return (
            f"{share:.0%} of a step is waiting for mock data, which is computed on the CPU: no disk is "
            f"read. A larger --num-workers (now {workers}) computes it ahead of the step. A real corpus "
            "has another share."
        )
    return (
        f"{share:.0%} of a step is waiting for data. A larger --num-workers (now {workers}) reads "
        "further ahead; if that does not help, the disk is the limit."
    )
