"""`Slots`: collectives of ranks of one host, which copy their tensors through memory that all of them read.

Each rank has two slots in its shared memory. It copies what it has for the others into one of them and sends
each a signal; when it has their signals, it reads their slots. Larger tensors pass in several rounds, the
slots in turn, so that the memory is the same for tensors of any size and stays in the processor's cache.

    rank 0   |- copies -| READY 1 |....|- reads slot 0 of rank 1 -|- copies -| READY 2 |...
    rank 1      |- copies -| READY 1 |-- reads slot 0 of rank 0 --|- copies -| READY 2 |...
                      slot 0                                           slot 1

A rank starts round n + 1 when it has read everything of round n. So with the others' signals of round n they
have read round n - 1, whose slot round n + 1 overwrites: one signal a round and pair of ranks is enough.

Sums are added in rank order, p0 + p1 + …, as in gloo.py: they have the bits of sums by messages.

Measured with one core a rank, two ranks, times as fast as by messages: 4 KB 3 to 5; an all-reduce of 786 KB
in bf16 9, other collectives of it 2.5 to 3; 19 MB 2.5 to 3.5.

Note: waiting. The first round begins at once; its end and all others happen in `wait`, or when the next
collective starts. All ranks must start their collectives in the same order, and wait for them in that order.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..host.memory_maps import SharedPages
from .group import DONE, Work
from .shared_sums import Signals, Translated

SLOT_BYTES = 1 << 20
WHOLE_BYTES = 1 << 14           # three ranks or more add larger tensors by pieces
_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")

_ALIGNED = 64                   # bytes; a multiple of any element's

# read(which bytes of the parts, those of each other rank)
Read = Callable[[slice, Mapping[int, Tensor]], None]


class Slots:
    """The slots of one rank in one group, and the collectives over them. Making it is collective.

    memory     of the group; this allocates 2 * SLOT_BYTES of each rank's
    translate  makes the error that is raised from (what failed, the cause)
    rounds     that have started
    """

    def __init__(self, rank: int, size: int, memory: SharedPages, signals: Signals,
                 translate: Callable[[str, Exception], Exception]):
        self._rank, self._size, self._signals, self._translate = rank, size, signals, translate
        self._others = [peer for peer in range(size) if peer != rank]
        places = [memory.allocate(SLOT_BYTES) for _ in range(2)]        # at the same bytes on all ranks
        self._mine = [slot for _, slot in places]
        self._theirs = {peer: [memory.view(peer, start, SLOT_BYTES) for start, _ in places]
                        for peer in self._others}
        self._last: Work = DONE
        self.rounds = 0
        # A round without bytes: then all slots exist. Their pages are mapped now, not within a step.
        empty = [torch.empty(0, dtype=torch.uint8)]
        self.publish("all-gather", empty, 0)
        self.receive("all-gather", [0] * size)
        for slot in (*self._mine, *(slot for slots in self._theirs.values() for slot in slots)):
            slot.max()

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """As in `Transport`."""
        flat = tensor.view(-1)
        if self._size == 2 or flat.nbytes <= WHOLE_BYTES:
            return self._start("all-reduce", [flat], [flat] * self._size, self._combine(flat, flat, op))
        pieces = flat.tensor_split(self._size)
        mine = pieces[self._rank]
        first = self._start("all-reduce", pieces, [mine] * self._size, self._combine(mine, mine, op))
        return _Then(first, lambda: self._start("all-gather", [mine], pieces, _place(pieces)))

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """As in `Transport`."""
        pieces = out.chunk(self._size)
        _copy(tensor, pieces[self._rank])
        return self._start("all-gather", [tensor], pieces, _place(pieces))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Work:
        """As in `Transport`."""
        pieces = tensor.chunk(self._size)
        mine = pieces[self._rank]
        return self._start("reduce-scatter", pieces, [out] * self._size, self._combine(mine, out, op))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Work:
        """As in `Transport`, of flat tensors in equal pieces."""
        sent, received = tensor.chunk(self._size), out.chunk(self._size)
        _copy(sent[self._rank], received[self._rank])
        return self._start("all-to-all", sent, received, _place(received))

    def publish(self, kind: str, parts: Sequence[Tensor], width: int) -> None:
        """Start a round. parts: bytes for all ranks, or for each, `width` at most."""
        self.rounds += 1
        slot = self._mine[self.rounds % 2]
        for i, part in enumerate(parts):
            if len(parts) == 1 or i != self._rank:
                slot[i * width:i * width + len(part)].copy_(part)
        with Translated(self._translate, kind):
            for peer in self._others:
                i = peer % len(parts)
                self._signals.send(peer, (self.rounds, _KINDS.index(kind), i * width, len(parts[i])))

    def receive(self, kind: str, expected: Sequence[int]) -> dict[int, Tensor]:
        """The bytes that each other rank has for this one in the round; waits for their signals.

        expected: numbers of bytes by rank. Raises the group's error where a rank has others.
        """
        theirs = {}
        for peer in self._others:
            with Translated(self._translate, kind):
                number, other, start, nbytes = self._signals.receive(peer)
            if (number, _KINDS[other], nbytes) != (self.rounds, kind, expected[peer]):
                raise self._translate(kind, ValueError(
                    f"rank {peer} of the group has {nbytes} bytes for an {_KINDS[other]} (round {number}) "
                    f"where rank {self._rank} expects {expected[peer]} for an {kind} (round {self.rounds}): "
                    "the ranks took different paths"))
            theirs[peer] = self._theirs[peer][number % 2][start:start + nbytes]
        return theirs

    def _start(self, kind: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor],
               read: Read) -> "Passage":
        """outgoing: one tensor for all ranks, or one for each. incoming: as many bytes as each rank sends."""
        self._last.wait()
        self._last = Passage(self, kind, outgoing, incoming, read)
        return self._last

    def _combine(self, mine: Tensor, out: Tensor, op: str) -> Read:
        """p0 + p1 + … into `out`, which may be `mine`."""
        combine, dtype = _COMBINE[op], out.dtype
        mine, out = _bytes(mine), _bytes(out)

        def read(at: slice, theirs: Mapping[int, Tensor]) -> None:
            parts = [theirs.get(peer, mine[at]).view(dtype) for peer in range(self._size)]
            result = out[at].view(dtype)
            total = combine(parts[0], parts[1], out=result if self._size == 2 else None)
            for i, part in enumerate(parts[2:], start=2):
                combine(total, part, out=result if i == self._size - 1 else total)
        return read


class Passage:
    """A `Work`: a collective of one round or several.

    outgoing  parts for each rank, or one for all, which pass in pieces of `width` bytes
    """

    __slots__ = ("_slots", "_kind", "_outgoing", "_incoming", "_read", "_width", "_rounds", "_begun")

    def __init__(self, slots: Slots, kind: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor],
                 read: Read):
        self._slots, self._kind, self._outgoing, self._read = slots, kind, [*map(_bytes, outgoing)], read
        self._incoming = [part.nbytes for part in incoming]
        self._width = SLOT_BYTES // len(outgoing) // _ALIGNED * _ALIGNED
        self._rounds = -(-max(*map(len, self._outgoing), *self._incoming) // self._width)
        self._begun = 0
        self._publish()

    def wait(self) -> None:
        """Return when results may be read and inputs overwritten. Collective."""
        while self._begun:
            at = self._at(self._begun - 1)
            expected = [max(0, min(nbytes, at.stop) - at.start) for nbytes in self._incoming]
            self._read(at, self._slots.receive(self._kind, expected))
            self._publish()

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return not self._begun

    def _publish(self) -> None:
        """Start the next round; after the last one, release the tensors."""
        if self._begun == self._rounds:
            self._outgoing = self._read = None
            self._begun = self._rounds = 0
            return
        at = self._at(self._begun)
        self._slots.publish(self._kind, [part[at] for part in self._outgoing], self._width)
        self._begun += 1

    def _at(self, i: int) -> slice:
        return slice(i * self._width, (i + 1) * self._width)


class _Then:
    """A `Work` of two, of which the second starts when the first is complete."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Work, second: Callable[[], Work]):
        self._first, self._second = first, second

    def wait(self) -> None:
        if self._second is not None:
            self._first.wait()
            second, self._second = self._second, None
            second().wait()

    def is_completed(self) -> bool:
        return self._second is None


def _place(pieces: Sequence[Tensor]) -> Read:
    """Each rank's part into its piece."""
    pieces = [*map(_bytes, pieces)]

    def read(at: slice, theirs: Mapping[int, Tensor]) -> None:
        for peer, part in theirs.items():
            pieces[peer][at].copy_(part)
    return read


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _copy(source: Tensor, destination: Tensor) -> None:
    if source.data_ptr() != destination.data_ptr():
        destination.copy_(source)
