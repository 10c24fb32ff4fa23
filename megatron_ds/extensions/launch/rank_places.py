"""`RankPlace`: where a rank is, as its agent reports it; which rank is behind the others; the table of all.

An agent reports the ranks of its host as one line of its output that begins with MARK, as failures are reported.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...host.places import PlaceEntry

MARK = "::megatron-ds places::"
STOPPED = "stopped"  # by SIGSTOP
MOST_LISTED = 64  # ranks of a table


@dataclass(frozen=True)
class RankPlace:
    """A rank at one moment.

    state          "" of a process that runs; STOPPED; how it ended
    idle_seconds   since its last instruction or collective
    limit_seconds  after which that is a hang
    step           steps that are complete; -1 for a rank that has written nothing yet
    is_waiting     whether it waits for other ranks
    collectives    how many it has begun
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

    def text(self) -> str:
        """What the rank does, without its name."""
        if self.step < 0:
            return f"nothing yet{f', {self.state}' if self.state else ''}"
        place = place_text(self)
        doing = "waits for other ranks" if self.is_waiting else "does not wait"
        return f"{place}; {self.state or doing}"


@dataclass(frozen=True)
class NodeReport:
    """The ranks of a host. ranks: empty while they move; is_last: the agent ends"""

    host: str
    ranks: tuple[RankPlace, ...] = ()
    is_last: bool = False

    def line(self) -> str:
        """The line that an agent prints."""
        return MARK + json.dumps(asdict(self), separators=(",", ":"))


def report_in(line: str) -> NodeReport | None:
    """The report in a line of an agent's output; pdsh puts the host before it."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        values = json.loads(text)
        ranks = tuple(RankPlace(**rank) for rank in values.pop("ranks"))
        return NodeReport(ranks=ranks, **values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # a line that was cut


def place_text(place: PlaceEntry | RankPlace) -> str:
    """ "step 8, training, B of micro-batch 3 at stage 0, collective 51 (all_reduce over dp)" """
    words = [f"step {place.step + 1}", place.phase]
    if place.instruction:
        microbatch = (
            "" if place.microbatch < 0 else f" of micro-batch {place.microbatch}"
        )
        words.append(f"{place.instruction}{microbatch} at stage {place.stage}")
    if place.collective:
        words.append(f"collective {place.collectives} ({place.collective})")
    return ", ".join(words)


def behind(ranks: Sequence[RankPlace]) -> RankPlace:
    """The rank for which the others wait.

    First those that cannot move: ended, stopped, or without a first entry. Then those that do not wait for others.
    Among these the one with the fewest steps, and the longest time at its place: others stop after it.
    """
    kinds = (
        [rank for rank in ranks if rank.state],
        [rank for rank in ranks if rank.step < 0],
        [rank for rank in ranks if not rank.is_waiting],
        ranks,
    )
    candidates = next(kind for kind in kinds if kind)
    return min(candidates, key=lambda rank: (rank.step, -rank.idle_seconds, rank.rank))


def hang_text(rank: RankPlace) -> str:
    """The sentence that names a rank that has not moved."""
    return (
        f"rank {rank.rank} on {rank.host} is behind: it has not moved for {rank.idle_seconds:.1f} s "
        f"(limit {rank.limit_seconds:.1f} s). It was at {rank.text()}."
    )


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
