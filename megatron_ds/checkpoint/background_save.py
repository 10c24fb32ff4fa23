"""`BackgroundSave`: a checkpoint that a thread writes while training goes on (`--async-save`).

    begin     the stall: ranks agree, and copy what they write into host memory
    written   the thread has checked, written and synced this rank's file, or failed; asked at any time
    publish   rank 0 makes the checkpoint visible. Raises the error of any rank's thread, on all ranks

The files are those of `save`, byte for byte. Until `publish` has returned there is no checkpoint, as after a crash.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..host.page_locked import page_locked
from ..host.side_streams import Mark, side_stream
from ..mpu.param_spec import ParamSpec
from .pieces import Piece, key
from .save import Saving


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

    def take(self, pieces: Iterable[Piece]) -> tuple[list[CopiedPiece], Mark]:
        """Copies of the values, and the mark behind which they are complete.

        A GPU copies them on a stream of its own: the pieces may change behind the mark.
        """
        tensors = [(piece, piece.tensor.detach()) for piece in pieces]
        device = next((t.device for _, t in tensors if t.is_cuda), torch.device("cpu"))
        stream = side_stream(device, "to host")
        with stream.behind_current():
            copies = [self._copy(piece, source) for piece, source in tensors]
        return copies, stream.mark()

    def _copy(self, piece: Piece, source: torch.Tensor) -> CopiedPiece:
        place = (key(piece), piece.start, piece.stop, source.dtype)
        if place not in self._memory:
            self._memory[place] = _host_memory(source)
        memory = self._memory[place]
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
    """A flat tensor of the host, of the size and dtype of `source`."""
    if source.is_cuda:
        return page_locked(source.numel(), source.dtype)
    return torch.empty(source.shape, dtype=source.dtype)


class BackgroundSave:
    """One save under way.

    copied: the mark behind which the pieces may change
    """

    def __init__(
        self,
        saving: Saving,
        pieces: Iterable[Piece],
        run: Mapping,
        copies: Copies,
        reason_against: Callable[[Iterable[Piece]], str | None] = lambda pieces: None,
    ):
        """Begin it: the pieces may change behind `copied`. Collective over the world.

        reason_against: called by the thread with the copies; a reason drops the save, without an error
        Raises CheckpointError on all ranks when the save cannot begin.
        """
        pieces = list(pieces)
        self.step = saving.step
        self._saving = saving
        self._reason_against = reason_against
        self._part: Any = None
        self._reason: str | None = None
        self._error: BaseException | None = None
        saving.begin(pieces, run)
        # What a GPU still copies keeps its memory. An error of one rank is raised by `publish`, on all.
        self._sources = saving.own(pieces)
        self.copied = Mark()
        copied: list[CopiedPiece] = []
        try:
            copied, self.copied = copies.take(self._sources)
        except Exception as error:
            self._error = error
        # It does not keep a process that fails from ending.
        self._thread = threading.Thread(
            target=self._write, args=(copied,), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's file is complete, or has failed."""
        return not self._thread.is_alive()

    def publish(self) -> tuple[Path | None, list[str | None]]:
        """Wait until all ranks have written, and make the checkpoint visible. Collective.

        Returns its path, and each rank's reason against it: with any, there is no checkpoint and no path.
        Raises CheckpointError on all ranks when any rank failed; the previous checkpoint is unchanged.
        """
        found = self._saving.collect(self._written)
        reasons = [reason for _, reason in found]
        if any(reasons):
            self._saving.abandon()
            return None, reasons
        return self._saving.publish([part for part, _ in found]), reasons

    def _written(self) -> tuple[Any, str | None]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._part, self._reason

    def _write(self, pieces: list[CopiedPiece]) -> None:
        if self._error is not None:
            return
        try:
            self.copied.synchronize()
            self._sources = []
            self._reason = self._reason_against(pieces)
            if self._reason is None:
                self._part = self._saving.write(pieces)
        except BaseException as error:  # noqa: BLE001  `publish` raises it on all ranks
            self._error = error
