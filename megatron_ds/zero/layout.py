"""`Layout`: the place of each parameter in a flat buffer, its bucket, and the rank that owns each part. Pure.

Terms:  a *slot* is the place of one parameter; it starts at a multiple of `align` elements. A *bucket* is a
        run of slots that is reduced by one collective; its length is a multiple of shards * align. *Shard* r
        is the r-th of `shards` equal parts of every bucket, not of the whole buffer: so each bucket can be
        reduce-scattered, and gathered again, in place and separately. A *piece* is the part of a slot that
        lies in one shard.

    flat buffer   |------------- bucket 0 -------------|------- bucket 1 -------|
    slots         |-- w2 --|pad|- b2 -|pad|--- pad ----|------- w1 ------|-pad--|
    shard 0 of 2  |###############|                    |###########|
    shard 1 of 2                  |####################|           |############|

Slots are in *reverse* forward order: backward fills bucket 0 first. Each piece, padding included, begins and
ends at a multiple of `align` for any number of shards: vector kernels then process an element in the same way
under every split, and sharded results are bit-equal to whole ones.

`plan_whole_layout` is a second way to fill the same structure: no slot crosses the border of a shard, so each
parameter is owned whole by one rank. Buffers, collectives and checkpoints are the same for both.

    flat buffer   |-------------------- bucket 0 --------------------|
    slots         |--- w1 ---|-- w4 --|---|------- w2 -------|- w3 --|      the parts differ by padding
    shard 0 of 2  |#######################|
    shard 1 of 2                          |##########################|
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import LayoutError

ALIGN = 64  # elements: 256 bytes of fp32, four AVX-512 vectors, a coalesced row of a GPU warp


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, start + numel) of the flat buffer; padding up to `padded_stop`."""

    name: str
    start: int
    numel: int
    bucket: int
    padded_stop: int

    @property
    def stop(self) -> int:
        """The end without padding."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) of the flat buffer, holding slots[first_slot:last_slot]."""

    index: int
    start: int
    stop: int
    first_slot: int
    last_slot: int


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Elements [start, stop) of the flat buffer, at `offset` of the shard's own buffer."""

    bucket: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """The part of slots[slot] that lies in a shard.

    start, stop   in the flattened parameter, without padding
    flat          where it starts in the flat buffer
    offset        where it starts in the shard's own buffer
    padded_numel  its length with padding, a multiple of the alignment
    """

    slot: int
    start: int
    stop: int
    flat: int
    offset: int
    padded_numel: int


