"""`SequenceSlice`: the tokens of each sequence that a rank holds."""

import math
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from ..errors import LayoutError


class RankPart(NamedTuple):
    """Position of a rank among those that divide something, and their number."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class SequenceSlice:
    """Made once from a rank's coordinates; holds for sequences of any length.

    context  part of the sequence whose tokens the batches of this rank hold
    tensor   part of those tokens whose hidden states this rank holds between linear layers
    zigzag   each context-parallel rank holds two chunks, one from each half; otherwise one run
    """

    context: RankPart = RankPart()
    tensor: RankPart = RankPart()
    zigzag: bool = True

    @classmethod
    def of(
        cls,
        *,
        tp: tuple[int, int] = (0, 1),
        sequence_parallel: bool = False,
        cp: tuple[int, int] = (0, 1),
        zigzag: bool = True,
    ) -> "SequenceSlice":
        """Return the slice of a rank with these (rank, size). Without sequence parallelism tp does not split."""
        return cls(
            RankPart(*cp), RankPart(*tp) if sequence_parallel else RankPart(), zigzag
        )

    @property
    def parts(self) -> int:
        """The length of a sequence must be a multiple of this number."""
        size = self.context.size
        return math.lcm(
            size * (1 + (self.zigzag and size > 1)), size * self.tensor.size
        )

    def batch_length(self, length: int) -> int:
        """Tokens of a sequence of `length` in a batch of this rank. Raises LayoutError if not divisible."""
        size = self.context.size
        chunks = self.context.size * (1 + self.zigzag)
        if size > 1 and length % chunks:
            held = "two equal chunks" if self.zigzag else "an equal run of them"
            raise LayoutError(
                f"a sequence of {length} tokens is not divisible by {chunks}: each of "
                f"{size} context-parallel ranks holds {held}. Use a multiple of {chunks} "
                "tokens."
            )
        return length // size

    def runs(self, length: int, rank: int | None = None) -> tuple[range, ...]:
        """Positions, ascending, of the tokens in a batch of a context-parallel rank; None: of this one."""
        held = self.batch_length(length)
        size = self.context.size
        rank = self.context.rank if rank is None else rank
        if size == 1 or not self.zigzag:
            return (range(rank * held, (rank + 1) * held),)
        chunk = held // 2
        return tuple(
            range(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank)
        )

    def index(
        self, length: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        """Positions, int64 [k] ascending, of the tokens in a batch of this rank; None for all tokens."""
        if self.context.size == 1:
            return None
        return torch.cat(
            [
                torch.arange(run.start, run.stop, device=device)
                for run in self.runs(length)
            ]
        )

    def order(
        self, length: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor | None:
        """int64 [length]: positions in the order of the context-parallel ranks that hold them; None if that
        is ascending."""
        if self.context.size == 1 or not self.zigzag:
            return None
        runs = [self.runs(length, rank) for rank in range(self.context.size)]
        held = [
            torch.arange(run.start, run.stop, device=device)
            for run in chain.from_iterable(runs)
        ]
        return torch.cat(held)

    def rows(self, held: int) -> range:
        """Return the range, within the `held` tokens, whose hidden states this rank holds between linear layers.

        Raises LayoutError if `held` is not divisible by the number of ranks.
        """
        rank, size = self.tensor
        if held % size:
            raise LayoutError(
                f"{held} tokens of a sequence are not divisible by {size}, the number of "
                "tensor-parallel ranks that share them under sequence parallelism. Use a "
                "multiple of it."
            )
        return range(rank * (held // size), (rank + 1) * (held // size))

    def hidden_shape(
        self, held: int, samples: int, hidden: int
    ) -> tuple[int, int, int]:
        """[s(/t), b, h]: shape of hidden states between linear layers, and so between pipeline stages."""
        return len(self.rows(held)), samples, hidden
