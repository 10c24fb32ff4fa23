"""Pieces of training state: where each lies in the logical tensors of a checkpoint, and which rank writes it.

A checkpoint holds logical tensors: true shape, no padding, names that do not depend on the layout. A *piece*
is an interval [start, stop) of a flattened local shard, since ZeRO cuts flat buffers without regard to rows.
It becomes rectangles of the shard, each of which `ParamSpec.boxes` moves to its place in the logical tensor.

    shard [4, 5], interval [3, 16)          . . . H H      head   1 x 2
                                            B B B B B      body   2 x 5
                                            B B B B B
                                            T . . . .      tail   1 x 1

An interval of a row-major tensor of n dimensions is at most 2n - 1 rectangles, and so is its intersection
with one box of `ParamSpec.boxes`.

The tensor of a piece is called "kind/name" in the checkpoint: "weight/decoder.final_layernorm.weight",
"exp_avg/output_layer.weight". Two kinds of ranks hold the same content: data-parallel ranks (the axes in
`ParamSpec.reduced_over`), which a piece counts itself (`replica` of `replicas`), and tensor-parallel ranks of
a parameter that is not split over "tp".
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..mpu.param_spec import Box, Coordinates, ParamSpec

WEIGHT = "weight"
Corner = tuple[int, ...]


class Piece(Protocol):
    """Elements [start, stop) of the flattened shard of one parameter's weight, first moment, ...

    Anything with these attributes is a piece, such as ZeRO's `StatePiece`.

    tensor    flat, of stop - start elements, contiguous; read when saving, written into when loading
    replica   position of this rank among the `replicas` data-parallel ranks that hold the same content
    """

    @property
    def spec(self) -> ParamSpec: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def replica(self) -> int: ...
    @property
    def replicas(self) -> int: ...


@dataclass(frozen=True)
class MadePiece:
    """A piece whose values are made when they are written, so that a checkpoint may exceed the memory.

    tensor  flat, on the meta device: number of elements and dtype
    make    returns the values. The piece is one rectangle of the logical tensor, and `make` has its shape.
            Floating-point values are cast to the dtype of `tensor` while they are written
    """

    spec: ParamSpec
    tensor: torch.Tensor
    make: Callable[[], torch.Tensor]
    start: int = 0
    kind: str = WEIGHT
    replica: int = 0
    replicas: int = 1

    @property
    def stop(self) -> int:
        """End of the piece in the flattened tensor."""
        return self.start + self.tensor.numel()


@dataclass(frozen=True)
class View:
    """A rectangle of a piece: its corner in the logical tensor, and the memory with its values."""

    offset: Corner
    tensor: torch.Tensor


def key(piece: Piece) -> str:
    """Name of the piece's tensor in the checkpoint."""
    return f"{piece.kind}/{piece.spec.name}"


def views(piece: Piece, coordinates: Coordinates) -> list[View]:
    """Return the rectangles of a piece as views of its memory. No view contains padding."""
    tensor = piece.tensor
    assert (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.numel() == piece.stop - piece.start
    ), (
        f"{key(piece)}: elements [{piece.start}, {piece.stop}) in a tensor of shape {list(tensor.shape)}"
    )
    shape = shard_shape(piece.spec, coordinates)
    boxes = logical_boxes(piece.spec, coordinates, piece.start, piece.stop)
    return [View(box.logical, _view(piece, shape, box)) for box in boxes]


def values_of(piece: Piece, view: View) -> torch.Tensor:
    """Return the values of one of the `views` of a piece, not cast yet. Those of a `MadePiece` are made now."""
    if not isinstance(piece, MadePiece):
        return view.tensor
    made = piece.make()
    dtype = view.tensor.dtype
    is_alike = (
        made.dtype == dtype or made.is_floating_point() and dtype.is_floating_point
    )
    assert made.shape == view.tensor.shape and is_alike, (
        f"{key(piece)}: made {made.dtype} {list(made.shape)}, not {view.tensor.dtype} "
        f"{list(view.tensor.shape)}"
    )
    return made


def _view(piece: Piece, shape: Corner, box: Box) -> torch.Tensor:
    """Return the box in the piece's memory, with the strides of the shard. It may be non-contiguous there."""
    tensor = piece.tensor.detach()
    first = flat_offset(shape, box.local) - piece.start
    return tensor.as_strided(
        box.sizes, row_major_strides(shape), tensor.storage_offset() + first
    )


def rectangle(
    tensor: torch.Tensor, offset: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a rectangle of a tensor as a view."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(offset, sizes))]


def written_here(pieces: Iterable[Piece], coordinates: Coordinates) -> list[Piece]:
    """Return the pieces that this rank writes. Exactly one of the ranks that hold the same content writes it.

    A copy of a tied parameter has the original's name; only the original is written. The writer among
    replicas follows from a hash of the name: ranks agree without communication and share the work.
    """
    return [p for p in pieces if not p.spec.tied_copy and _is_writer(p, coordinates)]


def _is_writer(piece: Piece, coordinates: Coordinates) -> bool:
    turn, replica = divmod(zlib.crc32(key(piece).encode()), piece.replicas)
    at, size = coordinates.get(piece.spec.tensor_axis, (0, 1))
    return replica == piece.replica and (
        piece.spec.tensor_split is not None or turn % size == at
    )


# ---- From an interval of a local shard to boxes of the logical tensor.


def logical_boxes(
    spec: ParamSpec, coordinates: Coordinates, start: int, stop: int
) -> tuple[Box, ...]:
    """Return the boxes of the logical tensor that hold elements [start, stop) of the flattened shard.

    Each element of the interval that is not padding lies in exactly one box. `Box.local` counts in the shard,
    not in the interval.
    """
    mirrors = spec.boxes(coordinates)
    rectangles = tuple(interval_boxes(shard_shape(spec, coordinates), start, stop))
    met = []
    for mirror in mirrors:
        for corner, sizes in rectangles:
            box = _intersect(corner, sizes, mirror)
            if box is not None:
                met.append(box)
    return tuple(met)


def shard_shape(spec: ParamSpec, coordinates: Coordinates) -> Corner:
    """Shape of the shard of the rank at `coordinates`."""
    return spec.local_shape({axis: size for axis, (_, size) in coordinates.items()})


def interval_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[Corner, Corner]]:
    """(corner, sizes) of the rectangles of the flat interval [start, stop) of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    # rows first .. last are whole
    first = -(-start // row)
    last = stop // row
    if first > last:  # begins and ends inside one row
        yield from _in_row(last, shape, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(last, shape, 0, stop - last * row)


def flat_offset(shape: Sequence[int], corner: Sequence[int]) -> int:
    """Index of the element at `corner` in the flattened row-major tensor."""
    return sum(at * stride for at, stride in zip(corner, row_major_strides(shape)))


def row_major_strides(shape: Sequence[int]) -> Corner:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _in_row(
    index: int, shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[Corner, Corner]]:
    for corner, sizes in interval_boxes(shape[1:], start, stop):
        yield (index, *corner), (1, *sizes)


def _intersect(corner: Corner, sizes: Corner, mirror: Box) -> Box | None:
    low = tuple(max(a, b) for a, b in zip(corner, mirror.local))
    high = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(corner, sizes, mirror.local, mirror.sizes)
    )
    if any(a >= b for a, b in zip(low, high)):
        return None
    logical = tuple(at + a - b for at, a, b in zip(mirror.logical, low, mirror.local))
    return Box(low, logical, tuple(b - a for a, b in zip(low, high)))
