"""The training samples of a run that is continued for longer than its earlier starts planned.

The order of the samples of a corpus is a function of their number, as in Megatron. A continued run keeps the order
that was planned, and reads what it needs besides in an order of its own:

    planned at first    | 360 samples, in the order of 360 |
    continued           | the same order                   | 280 more, in the order of 280 with another seed |
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ..kind import Dataset


def pieces_of(
    plans: Sequence[int], same_order: Callable[[int, int], bool]
) -> list[int]:
    """Return the number of samples of each piece of the stream, for rising numbers that the starts of a run planned.

    same_order: whether datasets of two numbers of samples begin with the same ones; then a piece grows
    """
    pieces: list[int] = []
    before = 0
    for planned in plans:
        more = planned - before
        before = planned
        if pieces and same_order(pieces[-1], pieces[-1] + more):
            pieces[-1] += more
        else:
            pieces.append(more)
    return pieces


class ContinuedDataset:
    """The first `counts[k]` samples of the dataset k, one dataset after the other."""

    def __init__(self, datasets: Sequence[Dataset], counts: Sequence[int]):
        self.datasets = datasets
        self.starts = list(accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def place(self, i: int) -> tuple[Dataset, int]:
        """Return the dataset of sample i, and the number of the sample in it."""
        piece = bisect_right(self.starts, i) - 1
        return self.datasets[piece], i - self.starts[piece]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        dataset, number = self.place(i)
        return dataset[number]
