"""`SequenceRanks`: the ranks that hold different tokens of a sequence.

Context-parallel ranks hold parts of each sequence, and with sequence parallelism tensor-parallel ranks parts
of those (`SequenceSlice`). What compares the tokens of a sequence with each other gathers some
numbers of each token, decides alike on every rank, and keeps the decisions on its own tokens.
"""

from dataclasses import dataclass

import torch

from . import collectives
from .group import Group
from .sequence_slice import SequenceSlice


@dataclass(frozen=True)
class SequenceRanks:
    """every: all of them; tp, cp: those that differ on one axis alone."""

    every: Group
    tp: Group
    cp: Group
    part: SequenceSlice

    @property
    def size(self) -> int:
        """Number of parts of a sequence."""
        return self.every.size

    def gather(self, held: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of all ranks along `dim`, in the order of the sequence. Collective over the ranks."""
        whole = collectives.all_gather(
            collectives.all_gather(held, self.tp, dim), self.cp, dim
        )
        order = self.part.order(whole.shape[dim], whole.device)
        return whole if order is None else whole.index_select(dim, order.argsort())

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens of all tokens along `dim`."""
        index = self.part.index(whole.shape[dim], whole.device)
        return collectives.shard(
            whole if index is None else whole.index_select(dim, index), self.tp, dim
        )
