"""`SignalPipes`: short messages between the processes of one host, a pipe from each to each other.

The system wakes the process that waits, without a thread in between. A process that ends closes its pipes, so
a wait for it ends at once. What a rank wrote to shared memory before it sends is there for the rank that
receives.
"""

import os
import select
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence

from .places import WAITING
from .shared_pages import warn_of_messages

_FORMAT = struct.Struct("<qqqq")  # shorter than PIPE_BUF: written and read whole

Signal = tuple[int, int, int, int]  # its meaning is the caller's


class SignalPipes:
    """The pipes of one rank.

    inbound, outbound  descriptors by the position of the other rank: what it sends is read from the one, what
                       is sent to it is written to the other
    ranks              the global rank of each position, for errors
    timeout_seconds    how long `receive` waits
    """

    def __init__(
        self,
        inbound: Mapping[int, int],
        outbound: Mapping[int, int],
        ranks: Sequence[int],
        timeout_seconds: float,
    ):
        self._inbound = dict(inbound)
        self._outbound = dict(outbound)
        self._ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._polls = {}
        for peer, file in self._inbound.items():
            self._polls[peer] = select.poll()
            self._polls[peer].register(file, select.POLLIN)
        weakref.finalize(
            self, _close, [*self._inbound.values(), *self._outbound.values()]
        ).atexit = False

    def send(self, peer: int, signal: Signal) -> None:
        """Raises ConnectionError if the peer has ended."""
        try:
            os.write(self._outbound[peer], _FORMAT.pack(*signal))
        except BrokenPipeError as error:
            raise self._ended(peer) from error

    def receive(self, peer: int) -> Signal:
        """Return the next signal of a peer. Raises ConnectionError if it has ended, TimeoutError after the
        timeout.
        """
        signal = self.take(peer, self.timeout_seconds)
        if signal is None:
            raise TimeoutError(
                f"timed out after {self.timeout_seconds:.0f} s without a signal of rank "
                f"{self._ranks[peer]}"
            )
        return signal

    def take(self, peer: int, wait_seconds: float = 0.0) -> Signal | None:
        """Return the next signal of a peer; None if it sends none within the time. Raises ConnectionError."""
        if not self._polls[peer].poll(0):
            if not wait_seconds:
                return None
            with WAITING:
                if not self._polls[peer].poll(1000 * wait_seconds):
                    return None
        data = os.read(self._inbound[peer], _FORMAT.size)
        if not data:
            raise self._ended(peer)
        return _FORMAT.unpack(data)

    def _ended(self, peer: int) -> ConnectionError:
        return ConnectionError(f"connection closed by peer, rank {self._ranks[peer]}")


def share_pipes(
    rank: int,
    ranks: Sequence[int],
    exchange: Callable[[object], list],
    timeout_seconds: float,
) -> SignalPipes | None:
    """Return the pipes among the ranks of one host; None where a process may not open another's.

    rank: the position of this one in `ranks`, their global ranks. exchange: an all-gather of objects.
    Collective over its ranks.
    """
    made = {peer: os.pipe() for peer in range(len(ranks)) if peer != rank}
    mine = {peer: (read, os.fstat(read).st_ino) for peer, (read, _) in made.items()}
    offers = exchange((os.getpid(), mine))
    inbound, trouble = _open_inbound(rank, offers)
    # After the exchange all ranks have opened the pipes that they read from.
    why = next(filter(None, exchange(trouble)), "")
    outbound = {peer: write for peer, (_, write) in made.items()}
    _close([read for read, _ in made.values()])
    if why:
        if rank == 0:
            warn_of_messages(why)
        _close([*inbound.values(), *outbound.values()])
        return None
    return SignalPipes(inbound, outbound, ranks, timeout_seconds)


def _open_inbound(rank: int, offers: Sequence[tuple]) -> tuple[dict[int, int], str]:
    """Return (a descriptor for each other rank, up to the first that cannot be opened; the reason, or "")"""
    inbound = {}
    for peer, (pid, files) in enumerate(offers):
        if peer == rank:
            continue
        file, inode = files[rank]
        try:
            inbound[peer] = os.open(
                f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError as error:
            return (
                inbound,
                f"process {os.getpid()} may not open a pipe of process {pid}: {error}",
            )
        if os.fstat(inbound[peer]).st_ino != inode:
            return (
                inbound,
                f"/proc/{pid}/fd/{file} is not the pipe that process {pid} announced",
            )
    return inbound, ""


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
