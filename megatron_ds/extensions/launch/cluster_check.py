"""Measure the ranks of a launcher before a long training: network, speed, clocks and a shared folder.

`ClusterMeter(group, device).measure(folder)` runs on all ranks, each of which gets the `Measured` of every rank. All of
it takes less than a minute: sizes grow and pairs go on only while time is left.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...cli import note_for_torchrun
from ...mpu import collectives
from ...mpu.group import Group, Transport
from ...mpu.host_reads import wait_for_work
from ...mpu.launch import read_launch, start, stop
from ...mpu.process_groups import connect_torch
from .cluster_findings import Measured, problems, problems_text, text_of

# The largest has the bytes of a layer's gradients; more bytes would have the same bandwidth.
SIZES = (1 << 10, 1 << 20, 1 << 24, 1 << 26)  # bytes of an all-reduce
LINK_BYTES = 1 << 22
SECONDS_OF_SIZES = 15.0
SECONDS_OF_PAIRS = 20.0
PINGS = 8
# The fastest counts, since other processes may share the cores.
WORK_REPEATS = 5
LINK_REPEATS = 3


def check(folder: Path | None = None, as_json: bool = False) -> int:
    """Measure the ranks of this launch, and print the findings on rank 0. Return 1 if something is wrong.

    Collective over the world.
    """
    launch = read_launch()
    device = start(launch, alone=True)
    try:
        ranks = tuple(range(launch.world_size))
        transport = connect_torch("world", [ranks], launch.rank)
        group = Group("world", ranks, launch.rank, transport)
        found = ClusterMeter(group, device).measure(folder)
    finally:
        stop()
    # All ranks have the same exit code; rank 0 prints.
    wrong = problems(found)
    if launch.rank == 0:
        text = text_of(found, wrong)
        if as_json:
            values = [asdict(one) for one in found]
            text = json.dumps({"ranks": values, "problems": wrong}, indent=1)
        print(text, flush=True)
    if wrong:
        # a launcher prints this last; otherwise it would repeat the whole text
        note_for_torchrun(os.environ, problems_text(wrong), is_passing=False)
    return 1 if wrong else 0


@dataclass
class ClusterMeter:
    """Measures the ranks of a group. Each method is collective over it, and takes tensors on `device`."""

    group: Group
    device: torch.device

    def measure(self, folder: Path | None = None) -> list[Measured]:
        """Return the findings of all ranks, in their order. folder: one that all ranks should see"""
        rank = self.group.ranks[self.group.rank]
        found = Measured(rank, platform.node(), self.work_seconds())
        # One measurement after the other: they would disturb each other.
        if self.group.size > 1:
            found.reduces = self.all_reduces()
            found.ring = self.ring()
            found.links = self.pairs()
            found.clock = self.clock()
        # A folder that is not shared shows now, and not at the first checkpoint.
        if folder is not None:
            self.look_into(folder, found)
        return collectives.all_gather_object(found, self.group)

    def work_seconds(self) -> float:
        """Measure the seconds of a product that each rank computes alone; the fastest of several.

        The size keeps a GPU busy for a millisecond, and a core of a CPU for ten.
        """
        size = 4096 if self.device.type == "cuda" else 384
        matrix = torch.ones(size, size, device=self.device)
        product = lambda: matrix @ matrix
        return min(self.seconds(product) for _ in range(WORK_REPEATS))

    def all_reduces(self) -> dict[int, float]:
        """Bytes → bus bandwidth in GB/s, by the slowest rank.

        It counts 2 (n - 1) / n times the bytes of n ranks, which each rank sends and receives in a ring.
        """
        found = {}
        share = 2 * (self.group.size - 1) / self.group.size
        begin = time.monotonic()
        for size in SIZES:
            tensor = self.zeros(size)
            reduce = lambda: collectives.all_reduce_(tensor, self.group)  # noqa: B023
            reduce()  # connections are made
            slowest = self.largest(self.seconds(reduce))
            found[size] = share * size / slowest / 1e9
            # all ranks stop alike
            if self.largest(time.monotonic() - begin) > SECONDS_OF_SIZES:
                break
        return found

    def ring(self) -> float:
        """Measure the GB/s received from the rank before, while all ranks send to the next.

        The slowest link of a ring is the speed of its all-reduce.
        """
        size = self.group.size
        rank = self.group.rank
        return self.exchange((rank + 1) % size, (rank - 1) % size)

    def pairs(self) -> dict[int, float]:
        """Measure other rank → GB/s, in rounds of disjoint pairs, while time is left.

        Both ranks of a pair send at once. Of many ranks, each meets as many others as there is time for.
        """
        found = {}
        begin = time.monotonic()
        for partners in rounds(self.group.size):
            other = partners.get(self.group.rank)
            if other is not None:
                found[self.group.ranks[other]] = self.exchange(other, other)
            # all ranks stop alike
            if self.largest(time.monotonic() - begin) > SECONDS_OF_PAIRS:
                break
        return found

    def clock(self) -> float:
        """Measure by how many seconds the clock is ahead of rank 0's.

        Of some messages there and back, the quickest counts: its answer is taken to be written halfway between.
        """
        best = (float("inf"), 0.0)
        # rank 0 answers one rank after the other
        for other in range(1, self.group.size):
            for _ in range(PINGS):
                if self.group.rank == other:
                    best = min(best, self._ask_clock())
                elif self.group.rank == 0:
                    self._answer_clock(other)
        return best[1]

    def _ask_clock(self) -> tuple[float, float]:
        """(seconds there and back, seconds that the clock is ahead)."""
        begin = time.time()
        self._send(begin, 0)
        theirs = self._received(0)
        end = time.time()
        return end - begin, (begin + end) / 2 - theirs

    def _answer_clock(self, other: int) -> None:
        self._received(other)
        self._send(time.time(), other)

    def _send(self, number: float, other: int) -> None:
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        self._transport.isend(tensor, other, 0).wait()

    def _received(self, other: int) -> float:
        tensor = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._transport.irecv(tensor, other, 0).wait()
        return float(tensor)

    @property
    def _transport(self) -> Transport:
        assert self.group.transport is not None, "there is no other rank"
        return self.group.transport

    def look_into(self, folder: Path, found: Measured) -> None:
        """Find out whose files in the folder are not seen here, and whether this rank can write there.

        Each rank writes one and removes it.
        """
        own = f".check-{uuid.uuid4().hex}"
        names = collectives.all_gather_object(own, self.group)
        try:
            (folder / own).write_text("")
        except OSError as error:
            found.write_error = error.strerror or str(error)
        collectives.barrier(self.group)
        # unlike Path.exists, this is no error for folders that may not be entered
        seen = [os.path.exists(folder / name) for name in names]
        collectives.barrier(self.group)
        with suppress(OSError):
            (folder / own).unlink()
        found.unseen = [rank for rank, is_seen in enumerate(seen) if not is_seen]

    def exchange(self, to: int, source: int) -> float:
        """Measure the GB/s received from one position of the group while as much is sent to another.

        The first exchange makes the connection and does not count. Of the others the fastest counts.
        """
        sends = [(self.zeros(LINK_BYTES), to)]
        receives = [(self.zeros(LINK_BYTES), source)]
        run = lambda: collectives.exchange(sends, receives, self.group)
        run()
        return LINK_BYTES / min(self.seconds(run) for _ in range(LINK_REPEATS)) / 1e9

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of a call, with the work that it queues on a GPU.

        Not collective.
        """
        self._finish()
        begin = time.perf_counter()
        run()
        self._finish()
        return max(time.perf_counter() - begin, 1e-9)

    def largest(self, number: float) -> float:
        """Return the largest number of all ranks."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        collectives.all_reduce_(tensor, self.group, "max")
        return float(tensor)

    def zeros(self, size: int) -> torch.Tensor:
        """Return an fp32 tensor of so many bytes."""
        return torch.zeros(size // 4, device=self.device)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            wait_for_work(self.device, self.group)


def rounds(size: int) -> Iterator[dict[int, int]]:
    """Rounds of a tournament: rank → its partner. Together they hold each pair of `size` ranks once."""
    places = size + size % 2  # of an odd number, one pauses in each round
    others = places - 1
    for shift in range(others):
        order = [0, *((i + shift) % others + 1 for i in range(others))]
        partners = dict(zip(order, reversed(order)))
        yield {one: other for one, other in partners.items() if max(one, other) < size}
