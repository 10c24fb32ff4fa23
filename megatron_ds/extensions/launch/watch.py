"""`Watch`: what an agent knows of the places of its ranks, and for how long each has not moved."""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ...host.place_file import DeviceEntry, PlaceEntry, PlacesRead, read_places
from ...host.place_words import FOR_DEVICE, PROGRAM
from ...host.places import QUICK, STARTING
from .job import Job
from .rank_places import STOPPED, DeviceAt, NodeReport, RankPlace, place_text

KEPT_STEPS = 32  # of which the median is taken
STEPS_ALLOWED = 2  # median steps without an instruction
OLD_SECONDS = 10.0  # of a look at a device: the rank looks each second, unless its interpreter is blocked


class Watched(Protocol):
    """A rank of the agent. number: in the job; code: its exit code, None while it runs; pid: of its process"""

    @property
    def number(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def places(self) -> Path: ...

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""


class StepTimes:
    """The times of the last steps of a rank. Times are in nanoseconds."""

    def __init__(self):
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._step = 0
        self._time = 0

    @property
    def is_empty(self) -> bool:
        """Whether no step was added."""
        return not self._seconds

    def begin(self, step: int, nanoseconds: int) -> None:
        """Note the time when the first step begins. step: steps that were complete"""
        self._step = step
        self._time = nanoseconds

    def add(self, step: int, nanoseconds: int) -> None:
        """Add the time of the steps since the last call. step: steps that are complete"""
        steps = step - self._step
        if steps < 1:
            return
        self._seconds.append((nanoseconds - self._time) / 1e9 / steps)
        self._step = step
        self._time = nanoseconds

    @property
    def median(self) -> float:
        """Seconds; 0 before there is one."""
        return statistics.median(self._seconds) if self._seconds else 0.0


class Watch:
    """Looks at the files of the ranks of one host."""

    def __init__(self, job: Job, host: str, ranks: Sequence[Watched]):
        self._job = job
        self._host = host
        self._ranks = ranks
        self._started = time.monotonic_ns()
        self._times = [StepTimes() for _ in ranks]

    def look(self, is_last: bool = False) -> NodeReport | None:
        """Return the report of this moment; None if no rank writes its places. is_last: the agent ends"""
        read = [read_places(rank.places, newest_only=True) for rank in self._ranks]
        if not any(read):
            return None
        places = [
            self._place(rank, found, times)
            for rank, found, times in zip(self._ranks, read, self._times)
        ]
        running = [place for place in places if place.state in ("", STOPPED)]
        short = self._job.hang_seconds
        is_still = bool(running) and all(
            place.idle_seconds > short for place in running if place.step >= 0
        )
        shown = places if is_still or is_last else ()
        return NodeReport(self._host, tuple(shown), is_last)

    def _place(
        self, rank: Watched, read: PlacesRead | None, times: StepTimes
    ) -> RankPlace:
        code = rank.poll()
        state = "" if code is None else f"ended with code {code}"
        if code is None and _is_stopped(rank.pid):
            state = STOPPED
        if read is None:
            return RankPlace(
                rank.number,
                self._host,
                state,
                idle_seconds=(time.monotonic_ns() - self._started) / 1e9,
                limit_seconds=self._job.patience_seconds,
            )
        # A rank that starts, saves or reads data may take longer than one in a step.
        place = read.places[-1]
        now = time.monotonic_ns()
        if place.phase not in (PROGRAM, STARTING):
            if times.is_empty:
                first = first_instruction(rank.places) or place
                times.begin(first.step, first.nanoseconds)
            times.add(place.step, place.nanoseconds)
        limit = self._job.patience_seconds
        is_timed = place.phase in QUICK and not times.is_empty
        if is_timed or state == STOPPED:
            limit = self._job.hang_seconds + STEPS_ALLOWED * times.median
        elif place.phase == PROGRAM and not read.is_waiting:
            limit = math.inf
        found = RankPlace(
            rank=rank.number,
            host=self._host,
            state=state,
            idle_seconds=(now - place.nanoseconds) / 1e9,
            limit_seconds=limit,
            step=place.step,
            phase=place.phase,
            instruction=place.instruction,
            stage=place.stage,
            microbatch=place.microbatch,
            collective=place.collective,
            collectives=place.collectives,
            is_waiting=read.is_waiting,
            waits_for_device=read.waits_for == FOR_DEVICE,
            device=_device_at(read.device, now),
        )
        if not found.is_at_device or found.device is None or read.device is None:
            return found
        # The host has launched what its device does now.
        device_idle = (now - read.device.since) / 1e9
        return replace(found, idle_seconds=min(found.idle_seconds, device_idle))


def _device_at(device: DeviceEntry | None, now: int) -> DeviceAt | None:
    """Return the place of a device, if it is known at this moment."""
    if device is None or now - device.looked > OLD_SECONDS * 1e9:
        return None
    return DeviceAt(
        step=device.step,
        done=device.done,
        launched=device.launched,
        moment=device.moment,
        instruction=device.instruction,
        stage=device.stage,
        microbatch=device.microbatch,
    )


def first_instruction(path: Path) -> PlaceEntry | None:
    """Return the first instruction that is kept of a rank."""
    read = read_places(path)
    entries = read.places if read else ()
    return next((entry for entry in entries if entry.instruction), None)


def last_places(path: Path) -> list[str]:
    """Return the last thousand entries of a rank, a line each, with seconds before the newest."""
    read = read_places(path)
    if read is None:
        return []
    newest = read.places[-1].nanoseconds
    return [
        f"{(place.nanoseconds - newest) / 1e9:12.6f} s  {place_text(place)}"
        for place in read.places
    ]


def last_place(path: Path) -> str:
    """Return the newest entry of a rank; "" without one."""
    read = read_places(path, newest_only=True)
    return place_text(read.places[-1]) if read else ""


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, or its threads of training."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"
