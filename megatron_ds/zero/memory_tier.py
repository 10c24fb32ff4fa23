"""The offload tier in memory, `MemoryTier`, and `Buffers` for state on its way between a tier and the host."""

from collections.abc import Sequence

import torch

from ..host.large_pages import aligned_empty, huge_page_zeros
from ..host.page_locked import page_locked
from .arrays import Array, Tier


class MemoryTier(Tier):
    """Memory of `device`. page_locked: host memory from which copies to a GPU overlap with kernels."""

    def __init__(self, device: torch.device, page_locked: bool = False):
        self.device = device
        self._page_locked = page_locked
        self.is_plain = device.type == "cpu" and not page_locked

    def arrays(self, sizes: Sequence[int], dtype: torch.dtype) -> Sequence[Array]:
        numel = sum(sizes)
        zeros = (
            page_locked(numel, dtype)
            if self._page_locked
            else huge_page_zeros(numel, dtype=dtype, device=self.device)
        )
        return [Array(part) for part in zeros.split(list(sizes))]


class Buffers:
    """Host memory for state in transit, by name; kept from one step to the next."""

    def __init__(self, page_locked: bool):
        self._page_locked = page_locked
        self._by_name: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._by_name.values())

    def get(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `numel` elements with undefined contents, at the start of a page."""
        held = self._by_name.get(name)
        if held is None or held.numel() < numel:
            held = self._by_name[name] = _host_memory(numel, dtype, self._page_locked)
        return held[:numel]


def _host_memory(numel: int, dtype: torch.dtype, is_locked: bool) -> torch.Tensor:
    """Memory with undefined contents, at the start of a page."""
    return page_locked(numel, dtype) if is_locked else aligned_empty(numel, dtype)
