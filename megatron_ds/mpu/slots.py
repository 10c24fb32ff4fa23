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
collective starts. So all ranks must start their collectives in the same order, and may wait for them in any.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from ..host.shared_pages import SharedPages, warn_of_messages
from .group import DONE, Work
from .shared_sums import Signals, Translated

SLOT_BYTES = 1 << 20
WHOLE_BYTES = 1 << 14  # three ranks or more add larger tensors by pieces
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_ALIGNED = 64  # bytes; a multiple of any element's

# What must be the same on all ranks, besides the round and its bytes. A signal has the number of an entry.
Call = tuple[str, str, torch.dtype]  # kind, reduction or "", dtype
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)
_CALLS: tuple[Call, ...] = tuple(product(_KINDS, ("", *_COMBINE), _DTYPES))
_NUMBERS = {call: number for number, call in enumerate(_CALLS)}

# read(which bytes of the parts, those of each other rank)
Read = Callable[[slice, Mapping[int, Tensor]], None]


def open_slots(
    rank: int,
    ranks: Sequence[int],
    memory: SharedPages,
    signals: Signals,
    translate: Callable[[str, Exception], Exception],
    exchange: Callable[[object], list],
) -> "Slots | None":
    """Return the slots of one rank in one group; None on all ranks where one has no room for them. Collective.

    rank       the position of this one in `ranks`, the global ranks of the group
    translate  makes the error that is raised from (what failed, the cause)
    exchange   an all-gather of objects
    """
    rounds: Rounds | None = None
    trouble = ""
    try:
        rounds = Rounds(rank, ranks, memory, signals, translate)
    except OSError as error:
        trouble = f"rank {ranks[rank]}: {error}"
    # After it the slots of all ranks exist.
    why = next(filter(None, exchange(trouble)), "")
    if why:
        if rank == 0:
            warn_of_messages(why)
        return None
    assert rounds is not None, "without an error it was made"
    rounds.map_pages()
    return Slots(rounds)


class Slots:
    """The collectives of one rank over the slots of its group."""

    def __init__(self, rounds: "Rounds"):
        self._rounds = rounds
        self._rank = rounds.rank
        self._size = len(rounds.ranks)
        self._last: Work = DONE

    @property
    def rounds(self) -> int:
        """Rounds that have started."""
        return self._rounds.number

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        """Reduce a contiguous tensor of any shape over all ranks, in place."""
        flat = tensor.view(-1)
        call = ("all-reduce", op, tensor.dtype)
        if self._size == 2 or flat.nbytes <= WHOLE_BYTES:
            return self._start(
                call, [flat], [flat] * self._size, _combine(flat, flat, op)
            )
        pieces = flat.tensor_split(self._size)
        mine = pieces[self._rank]
        rounds = self._rounds
        first = self._start(call, pieces, [mine] * self._size, _combine(mine, mine, op))
        # The next collective must wait for both: it would take the number of the second's round.
        self._last = _Then(
            first, lambda: Passage(rounds, call, [mine], pieces, _place(pieces))
        )
        return self._last

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Gather flat [numel] of each rank into flat [n * numel]."""
        pieces = out.chunk(self._size)
        _copy(tensor, pieces[self._rank])
        return self._start(
            ("all-gather", "", tensor.dtype), [tensor], pieces, _place(pieces)
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Work:
        """Reduce flat [n * numel] over all ranks; each keeps its flat [numel]."""
        pieces = tensor.chunk(self._size)
        mine = pieces[self._rank]
        return self._start(
            ("reduce-scatter", op, tensor.dtype),
            pieces,
            [out] * self._size,
            _combine(mine, out, op),
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Work:
        """Send piece i of the flat `tensor` to rank i; `out` receives the pieces of all ranks in order."""
        sent = tensor.chunk(self._size)
        received = out.chunk(self._size)
        _copy(sent[self._rank], received[self._rank])
        return self._start(
            ("all-to-all", "", tensor.dtype), sent, received, _place(received)
        )

    def _start(
        self,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        read: Read,
    ) -> "Passage":
        """outgoing: one tensor for all ranks, or one for each. incoming: as many bytes as each rank sends."""
        self._last.wait()
        self._last = passage = Passage(self._rounds, call, outgoing, incoming, read)
        return passage


class Rounds:
    """The slots of all ranks as one of them sees them, and its rounds. Arguments are those of `open_slots`.

    memory  of the group; this allocates 2 * SLOT_BYTES of each rank's. Raises OSError
    number  of rounds that have started
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        memory: SharedPages,
        signals: Signals,
        translate: Callable[[str, Exception], Exception],
    ):
        self.rank = rank
        self.ranks = ranks
        self._signals = signals
        self._translate = translate
        self._others = [peer for peer in range(len(ranks)) if peer != rank]
        # Two slots, at the same bytes on all ranks.
        places = [memory.allocate(SLOT_BYTES) for _ in range(2)]
        self._mine = [slot for _, slot in places]
        self._theirs = {
            peer: [memory.view(peer, start, SLOT_BYTES) for start, _ in places]
            for peer in self._others
        }
        self.number = 0

    def map_pages(self) -> None:
        """Map the pages of all slots now, not within a step. The slots of all ranks must exist."""
        for slot in (
            *self._mine,
            *(slot for slots in self._theirs.values() for slot in slots),
        ):
            slot.max()

    def publish(self, call: Call, parts: Sequence[Tensor], width: int) -> None:
        """Start a round. parts: bytes for all ranks, or for each, `width` at most."""
        self.number += 1
        slot = self._mine[self.number % 2]
        for i, part in enumerate(parts):
            if len(parts) == 1 or i != self.rank:
                slot[i * width : i * width + len(part)].copy_(part)
        with Translated(self._translate, call[0]):
            for peer in self._others:
                i = peer % len(parts)
                self._signals.send(
                    peer, (self.number, _NUMBERS[call], i * width, len(parts[i]))
                )

    def receive(self, call: Call, expected: Sequence[int]) -> dict[int, Tensor]:
        """Return the bytes that each other rank has for this one in the round; waits for their signals.

        expected: numbers of bytes by rank. Raises the group's error where a rank has others.
        """
        theirs = {}
        for peer in self._others:
            with Translated(self._translate, call[0]):
                number, other, start, nbytes = self._signals.receive(peer)
            if (number, _CALLS[other], nbytes) != (self.number, call, expected[peer]):
                raise self._translate(
                    call[0],
                    ValueError(
                        f"rank {self.ranks[peer]} has {nbytes} bytes for {_in_words(_CALLS[other], number)}, "
                        f"where rank {self.ranks[self.rank]} expects {expected[peer]} for "
                        f"{_in_words(call, self.number)}: the ranks took different paths"
                    ),
                )
            theirs[peer] = self._theirs[peer][number % 2][start : start + nbytes]
        return theirs


