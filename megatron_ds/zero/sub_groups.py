"""Which part of a rank's share of a set is updated where: a list of pieces that stay on the device, and *sub-groups* of pieces
that were offloaded. Pure.

A sub-group is what an update brings to the host at a time: a run of pieces in one bucket, so that it is one interval of every
flat buffer that holds something of it (weights, gradients, moments). Sub-groups begin on a page of a file, whatever the dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .layout import Layout, SlotPiece

PAGE_ELEMENTS = 2048          # of 16 bits in a page of 4096 bytes


@dataclass(frozen=True)
class SubGroupPlan:
    """Pieces that follow one another in one bucket. begin: where the first lies in this rank's part of the bucket."""

    bucket: int
    begin: int
    pieces: tuple[SlotPiece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.padded_numel for piece in self.pieces)


def plan_places(layout: Layout, pieces: Sequence[SlotPiece], elements: int,
                ratio: float) -> tuple[tuple[SubGroupPlan, ...], tuple[SlotPiece, ...]]:
    """(sub-groups, pieces that stay): the first `ratio` of all elements are offloaded, in sub-groups of about `elements`.

    pieces: this rank's, in buffer order. Pieces are cut where a sub-group ends.
    """
    elements = max(elements // PAGE_ELEMENTS, 1) * PAGE_ELEMENTS
    left = round(sum(piece.padded_numel for piece in pieces) * ratio)
    groups: list[SubGroupPlan] = []
    stay: list[SlotPiece] = []
    for bucket, its_pieces in _by_bucket(layout, pieces).items():
        at = 0
        room = min(elements, _whole_pages(left))
        current: list[SlotPiece] = []
        for piece in its_pieces:
            while piece is not None and room > 0:
                first, piece = cut_piece(piece, room)
                current.append(first)
                room -= first.padded_numel
                if room <= 0:
                    at, left, current = _close(groups, bucket, at, left, current)
                    room = min(elements, _whole_pages(left))
            if piece is not None:
                stay.append(piece)
        at, left, current = _close(groups, bucket, at, left, current)
    return tuple(groups), tuple(stay)


def cut_piece(piece: SlotPiece, room: int) -> tuple[SlotPiece, SlotPiece | None]:
    """The first `room` elements, padding included, and the rest. room: a multiple of the alignment."""
    if piece.padded_numel <= room:
        return piece, None
    middle = piece.start + room
    return (replace(piece, stop=middle, padded_numel=room),
            replace(piece, start=middle, flat=piece.flat + room, offset=piece.offset + room,
                    padded_numel=piece.padded_numel - room))


def _close(groups: list[SubGroupPlan], bucket: int, at: int, left: int, current: list[SlotPiece]):
    if not current:
        return at, left, current
    groups.append(SubGroupPlan(bucket, at, tuple(current)))
    numel = groups[-1].numel
    return at + numel, left - numel, []


def _whole_pages(elements: int) -> int:
    return -(-elements // PAGE_ELEMENTS) * PAGE_ELEMENTS if elements > 0 else 0


def _by_bucket(layout: Layout, pieces: Sequence[SlotPiece]) -> dict[int, list[SlotPiece]]:
    found: dict[int, list[SlotPiece]] = {}
    for piece in pieces:
        found.setdefault(layout.slots[piece.slot].bucket, []).append(piece)
    return found
