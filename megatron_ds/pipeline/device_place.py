"""`DevicePlace`: how far a GPU has come in the instructions of a step.

The host launches a whole step ahead of the device, so its own place does not show where the device waits for
another rank. An event behind each instruction does. They are asked for a message, and under the launcher once a
second by a thread, which writes the place to the file of this rank: the host may stand in a launch, with the queue of
the device full. The thread also writes the record of collectives when the launcher asks for it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ..host.place_file import BEHIND_ALL, NONE, DeviceEntry, PlaceWriter
from ..host.places import writer
from ..mpu.flight_recorder import save_record
from .instruction import Instruction

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
# (number of micro-batches, forward only) → start of each instruction in the schedule
Moments = Callable[[int, bool], Sequence[float]]


class DevicePlace:
    """The events of one rank, which later steps record again."""

    def __init__(self):
        self._launched: list[Instruction] = []
        self._events: list[torch.cuda.Event] = []
        self._moments: Sequence[float] = ()
        self._step = 0
        self._newest: DeviceEntry | None = None
        self._thread: threading.Thread | None = None

    def begin(
        self,
        moments: Moments | None = None,
        num_microbatches: int = 1,
        forward: bool = False,
    ) -> None:
        """A step begins. moments: None where all ranks have one program, whose order decides"""
        self._launched = []
        watched = writer()
        if watched is None:
            return
        self._step = watched.completed_steps
        if moments is not None:
            self._moments = moments(num_microbatches, forward)
        if self._thread is None:
            watched.answer_requests()
            self._thread = threading.Thread(
                target=self._watch, args=(watched,), name="device place", daemon=True
            )
            self._thread.start()

    def add(self, instruction: Instruction) -> None:
        """All work of the instruction is launched."""
        at = len(self._launched)
        if at == len(self._events):
            self._events.append(torch.cuda.Event())
        self._events[at].record()
        self._launched.append(instruction)

    def completed(self) -> int:
        """Number of instructions whose work the device has done."""
        return self._completed(self._launched)

    def current(self) -> tuple[int, int, Instruction | None]:
        """(instructions done, launched, the one at which the device is; None: behind all of them)."""
        launched = self._launched
        done = self._completed(launched)
        at = launched[done] if done < len(launched) else None
        return done, len(launched), at

    def look(self) -> DeviceEntry:
        """Return where the device is now, and since when."""
        done, launched, at = self.current()
        instruction, stage, microbatch = ("", NONE, None) if at is None else at
        now = time.monotonic_ns()
        entry = DeviceEntry(
            looked=now,
            since=now,
            step=self._step,
            done=done,
            launched=launched,
            moment=BEHIND_ALL if at is None else self._moment(done),
            instruction=instruction,
            stage=stage,
            microbatch=NONE if microbatch is None else microbatch,
        )
        before = self._newest
        if before is not None and entry[2:] == before[2:]:
            entry = entry._replace(since=before.since)
        self._newest = entry
        return entry

    def _moment(self, done: int) -> int:
        return int(self._moments[done]) if done < len(self._moments) else done

    def _completed(self, launched: Sequence[Instruction]) -> int:
        states = (event.query() for event in self._events[: len(launched)])
        return next(
            (at for at, is_done in enumerate(states) if not is_done),
            len(launched),
        )

    def _watch(self, watched: PlaceWriter) -> None:
        while True:
            watched.device(self.look())
            if watched.is_record_wanted():
                _save_record(watched.rank)
                watched.record_is_written()
            time.sleep(LOOK_SECONDS)


def _save_record(rank: int) -> None:
    try:
        sentence = save_record(rank)
    except (OSError, RuntimeError) as error:
        sentence = f"The last collectives of this rank cannot be written: {error}"
    if sentence:
        logger.warning("%s.", sentence)
