"""Happens-before on recorded streams: every two uses of one memory, one of them a write, must be ordered.

Actors are the host and the streams; each has a vector clock (Lamport 1978, Mattern 1989). A launch happens
after everything before it on its stream, and after everything that the host did or waited for. An event
carries the clock of its stream to another stream or to the host. Two uses without an order between them are
a race: it may go well on a GPU for a long time.

The caching allocator reuses freed memory on the stream that allocated it, at once. So an allocation is a
write by that stream, and a free is one, too: a use on another stream that the allocating stream has not
waited for is a race with the next owner, unless `record_stream` was called.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

HOST = "host"
FOR_CALLERS = (
    "/mpu/device_wait.py",
    "/mpu/host_reads.py",
    "/host/page_locked.py",
)
Clock = dict[str, int]
Range = tuple["Memory", int, int]  # memory, first byte, end


class Access(NamedTuple):
    """A use of the bytes [start, stop), at `time` of the actor's own clock."""

    start: int
    stop: int
    actor: str
    time: int
    writes: bool
    what: str


class Entry(NamedTuple):
    """What the host has put into a hardware queue, in its order.

    needs   the event for which the stream, or the host, waits; None for a kernel
    time    of the stream's clock, when a kernel has run
    meets   of a message: the names of its parts and how many ranks each part has
    before  of a message: the stream's clock when it begins
    """

    stream: str
    what: str
    needs: Clock | None = None
    time: int = 0
    meets: tuple[tuple[object, int], ...] = ()
    before: Clock = {}


class Memory:
    """One allocation: of a stream, or page-locked memory of the host (owner HOST)."""

    def __init__(self, order: "StreamOrder", owner: str):
        self.order, self.owner = order, owner
        self.accesses: list[Access] = []
        self.streams: set[str] = set()  # of record_stream

    def __del__(self):
        self.order.free(self)


class StreamOrder:
    """The clocks of one GPU and its host.

    problems   races, as sentences, each once
    waits      of the host for the device, by place in the package
    launches   (stream, operation), in order
    queue      all that was launched, with the waits
    """

    def __init__(self):
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.problems: list[str] = []
        self.waits: list[str] = []
        self.launches: list[tuple[str, str]] = []  # (stream, what)
        self.queue: list[Entry] = []

    # -------------------------------------------------------------------------------- what is recorded
    def run(
        self,
        actor: str,
        what: str,
        reads: Iterable[Range],
        writes: Iterable[Range],
        is_launch: bool = True,
        meets: tuple[tuple[object, int], ...] = (),
    ) -> None:
        """A kernel or copy is launched on a stream, or the host uses memory, or memory is allocated.

        meets: of a message, as in `Entry`
        """
        clock = self.clocks.setdefault(actor, {})
        if actor != HOST:
            _join(clock, self.clocks[HOST])
        before = dict(clock) if meets else {}
        clock[actor] = clock.get(actor, 0) + 1
        if actor != HOST and is_launch:
            self.launches.append((actor, what))
            self.queue.append(Entry(actor, what, None, clock[actor], meets, before))
        label = f"{what} on {actor} at {place()}"
        for memory, start, stop in reads:
            self._access(
                memory, Access(start, stop, actor, clock[actor], False, label), clock
            )
        for memory, start, stop in writes:
            self._access(
                memory, Access(start, stop, actor, clock[actor], True, label), clock
            )

    def event(self, stream: str) -> Clock:
        """An event is recorded on a stream: what has happened when it is reached."""
        clock = self.clocks.setdefault(stream, {})
        _join(clock, self.clocks[HOST])
        return dict(clock)

    def wait(self, stream: str, event: Clock) -> None:
        """A stream waits for an event."""
        self.queue.append(Entry(stream, "wait", event))
        _join(self.clocks.setdefault(stream, {}), event)

    def host_wait(self, event: Clock, why: str) -> None:
        """The host waits for an event."""
        self.waits.append(f"{why} at {place()}")
        self.queue.append(Entry(HOST, why, event))
        _join(self.clocks[HOST], event)

    def free(self, memory: Memory) -> None:
        """The allocator may give the memory to the next kernel of its stream."""
        if (
            memory.owner == HOST
        ):  # torch's host allocator waits for the copies that use it
            return
        clock = dict(self.clocks.setdefault(memory.owner, {}))
        _join(clock, self.clocks[HOST])
        for a in memory.accesses:
            if (
                a.actor not in (memory.owner, *memory.streams)
                and clock.get(a.actor, 0) < a.time
            ):
                self._report(
                    f"memory of {memory.owner} is freed at {place()} while {a.what} uses it: no "
                    "event and no record_stream orders the next owner after it"
                )
        memory.accesses.clear()

    # -------------------------------------------------------------------------------- the check
    def _access(self, memory: Memory, new: Access, clock: Clock) -> None:
        kept = []
        for a in memory.accesses:
            overlaps = a.start < new.stop and new.start < a.stop
            if overlaps and (a.writes or new.writes) and clock.get(a.actor, 0) < a.time:
                self._report(
                    f"{new.what} {'writes' if new.writes else 'reads'} what {a.what} "
                    f"{'writes' if a.writes else 'reads'}: no event orders them"
                )
            inside = new.start <= a.start and a.stop <= new.stop
            if not (inside and (new.writes or not a.writes and a.actor == new.actor)):
                kept.append(a)
        memory.accesses = [*kept, new]

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


def place() -> str:
    """File, line and function of the innermost frame inside the package, but for what acts for its caller."""
    frame = sys._getframe(1)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        acts_for_caller = file.endswith(FOR_CALLERS) and name != "_unlock"
        if "/megatron_ds/" in file and not acts_for_caller:
            return f"{file.rsplit('/megatron_ds/')[-1]}:{frame.f_lineno} ({name})"
        frame = frame.f_back
    return "a test"
