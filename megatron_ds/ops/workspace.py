"""Memory in fp32 on the CPU that is written again and again, of each thread."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensor


class Workspace(threading.local):
    """Tensors for what lives no longer than the function that computes it, one for each role.

    They stay in the cache, as new ones would not. And new ones would lie between what layers keep for backward, and leave
    holes there that nothing else fits in: of a training step in bf16 with fp32 inside, a twentieth of the peak.
    Not for autograd: whoever writes to them does so without gradients.
    """

    def __init__(self):
        self._memory: dict[str, torch.Tensor | None] = {}

    def take(self, role: str, *shape: int) -> torch.Tensor:
        """A tensor of any content, good until the thread takes the role again: two that are alive at once have two roles."""
        memory, numel = self._memory.get(role), math.prod(shape)
        if memory is None or memory.numel() < numel:
            memory = self._memory[role] = None                      # the old one goes before the new one comes
            with torch.inference_mode(False):                       # what is made inside could not be written to outside
                memory = self._memory[role] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return memory[:numel].view(shape)

    @contextmanager
    def apart(self) -> Iterator[dict[str, torch.Tensor]]:
        """Within, nothing is taken of the memory held so far: {role: tensor} of what is taken instead, gone afterwards."""
        held, self._memory = self._memory, {}
        try:
            yield self._memory
        finally:
            self._memory = held


WORKSPACE = Workspace()


def has_memory(t: torch.Tensor) -> bool:
    """False for a tensor of the meta device and for a FakeTensor: they have shapes, dtypes and storages, and no values."""
    return not (t.is_meta or isinstance(t, FakeTensor))
