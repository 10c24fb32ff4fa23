"""`BackgroundSave`: a checkpoint that a thread writes while training goes on (`--async-save`).

    begin      all      the stall: agree, and let a GPU begin to copy what this rank writes
    write      thread   of each rank: copy what lies in host memory; check, write and sync the file
    gather     all      the ranks' parts of the index
    publish    thread   of rank 0: write and sync the index and run.json; the checkpoint becomes visible
    agree      all      every rank has the outcome
    prune      thread   of rank 0: delete old checkpoints

Steps of "all" are collective and short. `is_ready` is whether this rank's thread has ended; when all ranks are ready,
`advance` takes the next step of "all" and starts the thread after it. An error of any rank's thread is raised
there, on all ranks. The files are those of `save`, byte for byte. Until it is published there is no checkpoint, as
after a crash.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..host.pace import Pace
from ..host.torch_thread import torch_thread
from .pieces import Piece
from .save import Saving
from .state_copies import Copies, CopiesUnderWay


class ThreadedCall:
    """A function that runs in a thread of its own. A process that fails does not wait for the result."""

    def __init__(self, function: Callable[[], Any], stop: Callable[[], None]):
        """stop: called by another thread, makes the function raise soon"""
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = torch_thread(self._run, "checkpoint", stop)

    @property
    def has_ended(self) -> bool:
        """Whether the function has returned or raised."""
        return not self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the function, and return its value or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  `result` raises it
            self._error = error


class BackgroundSave:
    """One save under way.

    copied    the copies, whose `wait` must precede any change of the pieces
    path      of the checkpoint, once it is published
    reasons   of each rank, why this state must not be saved, or None. One reason drops the save
    """

    def __init__(
        self,
        saving: Saving,
        pieces: Iterable[Piece],
        run: Mapping,
        copies: Copies,
        reason_against: Callable[[Iterable[Piece]], str | None] = lambda pieces: None,
        pace: Pace | None = None,
    ):
        """Begin the save: the pieces may change after `copied.wait()`. Collective over the world.

        reason_against: called by the thread with the copies; a reason drops the save, without an error
        pace: of the thread that writes, as long as nothing waits for it
        Raises CheckpointError on all ranks when the save cannot begin.
        """
        pieces = list(pieces)
        self.step = saving.step
        self.path: Path | None = None
        self.reasons: list[str | None] = []
        self._saving = saving
        self._reason_against = reason_against
        self._pace = pace or Pace()
        saving.begin(pieces, run)

        # `advance` raises an error of one rank on all ranks.
        self.copied = CopiesUnderWay()
        failed: Exception | None = None
        try:
            self.copied = copies.take(saving.own(pieces))
        except Exception as error:
            failed = error
        self._work: ThreadedCall | None = self._threaded(lambda: self._write(failed))
        self._next = [self._publish, self._agree, self._end]

    @property
    def is_ready(self) -> bool:
        """Whether this rank waits for `advance`: its thread has ended, or it has none."""
        return self._work is None or self._work.has_ended

    def advance(self) -> bool:
        """Take the next step of all ranks, and start the thread after it. Collective.

        Waits for threads that have not ended; they then write at full speed. Returns whether the save has ended.
        Raises CheckpointError on all ranks when any rank failed; the previous checkpoint is unchanged.
        """
        if not self.is_ready:
            self._pace.hurry()
        self._next.pop(0)()
        return not self._next

    def finish(self) -> Path | None:
        """Take all steps that are left. Returns the path, None if there are `reasons`. Collective."""
        while self._next:
            self.advance()
        return self.path

    def _write(self, failed: Exception | None) -> tuple[Any, str | None]:
        """Write in the thread. Return this rank's part of the index, and its reason against the save."""
        if failed is not None:
            raise failed
        tiles = self._pace.checked(self.copied.tiles())
        try:
            reason = self._reason_against(tiles)
            if reason is not None:
                return None, reason
            # `reason_against` may have stopped early, and all tiles must be copied.
            deque(tiles, maxlen=0)
        finally:
            # The update waits for the end of the copies, even if there is a reason or an error.
            self.copied.end()
        return self._saving.write(self.copied.pieces, self._pace), None

    def _publish(self) -> None:
        found = self._saving.collect(self._outcome)
        self.reasons = [reason for _, reason in found]
        if any(self.reasons):
            self._saving.abandon()
            self._next.clear()
            return
        parts = [part for part, _ in found]
        self._work = self._on_rank_0(lambda: self._saving.publish(parts))

    def _agree(self) -> None:
        self.path = self._saving.agree(self._outcome)
        self._work = self._on_rank_0(self._saving.prune)

    def _end(self) -> None:
        self._outcome()
        self._saving.close()

    def _outcome(self) -> Any:
        """Wait for this rank's thread, and return its value or raise its error. None without a thread."""
        return self._work.result() if self._work else None

    def _on_rank_0(self, function: Callable[[], Any]) -> ThreadedCall | None:
        return self._threaded(function) if self._saving.is_first_rank else None

    def _threaded(self, function: Callable[[], Any]) -> ThreadedCall:
        return ThreadedCall(function, self._pace.stop)