@dataclass(frozen=True)
class Layout:
    """Made by `plan_layout`. slots and buckets in the order of the flat buffer."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    shards: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, padding included."""
        return self.numel // self.shards

    def shard_pieces(
        self, shard: int, shards: int | None = None
    ) -> tuple[ShardPiece, ...]:
        """Return the piece of each bucket in this shard. shards: parts of each bucket, a divisor of the layout's
        number; None for that number."""
        shards = shards or self.shards
        pieces = []
        offset = 0
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // shards
            start = bucket.start + shard * size
            pieces.append(ShardPiece(bucket.index, start, start + size, offset))
            offset += size
        return tuple(pieces)

    def slot_intersections(
        self, shard: int, shards: int | None = None
    ) -> tuple[SlotPiece, ...]:
        """Return the pieces of slots in this shard, in buffer order. shards: see `shard_pieces`."""
        result = []
        for piece in self.shard_pieces(shard, shards):
            bucket = self.buckets[piece.bucket]
            for i in range(bucket.first_slot, bucket.last_slot):
                slot = self.slots[i]
                start = max(slot.start, piece.start)
                stop = min(slot.stop, piece.stop)
                if start < stop:
                    padded = min(slot.padded_stop, piece.stop) - start
                    offset = piece.offset + start - piece.start
                    result.append(
                        SlotPiece(
                            i,
                            start - slot.start,
                            stop - slot.start,
                            start,
                            offset,
                            padded,
                        )
                    )
        return tuple(result)

    def spans(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Elements [start, stop) of the flattened parameter of slots[slot] in each shard; (0, 0): none."""
        s = self.slots[slot]
        bucket = self.buckets[s.bucket]
        size = (bucket.stop - bucket.start) // self.shards
        starts = (bucket.start - s.start + shard * size for shard in range(self.shards))
        return tuple(
            (max(start, 0), min(start + size, s.numel))
            if start < s.numel and start + size > 0
            else (0, 0)
            for start in starts
        )

    def whole_slots(self) -> tuple[SlotPiece, ...]:
        """Return the pieces of a rank that owns everything; `offset` is then the place in the flat buffer."""
        return tuple(
            SlotPiece(i, 0, s.numel, s.start, s.start, s.padded_stop - s.start)
            for i, s in enumerate(self.slots)
            if s.numel
        )


def plan_layout(
    items: Sequence[tuple[str, int]],
    bucket_elements: int,
    shards: int,
    align: int = ALIGN,
    units: Sequence[int] | None = None,
) -> Layout:
    """Lay out parameters, given as (name, number of elements) in forward order.

    bucket_elements: a bucket is closed before it would grow beyond this; a larger parameter gets a bucket of
    its own. units: one number per item; a bucket never holds items of two units. Raises LayoutError for sizes
    that are not positive and for duplicate names.
    """
    _check(items, bucket_elements, shards, align)
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    start = at = first = 0

    def close() -> int:
        stop = start + _round_up(at - start, shards * align)
        buckets.append(Bucket(len(buckets), start, stop, first, len(slots)))
        return stop

    # Backward order: the gradients of the last layers are complete first.
    unit = None
    for (name, numel), its_unit in zip(
        reversed(items), reversed(units or [0] * len(items))
    ):
        padded = _round_up(numel, align)
        if (
            first < len(slots)
            and its_unit != unit
            or at > start
            and at - start + padded > bucket_elements
        ):
            start = at = close()
            first = len(slots)
        unit = its_unit
        slots.append(Slot(name, at, numel, len(buckets), at + padded))
        at += padded
    if first < len(slots):
        close()
    return Layout(tuple(slots), tuple(buckets), shards)


def plan_whole_layout(
    items: Sequence[tuple[str, int]],
    bucket_elements: int,
    shards: int,
    align: int = ALIGN,
    alone: bool = False,
) -> Layout:
    """Return the same, so that one rank owns each parameter whole.

    Buckets are runs in reverse forward order of up to `bucket_elements`, or of up to `shards` times the
    largest parameter if that is more: with fewer, most ranks would own padding. In a bucket, the largest
    parameter that is left goes to the rank with the least so far (Graham 1969, the LPT rule): the parts
    differ by less than one parameter. Padding makes them equal. alone: each parameter has a bucket to itself.
    """
    _check(items, bucket_elements, shards, align)
    # Runs of parameters, one for each bucket.
    padded = {name: _round_up(numel, align) for name, numel in items}
    most = max(bucket_elements, shards * max(padded.values(), default=0))
    runs: list[list[str]] = []
    for name, _ in reversed(items):
        if (
            alone
            or not runs
            or sum(padded[other] for other in runs[-1]) + padded[name] > most
        ):
            runs.append([])
        runs[-1].append(name)
    # Each run is shared out over the ranks; all parts get the length of the longest.
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    start = 0
    numel_of = dict(items)
    for names in runs:
        parts = _balance(names, padded, shards)
        size = max(sum(padded[name] for name in part) for part in parts)
        first = len(slots)
        for rank, part in enumerate(parts):
            at = start + rank * size
            for name in part:
                slots.append(
                    Slot(name, at, numel_of[name], len(buckets), at + padded[name])
                )
                at += padded[name]
        buckets.append(
            Bucket(len(buckets), start, start + shards * size, first, len(slots))
        )
        start += shards * size
    return Layout(tuple(slots), tuple(buckets), shards)


def _balance(
    names: Sequence[str], sizes: Mapping[str, int], shards: int
) -> list[list[str]]:
    """Return the names of each shard, in their given order."""
    load = [0] * shards
    shard_of = {}
    for name in sorted(names, key=lambda name: -sizes[name]):
        shard = load.index(min(load))
        load[shard] += sizes[name]
        shard_of[name] = shard
    return [
        [name for name in names if shard_of[name] == shard] for shard in range(shards)
    ]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _check(
    items: Sequence[tuple[str, int]], bucket_elements: int, shards: int, align: int
) -> None:
    if min(bucket_elements, shards, align) < 1:
        raise LayoutError(
            f"a layout needs positive sizes, got bucket_elements={bucket_elements}, "
            f"shards={shards}, align={align}."
        )
    seen: set[str] = set()
    for name, numel in items:
        if numel < 0 or name in seen:
            problem = "given twice" if name in seen else f"{numel} elements"
            raise LayoutError(
                f"{name}: {problem}; each parameter needs one slot with a unique name and at "
                "least one element."
            )
        seen.add(name)
