"""`Attendance`: which ranks of a job have come to its store, and why they cannot meet.

Ranks with different world sizes, or with the same rank, would wait for each other until the timeout, and so
would the others of a rank that ended before it came. Here each rank compares itself with the one that came
first, and then waits for one key, which the last rank of a complete job writes, or the first rank that finds a
problem. So a rank sends the same few requests in a job of any size. Keys:

    first      `Member` that came first
    rank R     `Member` that came as rank R
    count      number of ranks that have come
    verdict    "complete", or an error for all ranks; once written it stays
    informed   number of processes that have read or written an error

Where the same store serves several meetings, each has these keys for itself: "meeting 0", "meeting 1", …
"""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ..errors import CommunicationError, MeetingError

COMPLETE = "complete"
MOST_NAMED = 8  # missing ranks in a message


class Member(NamedTuple):
    """A process, as it describes itself."""

    rank: int
    world_size: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.process})"


class Attendance:
    """The keys of one job in a store, seen from one of its processes.

    is_kept   whether the store outlives its processes, as that of torchrun's agent and a file do
    """

    def __init__(self, store: dist.Store, member: Member, is_kept: bool = False):
        self._all = store
        self._store = _meeting(store, 0)
        self._member = member
        self._is_kept = is_kept

    def arrive(self, deadline: float) -> dist.Store:
        """Return the part of the store for the process group, when all ranks have come.

        deadline: a time of time.monotonic(). Raises CommunicationError, the same on all ranks of the job, when
        they cannot meet.
        """
        self._find_meeting()
        if problem := self._problem():
            self.fail(problem)
        elif self._store.add("count", 1) == self._member.world_size:
            self._store.compare_set("verdict", "", COMPLETE)
        verdict = self._wait(deadline)
        if verdict != COMPLETE:
            self._store.add("informed", 1)
            kind = MeetingError if problem else CommunicationError
            if problem and problem not in verdict:
                verdict = _with_cause(verdict, problem)
            raise kind(verdict)
        return dist.PrefixStore("group", self._store)

    def fail(self, problem: str) -> None:
        """Make `problem` the error of all ranks of the job, unless they have another one or have met."""
        self._store.compare_set("verdict", "", problem)

    def has_begun(self, seconds: float) -> bool:
        """Return whether a process has come. Waits up to `seconds` for it."""
        try:
            self._store.wait(["first"], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def is_informed(self) -> bool:
        """Return whether as many processes as the job has ranks know of its error."""
        return self._store.add("informed", 0) >= self._member.world_size

    def leave_word(self, error: str) -> None:
        """Report that this process ends before it has come."""
        self._find_meeting()
        problem = self._problem()
        text = f"{self._member} ended before it joined the other ranks: {error}"
        self.fail(_with_cause(text, problem) if problem else text)
        self._store.add("informed", 1)

    def _find_meeting(self) -> None:
        """Go to the first meeting that is not complete. This process has left the others, or, in a store that
        is kept, an earlier process of its rank has.

        Raises MeetingError, on this process alone, when all ranks have met without it.
        """
        number = 0
        while self._verdict() == COMPLETE:
            there = self._set_or_read(f"rank {self._member.rank}")
            if not self._is_kept and there != self._member:
                raise MeetingError(
                    f"{self._member} came after all ranks had met, among them {there}: it was started twice, or "
                    "another job meets at this address. Give each process its own RANK, and each job its own "
                    "MASTER_PORT."
                )
            number += 1
            self._store = _meeting(self._all, number)

    def _problem(self) -> str | None:
        """Return how this process contradicts another one: what must be equal, then what must differ."""
        mine = self._member
        first = self._set_or_read("first")
        if first.world_size != mine.world_size:
            return (
                f"the world size is {first.world_size} for {first}, and {mine.world_size} for {mine}. Start all "
                "ranks with the same WORLD_SIZE, or number of tasks."
            )
        other = self._set_or_read(f"rank {mine.rank}")
        if other != mine:
            return (
                f"two processes have RANK {mine.rank} of {mine.world_size}: {other} and {mine}. Give each process "
                "its own RANK; two jobs on one host need different values of MASTER_PORT."
            )
        return None

    def _wait(self, deadline: float) -> str:
        """Return the verdict. At the deadline it becomes the list of ranks that have not come."""
        try:
            seconds = max(0.01, deadline - time.monotonic())
            self._store.wait(["verdict"], timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # it is DistStoreError for stores of TCP only
            self.fail(self._missing())
        verdict = self._verdict()
        assert verdict is not None, "`fail` has set it, where nothing else had"
        return verdict

    def _missing(self) -> str:
        size = self._member.world_size
        missing = absent_ranks(self._store, range(size), "rank ")
        shown = ", ".join(map(str, missing[:MOST_NAMED]))
        more = " and others" if len(missing) > MOST_NAMED else ""
        return (
            f"{len(missing)} of {size} ranks have not come by the deadline: {shown}{more}. Check whether they were "
            "started, and whether they reach the same address and port"
        )

    def _set_or_read(self, key: str) -> Member:
        """Return the member in `key`, which is this process if there was none."""
        return _member_of(self._store.compare_set(key, "", json.dumps(self._member)))

    def _verdict(self) -> str | None:
        is_there = self._store.check(["verdict"])
        return self._store.get("verdict").decode() if is_there else None


def _with_cause(text: str, problem: str) -> str:
    """A rank with another world size may find that, for instance, its batch size does not divide."""
    return f"{text} Besides, {problem}"


def _meeting(store: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(f"meeting {number}", store)


def _member_of(text: bytes) -> Member:
    return Member(*json.loads(text))


def absent_ranks(
    store: dist.Store, ranks: Sequence[int], prefix: str = ""
) -> list[int]:
    """Return the ranks whose key, `prefix` and their number, is absent. By bisection: a request looks for a
    list of keys.
    """
    if store.check([f"{prefix}{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return [
        *absent_ranks(store, ranks[:half], prefix),
        *absent_ranks(store, ranks[half:], prefix),
    ]
