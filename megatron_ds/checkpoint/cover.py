"""Whether boxes hold each element of a tensor once. Without the imports of the index, which take seconds."""

from collections.abc import Sequence
from typing import Protocol


class ChunkBox(Protocol):
    """A box of a tensor: its corner, and its number of elements in each dimension."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


def covers_once(shape: Sequence[int], chunks: Sequence[ChunkBox]) -> bool:
    """Return whether the boxes `chunks`, each inside `shape`, hold every element exactly once.

    They do if and only if their corners, with alternating signs, add up to those of the whole box. The signed
    corners are the mixed difference of the function "number of boxes that hold this element", and a function
    that is 0 far away is determined by its mixed difference. In two dimensions, for two adjacent boxes, the
    corners between them cancel:

        + --- - + --- -        + ----------- -
        |     | |     |   =    |             |         2**d corners a box: 2 s for 640,000 boxes of a matrix
        - --- + - --- +        - ----------- +
    """
    total: dict[tuple[int, ...], int] = {}
    for offsets, sizes, sign in [
        ((0,) * len(shape), shape, -1),
        *((c.offsets, c.sizes, 1) for c in chunks),
    ]:
        corners: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for at, n in zip(offsets, sizes):
            corners = [(corner + (at,), s) for corner, s in corners] + [
                (corner + (at + n,), -s) for corner, s in corners
            ]
        for corner, s in corners:
            total[corner] = total.get(corner, 0) + s
    return not any(total.values())
