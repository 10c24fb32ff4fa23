"""Which texts are scored together: requests by length, dealt to the ranks and to micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

Rows = tuple[int, ...]


@dataclass(frozen=True)
class ScoreRequest:
    """A text of which the last `scored` tokens are predicted, each from all tokens before it.

    tokens  ids in [0, vocabulary); the first one is only read
    """

    tokens: tuple[int, ...]
    scored: int

    @property
    def inputs(self) -> int:
        """Tokens that the model reads."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Portion:
    """A micro-batch of each rank, of equal shape: [rows, length].

    requests  of each rank, the numbers of its requests; fewer than `rows` on the last ranks
    """

    requests: tuple[Rows, ...]
    rows: int
    length: int


def plan_portions(
    lengths: Sequence[int], ranks: int, tokens: int, multiple: int
) -> list[Portion]:
    """Return portions that hold each request once. The longest come first, since they need the most memory.

    lengths   tokens that the model reads of each request
    ranks     that read different samples
    tokens    of a micro-batch at most, unless one row has more
    multiple  the length of each portion is a multiple of it, as the parts of sequences require
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    portions = []
    first = 0
    while first < len(order):
        longest = max(1, lengths[order[first]])
        length = -(-longest // multiple) * multiple
        most = max(1, tokens // length) * ranks
        taken = order[first : first + most]
        first += len(taken)
        of_ranks = tuple(tuple(taken[rank::ranks]) for rank in range(ranks))
        portions.append(Portion(of_ranks, len(of_ranks[0]), length))
    return portions
