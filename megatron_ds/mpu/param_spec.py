"""`ParamSpec`: the description of a parameter, and the boxes that its shards consist of.

Layers write the spec (`parameter.spec`); initial weights, ZeRO, the gradient norm, the reduction of tied
weights and the checkpoint read it. These rooms share nothing else about a parameter. Standard library only.

Terms:  a *logical* tensor is the parameter as one process would hold it: true shape, no padding, global name.
        A *split* cuts one dimension of it over one mesh axis; several splits cut several dimensions.
        A *box* is a rectangle of a local tensor, with the rectangle of the logical tensor that it mirrors.

    logical fc1 of a gated MLP, [2f, h]                stacked experts, [4, f, h]
    Split("tp", 0, parts=2), two ranks                 Split("ep", 0), Split("etp", 1), two ranks on each axis

    tp 0    |-- gate 0..f/2 --|-- up 0..f/2 --|                  etp 0              etp 1
    tp 1    |-- gate f/2..f --|-- up f/2..f --|         ep 0     [0:2, 0:f/2, :]    [0:2, f/2:f, :]
                                                        ep 1     [2:4, 0:f/2, :]    [2:4, f/2:f, :]
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LayoutError

Coordinates = Mapping[str, tuple[int, int]]
"""axis → (position of a rank on it, size of the axis); an absent axis has size 1. See `Mesh.coordinates`."""

DATA_AXES = ("dp", "cp")
EXPERT_DATA_AXES = ("edp",)
TENSOR_AXES = ("tp", "etp")
# The axes that the readers of specs handle.
SUPPORTED = {
    "splits": ("tp", "ep", "etp"),
    "partial_over": ("tp", "etp"),
    "distinct_over": ("ep",),
}


@dataclass(frozen=True, slots=True)
class Init:
    """How the logical tensor is filled: kind "normal" (mean 0, `std`), "zeros", "ones" or "drawn".

    draw  of "drawn": (flat fp32 tensor on the CPU, its generator) fills the tensor, each element alike
    """

    kind: str
    std: float = 0.0
    draw: Callable[[Any, Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its corner in the local tensor, its corner in the logical one, and its sizes."""

    local: tuple[int, ...]
    logical: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension, cut evenly over the ranks of one mesh axis.

    parts   pieces packed along `dim`, each cut by itself (2 for [gate; up])
    padded  size of `dim` that the ranks hold together, where it exceeds the logical size (vocabulary padding)
    """

    axis: str
    dim: int
    parts: int = 1
    padded: int | None = None


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices that a parameter consists of, for optimizers whose update is that of whole matrices.

    The last two dimensions are rows and columns, leading ones count matrices (experts). The rows of several
    matrices may be packed by groups, as those of queries, keys and values:

        groups=2, parts=(3 d, d, d)      | Q Q Q K V | Q Q Q K V |       matrices [6 d, h], [2 d, h], [2 d, h]

    groups, parts  the rows are `groups` runs of `parts`; a matrix has the rows of one part in all groups.
                   Without parts all rows are one matrix
    head           rows of a head of attention; None: the rows are not those of heads
    """

    groups: int = 1
    parts: tuple[int, ...] = ()
    head: int | None = None

    def sizes(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each matrix of a tensor of this shape, without leading dimensions."""
        *_, rows, columns = shape
        if not self.parts:
            return ((rows, columns),)
        return tuple((self.groups * of_part, columns) for of_part in self.parts)

    def cost(self, shape: tuple[int, ...]) -> int:
        """Multiplications of a product of all matrices with their transposes, as a measure of work."""
        return math.prod(shape[:-2]) * sum(
            o * i * min(o, i) for o, i in self.sizes(shape)
        )


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter's description. Raises LayoutError for splits that contradict each other or the shape.

    name           global and unique; does not depend on the pipeline cut
    shape          of the logical tensor
    init           how the logical tensor is filled
    splits         the dimensions that are cut, each over a mesh axis of its own
    partial_over   axes over which the local gradient is a partial sum, besides those of `reduced_over`: "tp"
                   where the parameter is applied to a slice of the sequence, "etp" to a part of an expert
    tied           key shared by all holders of one logical parameter on several pipeline stages (tied
                   embeddings)
    tied_copy      True on every holder but the first: not counted in norms, not saved
    decay          weight decay applies
    is_vocabulary  its rows are tokens: the weight of a word embedding or an output layer
    distinct_over  axes along which the other ranks hold other parameters, not shards of this one: "ep" for
                   one expert of a list of experts
    matrices       what the weight of a hidden linear layer consists of; None: not such a weight, but a
                   vector, an embedding, an output layer, a router
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ()
    tied: str | None = None
    tied_copy: bool = False
    decay: bool = True
    distinct_over: tuple[str, ...] = ()
    is_vocabulary: bool = False
    matrices: Matrices | None = None

    def __post_init__(self):
        # Each field accepts its own axes, and an axis occurs once in all of them.
        named = {
            "splits": tuple(split.axis for split in self.splits),
            "partial_over": self.partial_over,
            "distinct_over": self.distinct_over,
        }
        for field, axes in named.items():
            if odd := [axis for axis in axes if axis not in SUPPORTED[field]]:
                raise LayoutError(
                    f"{self.name}: {field} names the axis {odd[0]!r}. Supported: "
                    f"{SUPPORTED[field]}."
                )
        if len(set(all_axes := sum(named.values(), ()))) < len(all_axes):
            raise LayoutError(
                f"{self.name}: an axis is named more than once in {named}. Ranks along an axis "
                "hold shards, or whole parameters with partial gradients, or parameters of "
                "their own: name each axis once."
            )
        # Splits must divide the shape, and packed matrices its rows.
        for split in self.splits:
            self._check(split)
        packed = self.matrices is not None and self.matrices.groups * sum(
            self.matrices.parts
        )
        if self.matrices is not None and (
            len(self.shape) < 2 or packed and packed != self.shape[-2]
        ):
            raise LayoutError(
                f"{self.name}: {self.matrices} of a tensor of shape {list(self.shape)}. Use "
                "parts whose rows, times groups, are those of the tensor, which has at least "
                "2 dimensions."
            )

    def _check(self, split: Split) -> None:
        if not 0 <= split.dim < len(self.shape):
            raise LayoutError(
                f"{self.name}: {split} cuts dimension {split.dim} of a tensor of shape "
                f"{list(self.shape)}. Use a dimension below {len(self.shape)}."
            )
        if sum(split.dim == other.dim for other in self.splits) > 1:
            raise LayoutError(
                f"{self.name}: two splits cut dimension {split.dim}. Cut each over one axis "
                "only."
            )
        true = self.shape[split.dim]
        if split.parts < 1 or split.padded is not None and split.padded < true:
            raise LayoutError(
                f"{self.name}: {split} of a dimension of size {true}. Use parts >= 1, padded "
                f">= {true}."
            )

    @property
    def numel(self) -> int:
        """Elements of the logical tensor."""
        return math.prod(self.shape)

    @property
    def reduced_over(self) -> tuple[str, ...]:
        """The mesh axes over which gradients are summed: ranks along them use the same elements."""
        differs_over_ep = self.is_split_over("ep") or "ep" in self.distinct_over
        return EXPERT_DATA_AXES if differs_over_ep else DATA_AXES

    @property
    def tensor_axis(self) -> str:
        """The mesh axis whose ranks divide the layer of the parameter: "etp" for experts, else "tp"."""
        return "etp" if self.reduced_over == EXPERT_DATA_AXES else "tp"

    @property
    def tensor_split(self) -> Split | None:
        """The split over the ranks that divide the layer, None where each of them holds the whole."""
        splits = (split for split in self.splits if split.axis in TENSOR_AXES)
        return next(splits, None)

    def split_over(self, axis: str) -> Split | None:
        """Return the split over a mesh axis, None where every rank of the axis holds the whole."""
        return next((split for split in self.splits if split.axis == axis), None)

    def is_split_over(self, axis: str) -> bool:
        """Return whether ranks along `axis` hold different shards."""
        return self.split_over(axis) is not None

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of a rank's shard on axes of these sizes (1 where absent).

        Raises LayoutError unless they divide.
        """
        shape = list(self.shape)
        for split in self.splits:
            size = sizes.get(split.axis, 1)
            total = split.padded or self.shape[split.dim]
            if total % (size * split.parts):
                raise LayoutError(
                    f"{self.name}: dimension {split.dim} has size {total} in {split.parts} "
                    f"part(s), which is not divisible by {size} {split.axis} ranks. Use a size "
                    f"that divides {total // split.parts}."
                )
            shape[split.dim] = total // size
        return tuple(shape)

    def boxes(self, coordinates: Coordinates) -> tuple[Box, ...]:
        """Return the boxes of the rank at `coordinates`; padding is in no box, so a rank may have none.

        Raises LayoutError.
        """
        local = self.local_shape(
            {axis: size for axis, (_, size) in coordinates.items()}
        )
        # Per dimension: (first local, first logical, length).
        runs = [[(0, 0, n)] for n in self.shape]
        for split in self.splits:
            d, (rank, size) = split.dim, coordinates.get(split.axis, (0, 1))
            runs[d] = _runs(
                local[d] // split.parts, split.parts, self.shape[d], rank, size
            )
        return tuple(
            Box(*(tuple(numbers) for numbers in zip(*box))) if box else Box((), (), ())
            for box in itertools.product(*runs)
        )


def _runs(
    piece: int, parts: int, true: int, rank: int, size: int
) -> list[tuple[int, int, int]]:
    """(first local, first logical, length) of each part along a dimension.

    piece: elements of one part on one rank.
    """
    starts = [(i * piece, (i * size + rank) * piece) for i in range(parts)]
    return [
        (local, logical, min(piece, true - logical))
        for local, logical in starts
        if logical < true
    ]