class Passage:
    """A `Work`: a collective of one round or several.

    It refers to `Rounds`, not to `Slots`, which refers to the last `Passage`: without a cycle, pipes and
    memory are released with the last reference to the slots.

    outgoing  parts for each rank, or one for all, which pass in pieces of `width` bytes
    """

    __slots__ = (
        "_rounds",
        "_call",
        "_outgoing",
        "_incoming",
        "_read",
        "_width",
        "_needed",
        "_begun",
    )

    def __init__(
        self,
        rounds: Rounds,
        call: Call,
        outgoing: Sequence[Tensor],
        incoming: Sequence[Tensor],
        read: Read,
    ):
        self._rounds = rounds
        self._call = call
        self._outgoing = [*map(_bytes, outgoing)]
        self._read = read
        self._incoming = [part.nbytes for part in incoming]
        self._width = SLOT_BYTES // len(outgoing) // _ALIGNED * _ALIGNED
        self._needed = -(
            -max(*map(len, self._outgoing), *self._incoming) // self._width
        )
        self._begun = 0
        self._publish()

    def wait(self) -> None:
        """Return when results may be read and inputs overwritten. Collective."""
        while self._begun:
            at = self._at(self._begun - 1)
            expected = [
                max(0, min(nbytes, at.stop) - at.start) for nbytes in self._incoming
            ]
            self._read(at, self._rounds.receive(self._call, expected))
            self._publish()

    def is_completed(self) -> bool:
        """Return whether it was waited for."""
        return not self._begun

    def _publish(self) -> None:
        """Start the next round; after the last one, release the tensors."""
        if self._begun == self._needed:
            del self._outgoing, self._read, self._rounds
            self._begun = 0
            return
        at = self._at(self._begun)
        self._rounds.publish(
            self._call, [part[at] for part in self._outgoing], self._width
        )
        self._begun += 1

    def _at(self, i: int) -> slice:
        return slice(i * self._width, (i + 1) * self._width)


class _Then:
    """A `Work` of two, of which the second starts when the first is complete."""

    __slots__ = ("_work", "_second")

    def __init__(self, first: Work, second: Callable[[], Work]):
        self._work = first
        self._second: Callable[[], Work] | None = second

    def wait(self) -> None:
        self._work.wait()
        if self._second is not None:
            self._work = self._second()
            self._second = None
            self._work.wait()

    def is_completed(self) -> bool:
        return self._second is None and self._work.is_completed()


def _combine(mine: Tensor, out: Tensor, op: str) -> Read:
    """p0 + p1 + … into `out`, which may be `mine`."""
    combine = _COMBINE[op]
    dtype = out.dtype
    mine = _bytes(mine)
    out = _bytes(out)

    def read(at: slice, theirs: Mapping[int, Tensor]) -> None:
        size = len(theirs) + 1
        result = out[at].view(dtype)
        parts = [theirs.get(peer, mine[at]).view(dtype) for peer in range(size)]
        total = combine(parts[0], parts[1], out=result if size == 2 else None)
        for i, part in enumerate(parts[2:], start=2):
            combine(total, part, out=result if i == size - 1 else total)

    return read


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


def _in_words(call: Call, number: int) -> str:
    kind, op, dtype = call
    return f"{kind}{op and f' ({op})'} of {str(dtype).removeprefix('torch.')} in round {number}"
