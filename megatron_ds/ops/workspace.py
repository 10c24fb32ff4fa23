"""Memory of a thread for fp32 intermediates on the CPU, and whether a tensor has memory at all."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import FakeTensor


class Workspace(threading.local):
    """Tensors for intermediates that are not needed after the function that computes them, one for each role.

    Reused memory stays in the CPU's cache. New tensors would be allocated between those that layers keep for
    backward and leave holes that nothing else fits into: a twentieth of the peak of a training step in bf16
    with fp32 products. Not for autograd: write to them without gradients.
    """

    def __init__(self):
        self._memory: dict[str, torch.Tensor | None] = {}

    def take(self, role: str, *shape: int) -> torch.Tensor:
        """An uninitialised tensor, valid until the thread takes the same role again."""
        memory, numel = self._memory.get(role), math.prod(shape)
        if memory is None or memory.numel() < numel:
            memory = self._memory[role] = None      # free the old one before allocating
            with torch.inference_mode(False):        # else it could not be written to elsewhere
                memory = self._memory[role] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return memory[:numel].view(shape)

    @contextmanager
    def apart(self) -> Iterator[dict[str, torch.Tensor]]:
        """Use other memory within the context: {role: tensor}, freed at its end."""
        held, self._memory = self._memory, {}
        try:
            yield self._memory
        finally:
            self._memory = held


WORKSPACE = Workspace()


def has_memory(t: torch.Tensor) -> bool:
    """False for a tensor of the meta device and for a FakeTensor, which have shapes and dtypes but no
    values.
    """
    return not (t.is_meta or isinstance(t, FakeTensor))
