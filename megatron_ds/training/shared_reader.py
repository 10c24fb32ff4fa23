"""One reader for a tensor-parallel group: its first rank reads the batch and broadcasts it.

For disks that many ranks would overload, and for samples that are expensive to build. If files are mapped
from a fast disk, it is faster when each rank reads the batch itself.
"""

from dataclasses import replace

import torch

from ..data.batch import Batch
from ..data.loading.loader import Loader
from ..mpu.agree import on_one_rank
from ..mpu.collectives import broadcast_
from ..mpu.group import Group

READER = 0                                                  # position in the group


class SharedReader:
    """The interface of `Loader` for every rank of a tensor-parallel group. Batches are on `device`."""

    def __init__(self, loader: Loader, tp: Group, device: torch.device):
        self.loader, self.tp, self.device = loader, tp, device

    def batch(self, *where: object, training: bool = True) -> Batch:
        """As `Loader.batch`. Collective over the group: an exchange of shapes, then a broadcast per tensor.

        An error of the reading rank is raised on all ranks.
        """
        made = None

        def read() -> tuple[Batch, dict]:
            nonlocal made
            made = self.loader.batch(*where, training=training).to(self.device)
            tensors = made.tensors()
            return replace(made, **dict.fromkeys(tensors)), {name: _form(t) for name, t in tensors.items()}

        frame, forms = on_one_rank(self.tp, read, READER)
        tensors = {name: self._send(made and getattr(made, name), *form) for name, form in forms.items()}
        return replace(frame, **tensors)

    def close(self) -> None:
        """Stop the threads of the loader."""
        self.loader.close()

    def _send(self, tensor: torch.Tensor | None, shape: torch.Size, rows: int,
              dtype: torch.dtype) -> torch.Tensor:
        """Broadcast a tensor. A row that is expanded over all samples is sent once."""
        sent = torch.empty(rows, *shape[1:], dtype=dtype, device=self.device)
        if tensor is not None:
            sent.copy_(tensor[:rows])
        broadcast_(sent, self.tp, READER)
        return sent.expand(shape)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, int, torch.dtype]:
    return tensor.shape, 1 if tensor.stride(0) == 0 else tensor.shape[0], tensor.dtype
