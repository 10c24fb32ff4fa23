"""Whole logical tensors, one at a time: collected from the ranks of a run, or read from a checkpoint without
a model.

`TensorStream` and `StoredTensors` both have `entries`, the names, shapes and dtypes in advance, and then
yield the tensors, as `safetensors_folder.write_folder` needs them.

For each tensor in turn, every rank sends `TensorStream` the rectangles that it holds (pieces.py), and rank 0
copies them into place. Each rank holds its own state only, and rank 0 one whole tensor in addition, so the
model need not fit on any rank. The pieces are those of a checkpoint, so it works for any layout.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..mpu.collectives import all_gather_object
from ..mpu.group import Group
from ..mpu.host_reads import wait_for_work
from ..mpu.param_spec import Coordinates, Init, ParamSpec
from ..mpu.parameter_piece import ParameterPiece
from .load import explain_way_back, find_checkpoint
from .pieces import Piece, rectangle, views
from .safetensors_folder import TensorEntry

TAG = 0


class TensorStream:
    """The tensors formed by all ranks' pieces of one kind. Construction and iteration are collective.

    world     the ranks that hold the pieces
    device    on which tensors are sent: the device of the backend of `world`
    dtype_of  name → dtype to which the tensor is cast before it is sent; None: its own
    entries   names, shapes and dtypes of all tensors, in the order of iteration

    Raises CheckpointError unless the ranks together hold each element once.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        *,
        coordinates: Coordinates,
        world: Group,
        device: torch.device | str = "cpu",
        dtype_of: Callable[[str], torch.dtype] | None = None,
    ):
        self._world = world
        self._device = torch.device(device)
        self._views: dict[str, list] = {}
        here: dict[str, tuple] = {}
        # What this rank sends of each tensor: the shape of the whole, the dtype, and the rectangles.
        for piece in pieces:
            if not _sends(piece, coordinates):
                continue
            name = piece.spec.name
            shape = tuple(piece.spec.shape)
            dtype = dtype_of(name) if dtype_of else piece.tensor.dtype
            found = self._views.setdefault(name, [])
            found += views(piece, coordinates)
            chunks = [(view.offset, tuple(view.tensor.shape)) for view in found]
            here[name] = (shape, dtype, chunks)
        # All ranks know what every rank sends, so that no sizes travel with the tensors.
        self._sent_by_rank = all_gather_object(here, world)
        self.entries = _entries(self._sent_by_rank)
        self._entry_of = {entry.name: entry for entry in self.entries}

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        """Return the tensors in the order of `entries`; None on ranks other than 0."""
        return self.tensors([entry.name for entry in self.entries])

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor | None]:
        """Yield the tensors of these names; None on ranks other than 0.

        Collective: all ranks pass the same names and exhaust the iterator.
        """
        is_receiver = self._world.rank == 0
        for name in names:
            entry = self._entry_of[name]
            if is_receiver:
                yield self._receive(entry)
            else:
                self._send(entry)
                yield None

    def _send(self, entry: TensorEntry) -> None:
        """Send this rank's rectangles of a tensor to rank 0, one after the other."""
        world = self._world
        for view in self._views.get(entry.name, ()):
            cast = view.tensor.to(self._device, entry.dtype)
            message = cast.contiguous().view(-1)
            world.traffic.add("send", world.axes, world.size, message.nbytes)
            assert world.transport is not None  # a group of several ranks has one
            world.transport.isend(message, 0, TAG).wait()

    def _receive(self, entry: TensorEntry) -> torch.Tensor:
        """Return the whole tensor, on the CPU of rank 0."""
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        transport = self._world.transport
        # Rank 0 copies its own rectangles, and receives those of the others in their order.
        for view in self._views.get(entry.name, ()):
            target = rectangle(whole, view.offset, view.tensor.shape)
            target.copy_(view.tensor)
        for rank, sent in enumerate(self._sent_by_rank[1:], 1):
            if entry.name not in sent:
                continue
            _, _, chunks = sent[entry.name]
            assert transport is not None  # a group of several ranks has one
            for offset, sizes in chunks:
                target = rectangle(whole, offset, sizes)
                message = torch.empty(
                    target.numel(), dtype=entry.dtype, device=self._device
                )
                transport.irecv(message, rank, TAG).wait()
                wait_for_work(self._device, self._world)
                target.copy_(message.view(target.shape))
        return whole


