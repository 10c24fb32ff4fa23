"""`BufferPool`: memory for what is under way."""

from collections import deque
from collections.abc import Callable

import torch

from ..mpu.group import Work

UNDER_WAY = 2       # reductions under way before a new buffer is allocated rather than waited for


class BufferPool:
    """Flat buffers that buckets borrow, shared by all sets of gradients of a dtype.

    `nbytes` is what it holds: the most that was ever borrowed at a time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.nbytes = dtype, device, 0
        self._free: list[torch.Tensor] = []
        self._reductions: deque[tuple[Work, Callable[[], None]]] = deque()

    def borrow(self, numel: int, least: int) -> torch.Tensor:
        """A buffer of at least `numel` elements, of any content; a new one gets at least `least`."""
        while (buffer := self._fitting(numel)) is None and len(self._reductions) >= UNDER_WAY:
            self.retire()
        if buffer is None:
            buffer = torch.empty(max(numel, least), dtype=self.dtype, device=self.device)
            self.nbytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def reducing(self, work: Work, then: Callable[[], None]) -> None:
        """A reduction is under way; `then` follows when it was waited for."""
        self._reductions.append((work, then))

    def retire(self) -> None:
        """Wait for the oldest reduction."""
        work, then = self._reductions.popleft()
        work.wait()
        then()

    def retire_all(self) -> None:
        while self._reductions:
            self.retire()

    def _fitting(self, numel: int) -> torch.Tensor | None:
        """The smallest free buffer that is long enough."""
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= numel]
        return self._free.pop(min(fitting, key=lambda i: self._free[i].numel())) if fitting else None
