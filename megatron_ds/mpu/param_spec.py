"""`ParamSpec`: what is known of a parameter, and the boxes its shards are made of.

Tensor-parallel and MoE layers write it (`parameter.spec`); ZeRO, the gradient norm, tied reduction and the checkpoint read
it. It is the only message between them, and the reason they need not import one another. Standard library only.

Terms:  a *logical* tensor is the parameter as one process would hold it: true shape, no padding, a global name.
        A *box* is a rectangle of a local tensor together with the place in the logical tensor that it mirrors.

    logical fc1 of a gated MLP, [2f, h], parts=2, two ranks:      rank 0 holds      rank 1 holds
        |-- gate 0..f --|--  up 0..f  --|                         gate 0..f/2       gate f/2..f
                                                                  up   0..f/2       up   f/2..f
"""

import math
from dataclasses import dataclass

from ..errors import LayoutError


@dataclass(frozen=True, slots=True)
class Init:
    """How the logical tensor is filled: kind "normal" (mean 0, `std`), "zeros" or "ones"."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: where it lies in the local tensor, where in the logical one, and how large it is."""

    local: tuple[int, ...]
    logical: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the rest of the system must know of a parameter.

    name          global and unique; does not depend on the pipeline cut
    shape         of the logical tensor
    init          how the logical tensor is filled
    split_dim     the dimension split over the tensor-parallel axis; None when every tp rank holds the whole
    parts         pieces packed along `split_dim`, each split evenly by itself (2 for [gate; up])
    padded        rows that the ranks hold *together* along split_dim, when more than logical (vocabulary padding)
    expert        its gradient is reduced over the expert-data axis instead of the data axis
    tied          key shared by all holders of one logical parameter on several pipeline stages (tied embeddings)
    tied_copy     True on every holder but the first: not counted in norms, not saved
    partial_grad  the local gradient is a partial sum over tp (parameters used on a slice of the sequence)
    decay         weight decay applies
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    split_dim: int | None = None
    parts: int = 1
    padded: int | None = None
    expert: bool = False
    tied: str | None = None
    tied_copy: bool = False
    partial_grad: bool = False
    decay: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape held by each of `size` tensor-parallel ranks. Raises LayoutError when the dimension does not divide."""
        if self.split_dim is None:
            return self.shape
        total = self.padded or self.shape[self.split_dim]
        if total % (size * self.parts):
            raise LayoutError(
                f"{self.name}: dimension {self.split_dim} has size {total} in {self.parts} part(s), which is not "
                f"divisible by {size} tensor-parallel ranks. Use a size that divides {total // self.parts}.")
        return tuple(total // size if d == self.split_dim else n for d, n in enumerate(self.shape))

    def boxes(self, rank: int, size: int) -> tuple[Box, ...]:
        """The boxes of tensor-parallel rank `rank` of `size`; padding is in no box, so a rank may have none."""
        local = self.local_shape(size)
        zeros = (0,) * len(self.shape)
        if self.split_dim is None:
            return (Box(zeros, zeros, self.shape),)
        d, true = self.split_dim, self.shape[self.split_dim]
        piece = local[d] // self.parts            # rows of one part on one rank
        part = piece * size                       # rows of one part on all ranks, padding included
        result = []
        for i in range(self.parts):
            start = i * part + rank * piece
            stop = min(start + piece, true)
            if start < stop:
                place = lambda at: tuple(at if k == d else 0 for k in range(len(self.shape)))
                sizes = tuple(stop - start if k == d else n for k, n in enumerate(self.shape))
                result.append(Box(place(i * piece), place(start), sizes))
        return tuple(result)
