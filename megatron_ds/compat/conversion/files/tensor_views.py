"""Stored tensors made of others: parts, joined boxes, other shapes. Nothing is read until they are read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ....checkpoint.cover import covers_once
from ....errors import CheckpointError
from .stored_tensor import StoredTensor


@dataclass(frozen=True)
class StoredBox:
    """A rectangle of a larger tensor.

    offset  its corner there, a number for each dimension
    """

    offset: tuple[int, ...]
    tensor: StoredTensor


def changed(
    tensor: StoredTensor,
    shape: Sequence[int],
    function: Callable[[torch.Tensor], torch.Tensor],
) -> StoredTensor:
    """Return `function` of the tensor, which has this shape. It is computed when the tensor is read."""

    def read() -> torch.Tensor:
        return function(tensor.read())

    return StoredTensor(tuple(shape), tensor.dtype, read, tensor.place)


def first_rows(tensor: StoredTensor, rows: int) -> StoredTensor:
    """Return the first `rows` along dimension 0."""
    if tensor.shape[0] == rows:
        return tensor
    shape = (rows, *tensor.shape[1:])
    return changed(tensor, shape, lambda whole: whole[:rows])


def interval(tensor: StoredTensor, start: int, shape: Sequence[int]) -> StoredTensor:
    """Return the elements of a flat tensor from `start` on, in this shape."""
    stop = start + math.prod(shape)
    return changed(tensor, shape, lambda flat: flat[start:stop].view(tuple(shape)))


def assembled(
    shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[StoredBox], place: str
) -> StoredTensor:
    """Return the tensor that the boxes form. Raises CheckpointError unless they hold each element once."""
    # The boxes must be inside the tensor and cover each element once.
    shape = tuple(shape)
    chunks = [
        SimpleNamespace(offsets=box.offset, sizes=box.tensor.shape) for box in boxes
    ]
    inside = all(_is_inside(chunk.offsets, chunk.sizes, shape) for chunk in chunks)
    if not inside or not covers_once(shape, chunks):
        held = sum(math.prod(chunk.sizes) for chunk in chunks)
        wanted = math.prod(shape)
        raise CheckpointError(
            f"{place}: its {len(boxes)} parts overlap or leave holes: they have {held} "
            f"elements, and its shape {list(shape)} has {wanted}."
        )
    # A single box is the tensor itself and needs no copy.
    if len(boxes) == 1:
        return boxes[0].tensor

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for box in boxes:
            # The rectangle from the box's corner on, along each dimension.
            corners = zip(box.offset, box.tensor.shape)
            region = tuple(slice(at, at + n) for at, n in corners)
            target = whole[region]
            target.copy_(box.tensor.read())
        return whole

    return StoredTensor(shape, dtype, read, place)


def _is_inside(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> bool:
    """Return whether a rectangle lies in a tensor of this shape."""
    if len(sizes) != len(shape):
        return False
    for at, n, total in zip(offsets, sizes, shape):
        end = at + n
        if not 0 <= at <= end <= total:
            return False
    return True


def joined(parts: Sequence[StoredTensor], dim: int, place: str) -> StoredTensor:
    """Return the parts one after the other along `dim`. place: of the result, for messages.

    Raises CheckpointError if other dimensions differ.
    """
    # Each part begins where the one before it ends.
    boxes = []
    at = 0
    for part in parts:
        offset = [0] * len(part.shape)
        offset[dim] = at
        boxes.append(StoredBox(tuple(offset), part))
        at += part.shape[dim]
    # Other dimensions are those of the first part.
    first = parts[0]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return assembled(shape, first.dtype, boxes, place)


def stacked(parts: Sequence[StoredTensor], place: str) -> StoredTensor:
    """Return the parts along a new first dimension."""
    slices = []
    for part in parts:
        shape = (1, *part.shape)
        slices.append(changed(part, shape, lambda whole: whole[None]))
    return joined(slices, 0, place)


def merged_over_ranks(
    parts: Sequence[StoredTensor], dim: int | None, blocks: int, place: str
) -> StoredTensor:
    """Return the logical tensor of tensor-parallel ranks' parts.

    dim     that is split; None: the ranks hold copies, which are compared when they are read
    blocks  pieces packed along `dim`, each split by itself: 2 for [gate; up]
    """
    if dim is None:
        return _compared(parts, place)
    if len(parts) == 1:
        return parts[0]
    # All parts need the dimension, and rows that the blocks divide.
    ndims = {len(part.shape) for part in parts}
    if len(ndims) > 1 or min(ndims) <= dim:
        shapes = sorted({part.shape for part in parts})
        raise CheckpointError(
            f"{place}: ranks hold the shapes {shapes}, "
            f"which are not parts along dimension {dim} of one tensor."
        )
    if any(part.shape[dim] % blocks for part in parts):
        raise CheckpointError(
            f"{place}: {parts[0].shape[dim]} rows are not {blocks} equal blocks."
        )
    # All ranks' pieces of a block come before those of the next block.
    pieces: list[StoredTensor] = []
    for block in range(blocks):
        pieces += [_block(part, dim, block, blocks) for part in parts]
    return joined(pieces, dim, place)


def _block(part: StoredTensor, dim: int, block: int, blocks: int) -> StoredTensor:
    """Return one of the equal blocks of a rank's part along `dim`."""
    size = part.shape[dim] // blocks
    start = block * size
    shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
    return changed(part, shape, lambda whole: whole.narrow(dim, start, size))


def _compared(parts: Sequence[StoredTensor], place: str) -> StoredTensor:
    """Return the first of equal copies. Raises CheckpointError, now or when it is read, if they differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        raise CheckpointError(
            f"{place}: the ranks hold copies of different shapes, "
            f"{list(first.shape)} and others. The files are not of one save."
        )

    def read() -> torch.Tensor:
        values = first.read()
        for other in parts[1:]:
            if not torch.equal(values, other.read()):
                raise CheckpointError(
                    f"{place} differs between {first.place} and {other.place}, which "
                    "hold copies of it. The files are not of one save; take all of them "
                    "from one folder."
                )
        return values

    return StoredTensor(first.shape, first.dtype, read, place)
