"""`Copies`: host memory for the state of a checkpoint, into which it is copied while training goes on.

A GPU copies on a stream of its own; the thread of the save copies what lies in host memory. Both run beside the next
forward and backward, which only read the state. The update waits for both (`CopiesUnderWay.wait`).
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..host.direct_file import TILE
from ..host.page_locked import page_locked
from ..host.side_streams import Mark, side_stream
from ..mpu.host_reads import wait_for_mark_in_thread
from ..mpu.param_spec import ParamSpec
from .pieces import Piece, key


@dataclass(frozen=True)
class CopiedPiece:
    """A piece with its values at the time of the copy, in host memory."""

    spec: ParamSpec
    kind: str
    start: int
    stop: int
    tensor: torch.Tensor
    replica: int
    replicas: int


class CopiesUnderWay:
    """The copies of one save.

    sources   the tensors of the pieces, whose memory is kept until they are copied
    mark      in the GPU's stream; when it is reached, the copies of the GPU are complete
    """

    def __init__(
        self,
        copies: Sequence[CopiedPiece] = (),
        sources: Sequence[torch.Tensor] = (),
        mark: Mark | None = None,
    ):
        self._copies = copies
        self._sources = sources
        self._mark = mark or Mark()
        self._host_copies_have_ended = threading.Event()
        if all(source.is_cuda for source in sources):
            self._host_copies_have_ended.set()

    def wait(self) -> None:
        """Wait until the sources may change: the current stream waits for the GPU, the host for the thread."""
        self._mark.wait()
        self._host_copies_have_ended.wait()

    @property
    def pieces(self) -> Sequence[CopiedPiece]:
        """The copies. Their values are complete when `tiles` is exhausted."""
        return self._copies

    def end(self) -> None:
        """End the copies from host memory, complete or not."""
        self._host_copies_have_ended.set()

    def tiles(self) -> Iterator[CopiedPiece]:
        """Copy what lies in host memory, wait for the GPU, and yield all values. For the thread of the save, which
        calls `end` if it does not take all tiles.

        A tile is yielded while it is in the processor's cache. It is so small that torch computes with this thread
        alone. A parallel operation would give this thread a team of its own, and where a process has more OpenMP
        threads than processors, those of the step sleep at each barrier.
        """
        pairs = list(zip(self._copies, self._sources))
        for copied, source in pairs:
            if not source.is_cuda:
                yield from _copy_tiles(copied, source)
        self.end()
        wait_for_mark_in_thread(self._mark)
        self._sources = ()
        for copied, source in pairs:
            if source.is_cuda:
                yield from _tiles(copied)


class Copies:
    """Host memory for the pieces of one save, used again by the next one.

    It is page-locked where pieces are on a GPU.
    """

    def __init__(self):
        self._memory: dict[tuple, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held from save to save."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def take(self, pieces: Iterable[Piece]) -> CopiesUnderWay:
        """Return the copies under way: there is memory for them, and a GPU has begun to copy."""
        pairs = [(piece, piece.tensor.detach()) for piece in pieces]
        sources = [source for _, source in pairs]
        device = next((s.device for s in sources if s.is_cuda), torch.device("cpu"))
        stream = side_stream(device, "to host")
        with stream.behind_current():
            copies = [self._copy(piece, source) for piece, source in pairs]
        return CopiesUnderWay(copies, sources, stream.mark())

    def _copy(self, piece: Piece, source: torch.Tensor) -> CopiedPiece:
        place = (key(piece), piece.start, piece.stop, source.dtype)
        if place not in self._memory:
            self._memory[place] = _host_memory(source)
        memory = self._memory[place]
        if source.is_cuda:
            memory.copy_(source, non_blocking=True)
        return CopiedPiece(
            piece.spec,
            piece.kind,
            piece.start,
            piece.stop,
            memory,
            piece.replica,
            piece.replicas,
        )


def _host_memory(source: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of the host, of the size and dtype of `source`."""
    if source.is_cuda:
        return page_locked(source.numel(), source.dtype)
    return torch.empty(source.shape, dtype=source.dtype)


def _tiles(copied: CopiedPiece) -> Iterator[CopiedPiece]:
    """Yield the piece in parts of `TILE` elements."""
    for tile in copied.tensor.view(-1).split(TILE):
        yield replace(copied, tensor=tile)


def _copy_tiles(copied: CopiedPiece, source: torch.Tensor) -> Iterator[CopiedPiece]:
    """Copy the values of a flat source, and yield each tile when it is copied."""
    for tile, values in zip(_tiles(copied), source.view(-1).split(TILE)):
        tile.tensor.copy_(values)
        yield tile
