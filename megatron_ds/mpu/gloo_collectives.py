"""Reductions and gathers over a gloo group, made of point-to-point messages of pieces.

gloo's reduce-scatter is an all-reduce of a copy, and the order in which it sums depends on where it cuts.
Here each rank sends every other rank its piece: half the bytes, and each element is added once. gloo's
all-gather copies everything into a buffer and out of it again; here messages are received into the result.

    reduce-scatter   piece i of each rank's tensor → rank i, which adds them
    all-gather       the tensor of each rank → all others, into the piece of their result that it is
    all-reduce       a reduce-scatter, then an all-gather; a small tensor is sent whole, in one round

Measured with one core a rank, times as fast as gloo's: reduce-scatter 3.5 for two ranks and 32 MB, 2 to 4
for 2 to 16 MB, never slower below; all-gather of two ranks and 4 MB 2.5, with 0.6 of the CPU time and no
additional memory; all-reduce equal within the noise.

Note: rank order. Pieces are added in the order of the ranks, p0 + p1 + …, in both reductions and wherever
tensors are cut. So the result has the same bits on all ranks, and a reduce-scatter has those of an
all-reduce.

Note: waiting. The additions, and the second round of an all-reduce, happen in `wait`. All ranks must wait for
their operations in the order in which they start them, which must be the same on all.
"""

from collections.abc import Callable, Sequence

import torch

from .group import Work

FIRST_TAG, NUM_TAGS = 1 << 16, 1 << 20      # above those of the channels; used in turn, two an operation
LAST_TAG = FIRST_TAG + NUM_TAGS
WHOLE_BYTES = 1 << 14                       # tensors up to this size go to all ranks whole

Message = Callable[[torch.Tensor, int, int], Work]


class Pieces:
    """The collectives of one rank. send, receive: start a message (tensor, position of the other rank, tag).
    """

    def __init__(self, rank: int, size: int, send: Message, receive: Message):
        self.rank, self.size, self._send, self._receive = rank, size, send, receive
        self._count = 0

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """tensor [numel] may be this rank's piece of the flat `out` [n * numel]."""
        pieces = out.chunk(self.size)
        works = self._swap([tensor] * self.size, pieces, self._next_tag())
        if pieces[self.rank].data_ptr() != tensor.data_ptr():
            pieces[self.rank].copy_(tensor)
        return _Steps(works, _nothing)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """out [numel / n] may be this rank's piece of the flat `tensor` [numel]."""
        pieces = tensor.chunk(self.size)
        received = self._buffers_like(pieces[self.rank])
        return _Steps(self._swap(pieces, received, self._next_tag()), lambda: self._add(received, out))

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum of a contiguous tensor of any shape, in place."""
        flat, tag = tensor.view(-1), self._next_tag()
        if flat.nbytes <= WHOLE_BYTES:
            received = self._buffers_like(flat)
            return _Steps(self._swap([flat] * self.size, received, tag), lambda: self._add(received, flat))
        pieces = flat.tensor_split(self.size)
        mine, received = pieces[self.rank], self._buffers_like(pieces[self.rank])

        def add_and_send() -> None:
            self._add(received, mine)
            for work in self._swap([mine] * self.size, pieces, tag + 1):
                work.wait()

        return _Steps(self._swap(pieces, received, tag), add_and_send)

    def _buffers_like(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of the shape of `mine` for each rank, in rank order; its own is `mine`."""
        return [mine if i == self.rank else torch.empty_like(mine) for i in range(self.size)]

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor],
              tag: int) -> list[Work]:
        """Start to send outgoing[i] to rank i and to receive incoming[i] from it; empty tensors are skipped.
        """
        others = [i for i in range(self.size) if i != self.rank]
        return [*(self._receive(incoming[i], i, tag) for i in others if incoming[i].numel()),
                *(self._send(outgoing[i], i, tag) for i in others if outgoing[i].numel())]

    def _add(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """p0 + p1 + … into `out`, which may be this rank's part. Overwrites the other ranks' parts."""
        total = parts[0]
        for i, part in enumerate(parts[1:], start=1):
            total = torch.add(total, part, out=out if i >= self.rank else total)

    def _next_tag(self) -> int:
        self._count += 1
        return FIRST_TAG + 2 * self._count % NUM_TAGS


class _Steps:
    """Several messages under way, and what to do when all are complete."""

    __slots__ = ("_works", "_then")

    def __init__(self, works: Sequence[Work], then: Callable[[], None]):
        self._works, self._then = works, then

    def wait(self) -> None:
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        then, self._then = self._then, _nothing
        then()

    def is_completed(self) -> bool:
        return not self._works and self._then is _nothing


def _nothing() -> None:
    pass
