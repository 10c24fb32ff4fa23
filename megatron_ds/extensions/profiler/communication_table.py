"""`CommunicationTable`: the table of `comms_log.py` at the end of a run."""

import logging

from ...mpu.group import Group
from ...training.moments import RunStart
from ...training.observer import LAST, Observer
from .comms_log import log_of_run, seconds_of_groups, table_text

logger = logging.getLogger(__name__)


class CommunicationTable(Observer):
    """--comms-logger: a table of the messages of rank 0, at the end of the run."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Begin to count messages."""
        self._mesh = mesh = start.replica.mesh
        self._log = log_of_run(start.config, mesh.rank, mesh.device)
        mesh.traffic.log = self._log

    def run_ended(self, reason: str) -> None:
        """Log the table, with the waits for slow ranks. Collective over the world."""
        self._report(self._mesh.group("world"))

    def closed(self) -> None:
        """Log the table of a run that failed, without comparing ranks."""
        self._report(None)

    def _report(self, world: Group | None) -> None:
        log = self._log
        self._log = None
        if log is None:
            return
        of_groups = None if world is None else seconds_of_groups(log, world)
        if self._mesh.rank == 0:
            logger.info("%s", table_text(log, self._mesh.rank, of_groups))
