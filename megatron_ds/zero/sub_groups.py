"""Sub-groups of offloaded state: `plan_sub_groups` cuts them. Pure.

A *sub-group* is a run of pieces in one bucket, so that it is one interval of every flat buffer that holds a
part of it (weights, gradients, moments). Sub-groups begin at a page of a file for every dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .layout import Layout, SlotPiece

PAGE_ELEMENTS = 2048  # of 16 bits in a page of 4096 bytes


@dataclass(frozen=True)
class SubGroupPlan:
    """Consecutive pieces of one bucket. begin: offset of the first in this rank's part of the bucket."""

    bucket: int
    begin: int
    pieces: tuple[SlotPiece, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return sum(piece.padded_numel for piece in self.pieces)


def plan_sub_groups(
    layout: Layout, pieces: Sequence[SlotPiece], elements: int, ratio: float
) -> tuple[tuple[SubGroupPlan, ...], tuple[SlotPiece, ...]]:
    """(sub-groups, pieces that stay on the device): the first `ratio` of all elements are offloaded.

    pieces: of this rank, in buffer order; cut where a sub-group ends. elements: of a sub-group, about.
    """
    elements = max(elements // PAGE_ELEMENTS, 1) * PAGE_ELEMENTS
    left = round(sum(piece.padded_numel for piece in pieces) * ratio)
    groups: list[SubGroupPlan] = []
    stay: list[SlotPiece] = []
    for bucket, in_bucket in groupby(
        pieces, lambda piece: layout.slots[piece.slot].bucket
    ):
        away, rest = _cut(
            list(in_bucket), -(-max(left, 0) // PAGE_ELEMENTS) * PAGE_ELEMENTS
        )
        stay += rest
        begin = 0
        while away:
            first, away = _cut(away, elements)
            groups.append(SubGroupPlan(bucket, begin, tuple(first)))
            begin += groups[-1].numel
        left -= begin
    return tuple(groups), tuple(stay)


def _cut(pieces: list[SlotPiece], room: int) -> tuple[list[SlotPiece], list[SlotPiece]]:
    """Return the first `room` elements, padding included, and the rest. room: a multiple of the alignment."""
    for k, piece in enumerate(pieces):
        if room == 0:
            return pieces[:k], pieces[k:]
        if piece.padded_numel > room:
            middle = piece.start + room
            first = replace(piece, stop=middle, padded_numel=room)
            rest = replace(
                piece,
                start=middle,
                flat=piece.flat + room,
                offset=piece.offset + room,
                padded_numel=piece.padded_numel - room,
            )
            return [*pieces[:k], first], [rest, *pieces[k + 1 :]]
        room -= piece.padded_numel
    return pieces, []
