"""`UnitMap`: where the units of compression lie in the flat buffer of a set, by block and by row.

A unit is a logical parameter. Each block of `ALIGN` elements belongs to one slot, and so to one unit. Rows
are runs of elements that are compressed only if one of them is not zero on some rank: a row of the vocabulary
without a token stays exactly zero, where a sign would move it. Padding is a row that never counts.

    flat buffer   |-------- w2 -------|pad|- b2 -|pad|-- padding --|
    rows          | 0  | 1  | 2  | 3  | 4 |  5   |        6        |

Only dimension 0 makes rows, and not of parameters of which tensor parallelism splits another dimension: of
these, a rank sees parts of rows. They are one row.

Vectors (biases, weights of norms) are not compressed, and count as padding. They are a small part of a
model, and elements of one differ by orders of magnitude: a bias of keys has no gradient but rounding, because
softmax does not depend on it, and the scale of the other elements of the same parameter would move it far.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...host.device_copies import on_device
from ...mpu.managed_parameter import spec_of
from ...mpu.param_spec import ParamSpec
from ...zero.layout import ALIGN, Layout


@dataclass(frozen=True)
class UnitMap:
    """The units of a set, in the order of layout.slots, on one device.

    block_unit   int64 [numel / ALIGN]: the slot of each block; of padding any
    row_lengths  int64 [rows], in elements; their sum is numel
    row_unit     int64 [rows]: the slot of each row
    is_padding   bool [rows]: never live, as they belong to no parameter, or to a vector
    """

    layout: Layout
    block_unit: torch.Tensor
    row_lengths: torch.Tensor
    row_unit: torch.Tensor
    is_padding: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows on this rank, padding included."""
        return len(self.row_lengths)

    def live_rows(self, y: torch.Tensor) -> torch.Tensor:
        """uint8 [rows]: 1 for rows of y [numel] with an element that is not zero."""
        largest = torch.segment_reduce(
            y.abs(), "max", lengths=self.row_lengths, unsafe=True
        )
        return ((largest > 0) & ~self.is_padding).to(torch.uint8)

    def live_elements(self, rows: torch.Tensor) -> torch.Tensor:
        """bool [numel] from flags of rows."""
        return torch.repeat_interleave(
            rows.bool(), self.row_lengths, output_size=self.layout.numel
        )

    def live_counts(self, rows: torch.Tensor) -> torch.Tensor:
        """float64 [slots]: elements of each unit on this rank in rows that are live."""
        counts = torch.zeros(
            len(self.layout.slots), dtype=torch.float64, device=rows.device
        )
        return counts.index_add_(0, self.row_unit, (self.row_lengths * rows).double())


def map_units(
    layout: Layout, parameters: Sequence[nn.Parameter], device: torch.device
) -> UnitMap:
    """parameters: in the order of layout.slots."""
    runs = list(_runs(layout, parameters))
    of = lambda values: torch.tensor(values, dtype=torch.int64)
    units = of([run.unit for run in runs])
    counts = of([run.rows for run in runs])
    lengths = of([run.length for run in runs])
    padding = of([run.is_padding for run in runs])
    blocks = torch.zeros(len(layout.slots), dtype=torch.int64)
    blocks.index_add_(0, units, counts * lengths)
    row_unit, row_lengths, is_padding = (
        values.repeat_interleave(counts) for values in (units, lengths, padding)
    )
    slots = torch.arange(len(layout.slots))
    of_blocks = slots.repeat_interleave(blocks // ALIGN)
    maps = (of_blocks, row_lengths, row_unit, is_padding.bool())
    return UnitMap(layout, *(on_device(numbers, device) for numbers in maps))


def count_rows(layout: Layout, parameters: Sequence[nn.Parameter]) -> int:
    """`UnitMap.num_rows`."""
    return sum(run.rows for run in _runs(layout, parameters))


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of one length, of one slot."""

    unit: int
    rows: int
    length: int
    is_padding: bool


def _runs(layout: Layout, parameters: Sequence[nn.Parameter]) -> Iterator[_Run]:
    stops = [slot.start for slot in layout.slots[1:]] + [layout.numel]
    for i, (slot, stop, p) in enumerate(
        zip(layout.slots, stops, parameters, strict=True)
    ):
        rows = p.shape[0] if has_rows(spec_of(p)) and slot.numel else 1
        yield _Run(i, rows, slot.numel // rows, is_vector(spec_of(p)))
        if stop > slot.stop:
            yield _Run(i, 1, stop - slot.stop, True)


def has_rows(spec: ParamSpec) -> bool:
    """Return whether the rows of a parameter are compressed only where they are not zero."""
    return len(spec.shape) > 1 and all(split.dim == 0 for split in spec.splits)


def is_vector(spec: ParamSpec) -> bool:
    """Return whether a parameter is exchanged in full precision."""
    return len(spec.shape) < 2


def to_shards(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[n] in the order of the buffer → [shards, n / shards] in that of shards. values: of every k-th element,
    for a k that divides ALIGN."""
    k = layout.numel // len(values)
    parts = [
        values[bucket.start // k : bucket.stop // k].view(layout.shards, -1)
        for bucket in layout.buckets
    ]
    return torch.cat(parts, dim=1)


def from_shards(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the inverse of `to_shards`."""
    k = layout.numel // values.numel()
    sizes = [
        (bucket.stop - bucket.start) // k // layout.shards for bucket in layout.buckets
    ]
    parts = values.view(layout.shards, -1).split(sizes, dim=1)
    return torch.cat([part.reshape(-1) for part in parts])