def _sends(piece: Piece, coordinates: Coordinates) -> bool:
    """Return whether this rank is the first that holds the content: rank 0 then uses its own copy."""
    at, _ = coordinates.get(piece.spec.tensor_axis, (0, 1))
    is_split = piece.spec.tensor_split is not None
    is_first = piece.replica == 0 and (is_split or at == 0)
    return is_first and not piece.spec.tied_copy


def _entries(sent_by_rank: Sequence[dict]) -> list[TensorEntry]:
    """All tensors, rank by rank. Raises CheckpointError unless the ranks send every element once."""
    # A name's shape and dtype are those of the first rank that sends it.
    shapes: dict[str, tuple] = {}
    held: dict[str, int] = {}
    for sent in sent_by_rank:
        for name, (shape, dtype, chunks) in sent.items():
            numel = sum(torch.Size(sizes).numel() for _, sizes in chunks)
            shapes.setdefault(name, (shape, dtype))
            held[name] = held.get(name, 0) + numel
    # The rectangles of all ranks must have as many elements as the tensor.
    wrong = []
    for name, (shape, _) in shapes.items():
        numel = torch.Size(shape).numel()
        if held[name] != numel:
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"the ranks together do not hold each element once of {len(wrong)} tensors, "
            f"first {wrong[0]}."
        )
    return [TensorEntry(name, shape, dtype) for name, (shape, dtype) in shapes.items()]


class StoredTensors:
    """The tensors of some kinds ("weight", "exp_avg", …) of the checkpoint of `step`, by name.

    Raises CheckpointError when there is no such checkpoint, or when it is damaged.
    """

    def __init__(self, directory: str | os.PathLike, step: int, kinds: tuple[str, ...]):
        from .storage import Reader

        self._folder = Path(directory)
        self._step = step
        path = find_checkpoint(self._folder, step)
        with explain_way_back(self._folder, step):
            self._reader = Reader(path)
        self._kind_of: dict[str, str] = {}
        self._keys: list[tuple[str, str]] = []
        self.entries: list[TensorEntry] = []
        for key, stored in self._reader.tensors.items():
            kind, _, name = key.partition("/")
            if kind not in kinds:
                continue
            shape = tuple(stored.size)
            self._kind_of[name] = kind
            self._keys.append((kind, name))
            self.entries.append(TensorEntry(name, shape, stored.properties.dtype))

    def keys(self) -> list[tuple[str, str]]:
        """(kind, name) of each tensor."""
        return self._keys

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return the whole tensor, cast to the dtype of `entry`, which may differ from that of the checkpoint."""
        from .storage import Reading

        kind = self._kind_of[entry.name]
        with explain_way_back(self._folder, self._step):
            if (whole := self._reader.whole(f"{kind}/{entry.name}")) is not None:
                return whole.to(entry.dtype)
            numel = torch.Size(entry.shape).numel()
            flat = torch.empty(numel, dtype=entry.dtype)
            spec = ParamSpec(entry.name, entry.shape, Init("zeros"))
            piece = ParameterPiece(spec, flat, kind)
            Reading(self._reader, [piece], {}, exact=False).run()
        return flat.view(entry.shape)

    def read_all(self, entries: Sequence[TensorEntry]) -> Iterator[torch.Tensor]:
        """Return the tensors of `entries`, each read when the iterator reaches it."""
        return (self.read(entry) for entry in entries)
