"""`Facts`: what metrics.jsonl has of each process of a run and of its checkpoints."""

from ..moments import RunStart
from ..observer import Observer
from .run_facts import SaveRecord, process_record


class Facts(Observer):
    """Notes the start of the process, and each checkpoint with the seconds that steps waited for it."""

    def run_started(self, start: RunStart) -> None:
        """Note the process."""
        self._note = start.note
        mesh = start.replica.mesh
        step = start.progress.step
        start.note(process_record(start.config, mesh, step, start.began))

    def waited_for_save(self, step: int, seconds: float) -> None:
        """Note the checkpoint."""
        self._note(SaveRecord(step, seconds))
