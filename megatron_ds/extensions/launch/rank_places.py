"""`RankPlace`: where a rank and its device are, as its agent reports it; which is behind the others; the table of all.

An agent reports the ranks of its host as one line of its output that begins with MARK, as failures are reported.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...host.place_file import PlaceEntry

MARK = "::megatron-ds places::"
STOPPED = "stopped"  # by SIGSTOP
MOST_LISTED = 64  # ranks of a table
MOST_NAMED = 16  # ranks of a sentence


@dataclass(frozen=True)
class DeviceAt:
    """Where the GPU of a rank is in the instructions of a step: host/places.py describes the fields."""

    step: int
    done: int
    launched: int
    moment: int
    instruction: str = ""
    stage: int = -1
    microbatch: int = -1

    def text(self) -> str:
        """ "F of micro-batch 1 at stage 0 (4 of 12 instructions of step 8 are done)" """
        if self.instruction:
            at = _instruction_text(self)
        else:
            at = "behind all instructions, at reductions of gradients, their norm, or metrics"
        return f"{at} ({self.done} of {self.launched} instructions of step {self.step + 1} are done)"


@dataclass(frozen=True)
class RankPlace:
    """A rank at one moment.

    state          "" of a process that runs; STOPPED; how it ended
    idle_seconds   since its last instruction or collective, or since its device did one
    limit_seconds  after which that is a hang
    step           steps that are complete; -1 for a rank that has written nothing yet
    is_waiting     whether the host waits for other ranks
    collectives    how many it has begun
    waits_for_device  whether it waits for its device, which may wait for other ranks
    device         where its device is; None: without one, or not known
    """

    rank: int
    host: str
    state: str = ""
    idle_seconds: float = 0.0
    limit_seconds: float = 0.0
    step: int = -1
    phase: str = ""
    instruction: str = ""
    stage: int = -1
    microbatch: int = -1
    collective: str = ""
    collectives: int = 0
    is_waiting: bool = False
    waits_for_device: bool = False
    device: DeviceAt | None = None

    @property
    def is_at_device(self) -> bool:
        """Whether the rank waits for work of its own device, so that the place of the device counts."""
        has_work = self.device is not None and self.device.done < self.device.launched
        return self.waits_for_device or has_work and not self.is_waiting

    def text(self) -> str:
        """Return what the rank does, without its name."""
        if self.step < 0:
            return f"nothing yet{f', {self.state}' if self.state else ''}"
        return f"{place_text(self)}; {self.state or self._doing()}"

    def _doing(self) -> str:
        if self.is_at_device:
            at = "" if self.device is None else f", which is at {self.device.text()}"
            return f"waits for its device{at}"
        return "waits for other ranks" if self.is_waiting else "does not wait"


@dataclass(frozen=True)
class NodeReport:
    """The ranks of a host. ranks: empty while they move; is_last: the agent ends"""

    host: str
    ranks: tuple[RankPlace, ...] = ()
    is_last: bool = False

    def line(self) -> str:
        """Return the line that an agent prints."""
        return MARK + json.dumps(asdict(self), separators=(",", ":"))


def report_in(line: str) -> NodeReport | None:
    """Return the report in a line of an agent's output; pdsh puts the host before it."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        values = json.loads(text)
        ranks = tuple(_rank_of(rank) for rank in values.pop("ranks"))
        return NodeReport(ranks=ranks, **values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # a line that was cut


def _rank_of(values: dict) -> RankPlace:
    device = values.pop("device")
    return RankPlace(device=None if device is None else DeviceAt(**device), **values)


def place_text(place: PlaceEntry | RankPlace) -> str:
    """ "step 8, training, B of micro-batch 3 at stage 0, collective 51 (all_reduce over dp)" """
    words = [f"step {place.step + 1}", place.phase]
    if place.instruction:
        words.append(_instruction_text(place))
    if place.collective:
        words.append(f"collective {place.collectives} ({place.collective})")
    return ", ".join(words)


def _instruction_text(place: PlaceEntry | RankPlace | DeviceAt) -> str:
    of = "" if place.microbatch < 0 else f" of micro-batch {place.microbatch}"
    return f"{place.instruction}{of} at stage {place.stage}"


@dataclass(frozen=True)
class Behind:
    """Ranks, for at least one of which the others wait.

    is_device: the hosts wait for the devices of these ranks, which are behind
    """

    ranks: tuple[RankPlace, ...]
    is_device: bool = False

    @property
    def host(self) -> str:
        """The host that has them all; "" for several hosts."""
        hosts = {rank.host for rank in self.ranks}
        return hosts.pop() if len(hosts) == 1 else ""

    @property
    def has_passed_its_limit(self) -> bool:
        """Whether this is a hang."""
        return all(rank.idle_seconds > rank.limit_seconds for rank in self.ranks)

    @property
    def may_wait_for_others(self) -> bool:
        """Whether a rank that is not seen may be behind."""
        first = self.ranks[0]
        return self.is_device or first.is_waiting and not first.state


def behind(ranks: Sequence[RankPlace]) -> Behind:
    """Find the rank for which the others wait, or the ranks whose devices are behind.

    First those that cannot move: ended, stopped, or without a first entry. Then hosts that wait neither for other
    ranks nor for their device. Then devices. Among hosts it is the one with the fewest steps, and the longest time
    at its place: others stop after it.
    """
    kinds = (
        [rank for rank in ranks if rank.state],
        [rank for rank in ranks if rank.step < 0],
        [rank for rank in ranks if not rank.is_waiting and not rank.is_at_device],
    )
    at_device = [rank for rank in ranks if rank.is_at_device]
    candidates = next((kind for kind in kinds if kind), None)
    if candidates is None and at_device:
        return Behind(_devices_behind(at_device), is_device=True)
    first = min(
        candidates or ranks,
        key=lambda rank: (rank.step, -rank.idle_seconds, rank.rank),
    )
    return Behind((first,))


def _devices_behind(ranks: Sequence[RankPlace]) -> tuple[RankPlace, ...]:
    """Find the ranks whose devices are at the earliest place; all ranks, unless each place is known.

    An instruction that waits for another one has a later moment in the schedule. At the same moment, ranks of a stage
    have one program, whose order decides.
    """
    known = [(rank, rank.device) for rank in ranks if rank.device is not None]
    if len(known) < len(ranks):
        return tuple(ranks)
    first = min((device.step, device.moment) for _, device in known)
    earliest = [
        (rank, device)
        for rank, device in known
        if (device.step, device.moment) == first
    ]
    fewest: dict[int, int] = {}
    for _, device in earliest:
        fewest[device.stage] = min(device.done, fewest.get(device.stage, device.done))
    return tuple(
        rank for rank, device in earliest if device.done == fewest[device.stage]
    )


def hang_text(found: Behind, total: int) -> str:
    """Return the sentence that names what has not moved. total: ranks of the job"""
    if found.is_device:
        device = _device_text(found.ranks, total)
        return f"No host is behind; a device is: {device}"
    [rank] = found.ranks
    return (
        f"rank {rank.rank} on {rank.host} is behind: it has not moved for {rank.idle_seconds:.1f} s "
        f"(limit {rank.limit_seconds:.1f} s). It was at {rank.text()}."
    )


def _device_text(ranks: Sequence[RankPlace], total: int) -> str:
    first = ranks[0]
    # A device may be behind on many ranks, of which some are named.
    idle = min(rank.idle_seconds for rank in ranks)
    limit = max(rank.limit_seconds for rank in ranks)
    since = f"for {idle:.1f} s (limit {limit:.1f} s)"
    if first.device is None:
        return f"all hosts have waited {since} for their devices, whose places are not known."
    if len(ranks) == 1:
        return (
            f"that of rank {first.rank} on {first.host} has not moved {since}. It is at {first.device.text()}; "
            "the devices of all other ranks are further."
        )
    return (
        f"one of those of {_names(ranks, total)}, which have not moved {since}. They are at one place, "
        f"{first.device.text()}: torchfrtrace compares the records of their collectives."
    )


def _names(ranks: Sequence[RankPlace], total: int) -> str:
    """ "all ranks", or "ranks 4 on n1, 5 on n1 and 3 more" """
    if len(ranks) == total:
        return "all ranks"
    named = [f"{rank.rank} on {rank.host}" for rank in ranks[:MOST_NAMED]]
    text = f"ranks {', '.join(named)}"
    more = len(ranks) - MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text


def table_text(ranks: Sequence[RankPlace]) -> str:
    """All ranks with their places, a line each."""
    lines = [
        f"  rank {rank.rank:<4} {rank.host:<12} {rank.idle_seconds:7.1f} s  {rank.text()}"
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
    more = len(lines) - MOST_LISTED
    if more > 0:
        lines[MOST_LISTED:] = [f"  and {more} more ranks"]
    return "\n".join(["places of the ranks:", *lines])
