"""From an interval of a local shard to boxes of the logical tensor. Pure; standard library only.

A checkpoint holds logical tensors: true shape, no padding, names that do not depend on the layout. A rank
holds an interval [start, stop) of a flattened shard (ZeRO cuts flat buffers without regard to rows). It is
described in two steps: the interval becomes rectangles of the shard, and each is moved to the place in the
logical tensor that it mirrors.

    shard [4, 5], interval [3, 16)          . . . H H      head   1 x 2
                                            B B B B B      body   2 x 5
                                            B B B B B
                                            T . . . .      tail   1 x 1

An interval of a row-major tensor of n dimensions is at most 2n - 1 rectangles, and so is its intersection
with each box of `ParamSpec.boxes`.
"""

import math
from collections.abc import Iterator, Sequence

from ..mpu.param_spec import Box, Coordinates, ParamSpec

Corner = tuple[int, ...]


def logical_boxes(spec: ParamSpec, coordinates: Coordinates, start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that elements [start, stop) of the flattened shard of the rank at `coordinates` mirror.

    Each element of the interval that is no padding lies in exactly one box. `Box.local` counts in the shard,
    not in the interval: the first element of a box is element `flat_offset(shape of the shard, box.local) -
    start` there.
    """
    mirrors = spec.boxes(coordinates)
    pieces = tuple(interval_boxes(shard_shape(spec, coordinates), start, stop))
    met = (_intersect(corner, sizes, mirror) for mirror in mirrors for corner, sizes in pieces)
    return tuple(box for box in met if box is not None)


def shard_shape(spec: ParamSpec, coordinates: Coordinates) -> tuple[int, ...]:
    """Shape of the shard of the rank at `coordinates`."""
    return spec.local_shape({axis: size for axis, (_, size) in coordinates.items()})


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Corner, Corner]]:
    """(corner, sizes) of the rectangles of the interval [start, stop) of a flattened tensor, in its order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row           # rows first .. last are whole
    if first > last:                                      # begins and ends inside one row
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


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[d + 1:]) for d in range(len(shape)))


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Corner, Corner]]:
    for corner, sizes in interval_boxes(shape[1:], start, stop):
        yield (index, *corner), (1, *sizes)


def _intersect(corner: Corner, sizes: Corner, mirror: Box) -> Box | None:
    low = tuple(max(a, b) for a, b in zip(corner, mirror.local))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(corner, sizes, mirror.local, mirror.sizes))
    if any(a >= b for a, b in zip(low, high)):
        return None
    logical = tuple(at + a - b for at, a, b in zip(mirror.logical, low, mirror.local))
    return Box(low, logical, tuple(b - a for a, b in zip(low, high)))
