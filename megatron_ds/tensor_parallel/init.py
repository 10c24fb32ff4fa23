"""Initial weights that are the same bits for every layout.

The logical tensor is drawn in blocks of BLOCK elements, row-major, each from its own generator, keyed by
(seed, name, block). A rank draws the blocks that overlap its shard, a few at a time, and copies its boxes out
of them; padding is zero. So the values depend only on the seed and on the parameter's name and true shape.

    logical   |--- block 0 ---|--- block 1 ---|--- block 2 ---|- 3 -|
    rank 1                 |---- its rows ----|                          draws blocks 0 and 1
"""

import math
from collections.abc import Iterable

import torch

from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import Coordinates, ParamSpec
from ..ops.keyed_random import generator_of

BLOCK = 1 << 16
CONSTANTS = {"zeros": 0.0, "ones": 1.0}


def initialize(
    parameters: Iterable[torch.nn.Parameter], seed: int, coordinates: Coordinates
) -> None:
    """Fill each parameter, the shard of the rank at `coordinates`, as its `.spec.init` describes.

    coordinates: {axis: (position, size)} of the rank
    """
    # Each parameter is one interval.
    for parameter in parameters:
        flat = parameter.detach().view(-1)
        initialize_interval(flat, spec_of(parameter), 0, seed, coordinates)


@torch.no_grad()
def initialize_interval(
    out: torch.Tensor, spec: ParamSpec, start: int, seed: int, coordinates: Coordinates
) -> None:
    """Fill flat `out` with elements [start, start + len(out)) of the flattened shard, as `initialize` does.
    Padding belongs to no box of the shard and is zero.

    Draws a run of rows at a time, so the shard never exists as a whole.
    """
    # The rows that the interval touches, about a block of elements at a time.
    shape = _shape_of_shard(spec, coordinates)
    row = math.prod(shape[1:])
    stop = start + out.numel()
    first_row = start // row
    end_row = -(-stop // row)
    rows_at_once = max(1, BLOCK // row)
    blocks = _Blocks(spec, seed)
    for first in range(first_row, end_row, rows_at_once):
        rows = min(rows_at_once, shape[0] - first)
        values = _rows(spec, blocks, first, rows, coordinates).view(-1)
        # The elements that these rows and the interval share.
        begin = first * row
        low = max(start, begin)
        high = min(stop, begin + rows * row)
        drawn = values[low - begin : high - begin]
        target = out[low - start : high - start]
        target.copy_(drawn)


def _shape_of_shard(spec: ParamSpec, coordinates: Coordinates) -> tuple[int, ...]:
    """Return the shape of this rank's part, with padding."""
    sizes = {axis: size for axis, (_, size) in coordinates.items()}
    # A scalar is a row of one element.
    return spec.local_shape(sizes) or (1,)


def _rows(
    spec: ParamSpec, blocks: "_Blocks", first: int, rows: int, coordinates: Coordinates
) -> torch.Tensor:
    """Rows [first, first + rows) of dimension 0 of the shard, fp32. Rows of padding are zero."""
    # Each box is a part of the logical tensor that the shard has.
    shape = _shape_of_shard(spec, coordinates)
    values = torch.zeros(rows, *shape[1:])
    for box in spec.boxes(coordinates):
        # Corners of the box in the shard and in the logical tensor; a scalar is a row of one element.
        local = box.local or (0,)
        logical = box.logical or (0,)
        sizes = box.sizes or (1,)
        # Rows [a, b) of the shard that the box has.
        a = max(first, local[0])
        b = min(first + rows, local[0] + sizes[0])
        # Nothing, where the box begins later or ends before.
        if a >= b:
            continue
        count = b - a
        extent = (count, *sizes[1:])
        corner = (a - first, *local[1:])
        target = _slice(values, corner, extent)
        # Constants need no blocks.
        constant = CONSTANTS.get(spec.init.kind)
        if constant is not None:
            target.fill_(constant)
            continue
        # The same rows of the logical tensor.
        above = logical[0] + a - local[0]
        drawn = blocks.rows(above, count)
        corner = (0, *logical[1:])
        drawn = _slice(drawn, corner, extent)
        target.copy_(drawn)
    return values


class _Blocks:
    """Rows of the logical tensor. Keeps the last block, in which the next rows begin.

    last  (number of the block, its elements)
    """

    def __init__(self, spec: ParamSpec, seed: int):
        self.spec = spec
        self.seed = seed
        self.last = (-1, torch.empty(0))

    def rows(self, first: int, count: int) -> torch.Tensor:
        """`count` rows of dimension 0 of the logical tensor."""
        shape = self.spec.shape[1:]
        row = math.prod(shape)
        start = first * row
        stop = start + count * row
        drawn = self._interval(start, stop)
        return drawn.view(count, *shape)

    def _interval(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened logical tensor."""
        # A part of each block that overlaps.
        pieces = []
        first = start // BLOCK
        last = (stop - 1) // BLOCK
        for index in range(first, last + 1):
            base = index * BLOCK
            block = self._block(index)
            low = max(start - base, 0)
            high = stop - base
            pieces.append(block[low:high])
        return torch.cat(pieces)

    def _block(self, index: int) -> torch.Tensor:
        """Return a block of the flattened logical tensor; the last one may be shorter."""
        if self.last[0] != index:
            begin = index * BLOCK
            numel = min(BLOCK, self.spec.numel - begin)
            generator = generator_of(self.seed, self.spec.name, index)
            drawn = torch.empty(numel)
            init = self.spec.init
            if init.draw is None:
                drawn.normal_(std=init.std, generator=generator)
            else:
                init.draw(drawn, generator)
            self.last = (index, drawn)
        return self.last[1]


def _slice(
    tensor: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]
) -> torch.Tensor:
    """Return the rectangle from a corner on, as a view."""
    region = tuple(slice(a, a + n) for a, n in zip(start, sizes))
    return tensor[region]
