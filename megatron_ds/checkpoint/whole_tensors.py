"""`TensorStream`: whole logical tensors out of the pieces that ranks hold, one after the other, on rank 0.

For each tensor in turn every rank sends the rectangles that it holds (pieces.py) and rank 0 lays them into place. Nobody ever
holds more than its own state, and rank 0 one tensor besides: a model needs to fit nowhere. It works on what a checkpoint is
made of, so for any layout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..errors import CheckpointError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group
from ..mpu.param_spec import Coordinates
from .pieces import Piece, views
from .safetensors_folder import TensorEntry

TAG = 0


class TensorStream:
    """Of all ranks' pieces of one kind of state. Making one is collective over `world`, and so is iterating.

    device    on which tensors travel: the one that `world` speaks with
    dtype_of  name → what the tensor is cast to before it travels; None: as it is
    """

    def __init__(self, pieces: Iterable[Piece], *, coordinates: Coordinates, world: Group,
                 device: torch.device | str = "cpu", dtype_of: Callable[[str], torch.dtype] | None = None):
        self._world, self._device = world, device
        self._views: dict[str, list] = {}
        here: dict[str, tuple] = {}
        for piece in pieces:
            if _sends(piece, coordinates):
                name = piece.spec.name
                found = self._views.setdefault(name, [])
                found += views(piece, coordinates)
                dtype = dtype_of(name) if dtype_of else piece.tensor.dtype
                here[name] = (tuple(piece.spec.shape), dtype, [(v.offset, tuple(v.tensor.shape)) for v in found])
        self._there = all_gather_object(here, world)            # what each rank will send
        self.entries = _entries(self._there)
        self._entry_of = {entry.name: entry for entry in self.entries}

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """The tensors in the order of `entries`; on ranks other than 0 they are None."""
        return self.tensors([entry.name for entry in self.entries])

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor | None]:
        """These tensors; all ranks must ask for the same ones, and take them all."""
        for name in names:
            yield self._receive(self._entry_of[name]) if self._world.rank == 0 else self._send(self._entry_of[name])

    def _send(self, entry: TensorEntry) -> None:
        for view in self._views.get(entry.name, ()):
            message = view.tensor.to(self._device, entry.dtype).contiguous().view(-1)
            self._world.traffic.add("send", self._world.axes, self._world.size, message.nbytes)
            self._world.transport.isend(message, 0, TAG).wait()

    def _receive(self, entry: TensorEntry) -> torch.Tensor:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for view in self._views.get(entry.name, ()):
            _place(whole, view.offset, view.tensor.shape).copy_(view.tensor)
        for rank, there in enumerate(self._there[1:], 1):
            for offset, sizes in there.get(entry.name, ((), None, ()))[2]:
                target = _place(whole, offset, sizes)
                message = torch.empty(target.numel(), dtype=entry.dtype, device=self._device)
                self._world.transport.irecv(message, rank, TAG).wait()
                target.copy_(message.view(target.shape))
        return whole


def _sends(piece: Piece, coordinates: Coordinates) -> bool:
    """Of several holders of the same content, the first: rank 0 then uses its own where every rank holds the whole."""
    tp_rank, _ = coordinates.get("tp", (0, 1))
    return piece.replica == 0 and not piece.spec.tied_copy and (piece.spec.is_split_over("tp") or tp_rank == 0)


def _entries(there: Sequence[dict]) -> list[TensorEntry]:
    """Every tensor that anybody holds, rank by rank. Raises CheckpointError unless each is whole."""
    shapes: dict[str, tuple] = {}
    held: dict[str, int] = {}
    for rank in there:
        for name, (shape, dtype, chunks) in rank.items():
            shapes.setdefault(name, (shape, dtype))
            held[name] = held.get(name, 0) + sum(torch.Size(sizes).numel() for _, sizes in chunks)
    wrong = [name for name, (shape, _) in shapes.items() if held[name] != torch.Size(shape).numel()]
    if wrong:
        raise CheckpointError(f"the ranks together do not hold each element once of {len(wrong)} tensors, first {wrong[0]}.")
    return [TensorEntry(name, shape, dtype) for name, (shape, dtype) in shapes.items()]


def _place(whole: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(at, at + n) for at, n in zip(offset, sizes))]
