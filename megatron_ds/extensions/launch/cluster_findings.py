"""What the ranks of a cluster check have measured, what is wrong about it, and its text.

A rank is compared with the median of all ranks, not with what its hardware should reach: the check needs no table of
machines, and finds the one host of many that is unlike the others. A defect that all ranks share shows in the
figures only.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# A rank this much slower than the median is reported, and a link with this share of the median's bandwidth.
SLOW_WORK = 1.5
SLOW_LINK = 0.5
MOST_CLOCK_SECONDS = 1.0


@dataclass
class Measured:
    """What one rank has found.

    work_seconds  of the same product on each rank, the fastest of several
    reduces       bytes of an all-reduce → bus bandwidth in GB/s
    ring          GB/s received from the rank before, while all send
    links         other rank → GB/s in both directions, while other pairs exchange, too
    clock         seconds that this rank's clock is ahead of rank 0's
    write_error   why this rank cannot write into the folder
    unseen        ranks whose files in the folder this rank does not see
    """

    rank: int
    host: str
    work_seconds: float = 0.0
    reduces: dict[int, float] = field(default_factory=dict)
    ring: float = 0.0
    links: dict[int, float] = field(default_factory=dict)
    clock: float = 0.0
    write_error: str = ""
    unseen: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The rank and its host, for sentences."""
        return f"rank {self.rank} on {self.host}"

    @property
    def best_link(self) -> float:
        """The largest bandwidth of its links: a slow partner is not its fault."""
        return max(self.links.values(), default=0.0)


Ranks = Sequence[Measured]


def problems(found: Ranks) -> list[str]:
    """Return a sentence for everything that is wrong."""
    return [*_slow_ranks(found), *_slow_links(found), *_clocks(found), *_unseen(found)]


def _slow_ranks(found: Ranks) -> Iterator[str]:
    """Ranks that compute slowly.

    Causes are a hot or throttled device, another process on it, or cores that several ranks share.
    """
    usual = statistics.median(one.work_seconds for one in found)
    for one in found:
        times = one.work_seconds / usual if usual else 1.0
        if times > SLOW_WORK:
            yield f"{one.name} computes {times:.1f} times as long as the median of the ranks"


def _slow_links(found: Ranks) -> Iterator[str]:
    """Ranks all of whose links are slow.

    Causes are a wrong network interface, a cable at a lower rate, or NCCL without InfiniBand.
    """
    usual = statistics.median(one.best_link for one in found)
    for one in found:
        best = one.best_link
        if one.links and best < SLOW_LINK * usual:
            yield f"{one.name} exchanges {best:.2f} GB/s at most, the median of the ranks is {usual:.2f}"


def _clocks(found: Ranks) -> Iterator[str]:
    """Hosts whose clocks differ: logs of several hosts cannot be put in order."""
    for one in found:
        if abs(one.clock) > MOST_CLOCK_SECONDS:
            yield f"the clock of {one.name} is {one.clock:+.1f} s from that of rank 0"


def _unseen(found: Ranks) -> Iterator[str]:
    """Find ranks that cannot write, or see a folder of their own host: a checkpoint would be in pieces."""
    wrote = {one.rank for one in found if not one.write_error}
    for one in found:
        if one.write_error:
            yield f"{one.name} cannot write into the folder: {one.write_error}"
        missed = sorted(wrote.intersection(one.unseen))
        if missed:
            yield f"{one.name} does not see the files that ranks {missed} wrote into the folder"


# --------------------------------------------------------------------------------------------------- text
def text_of(found: Ranks, wrong: Sequence[str]) -> str:
    """Return the findings for reading. wrong: the sentences of `problems`"""
    hosts = {one.host for one in found}
    ranks = _counted(len(found), "rank")
    places = _counted(len(hosts), "host")
    lines = [f"{ranks} on {places}"]
    # Of many pairs only the range is shown.
    for size, bandwidth in found[0].reduces.items():
        lines.append(f"all-reduce of {_size(size)}: {bandwidth:.3f} GB/s of each rank")
    rings = [one.ring for one in found if one.ring]
    if rings:
        lines.append(f"ring: {_range(rings, 'GB/s')}")
    for title, is_near in (("on one host", True), ("between hosts", False)):
        links = _links(found, is_near)
        if links:
            lines.append(f"pairs {title}: {_range(links, 'GB/s')}")
    # Ranks compute the same product, so the times compare.
    work = [one.work_seconds * 1e3 for one in found]
    lines.append(f"product: {_range(work, 'ms')}")
    clock = max(abs(one.clock) for one in found)
    lines.append(f"clocks: within {clock:.3f} s of rank 0's")
    # The problems come last, where they are seen.
    lines.append(problems_text(wrong))
    return "\n".join(lines)


def problems_text(wrong: Sequence[str]) -> str:
    """Return a line for each problem."""
    if not wrong:
        return "nothing is wrong"
    return "\n".join(f"problem: {sentence}" for sentence in wrong)


def _links(found: Ranks, is_near: bool) -> list[float]:
    """Return the bandwidths of the pairs on one host, or of the others.

    Each pair counts twice, once for each of its ranks.
    """
    hosts = {one.rank: one.host for one in found}
    links = []
    for one in found:
        for other, bandwidth in one.links.items():
            if (hosts[other] == one.host) == is_near:
                links.append(bandwidth)
    return links


def _counted(number: int, noun: str) -> str:
    """ "2 ranks" or "1 rank" """
    ending = "" if number == 1 else "s"
    return f"{number} {noun}{ending}"


def _range(values: Sequence[float], unit: str) -> str:
    """Return the smallest, the largest and the median."""
    middle = statistics.median(values)
    return f"{min(values):.3f} to {max(values):.3f} {unit}, median {middle:.3f}"


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
