"""`SequenceSlice`: which tokens of a sequence a rank holds.

Two axes divide a sequence, in two steps. Context parallelism decides which tokens a *batch* of the rank
holds: two chunks, one from each half, so that causal attention costs the same on every rank. Sequence
parallelism then divides those tokens, in their order, over the tensor-parallel ranks: each holds the *rows*
of hidden states of its part between two linear layers.

    8 tokens, cp 2, tp 2          cp 0: 0 1 | 6 7            cp 1: 2 3 | 4 5
                                  tp 0: 0 1   tp 1: 6 7      tp 0: 2 3   tp 1: 4 5

Tokens of one cp rank are in ascending order. Without context parallelism a batch holds whole sequences and
rows are a contiguous run; then nothing here makes a tensor.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import LayoutError


class Part(NamedTuple):
    """Position of a rank among those that divide something, and their number."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class SequenceSlice:
    """Made once from a rank's coordinates; holds for sequences of any length.

    context  part of the sequence whose tokens the batches of this rank hold
    tensor   part of those tokens whose hidden states this rank holds between linear layers
    """

    context: Part = Part()
    tensor: Part = Part()

    @classmethod
    def of(cls, *, tp: tuple[int, int] = (0, 1), sequence_parallel: bool = False,
           cp: tuple[int, int] = (0, 1)) -> "SequenceSlice":
        """From (rank, size) on each axis. Without sequence parallelism each tp rank holds all rows."""
        return cls(Part(*cp), Part(*tp) if sequence_parallel else Part())

    def batch_length(self, length: int) -> int:
        """Tokens of a sequence of `length` in a batch of this rank. Raises LayoutError if not divisible."""
        if self.context.size == 1:
            return length
        chunks = 2 * self.context.size
        if length % chunks:
            raise LayoutError(f"a sequence of {length} tokens is not divisible by {chunks}: each of "
                              f"{self.context.size} context-parallel ranks holds two equal chunks. Use a "
                              f"multiple of {chunks} tokens.")
        return length // self.context.size

    def index(self, length: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Positions, int64 [k] ascending, of the tokens in a batch of this rank; None for all tokens."""
        held = self.batch_length(length)
        if self.context.size == 1:
            return None
        chunk, (rank, size) = held // 2, self.context
        first = torch.arange(rank * chunk, (rank + 1) * chunk, device=device)
        return torch.cat((first, first + (2 * size - 1 - 2 * rank) * chunk))

    def rows(self, held: int) -> range:
        """Of the `held` tokens of a batch, those whose hidden states this rank holds between linear layers.

        Raises LayoutError if `held` does not divide.
        """
        rank, size = self.tensor
        if held % size:
            raise LayoutError(f"{held} tokens of a sequence are not divisible by {size}, the number of "
                              "tensor-parallel ranks that share them under sequence parallelism. Use a "
                              "multiple of it.")
        return range(rank * (held // size), (rank + 1) * (held // size))

    def hidden_shape(self, held: int, samples: int, hidden: int) -> tuple[int, int, int]:
        """[s(/t), b, h]: shape of hidden states between linear layers, and so between pipeline stages."""
        return len(self.rows(held)), samples, hidden
