"""From one `Layout` to another: which interval of which old shard lands where in which new one. Pure.

Both layouts hold the same parameters; buckets, shards and alignment may differ. The plan is an intersection of intervals:
every element of every parameter appears in exactly one `Copy`.
"""

from dataclasses import dataclass

from ..errors import LayoutError
from .layout import Layout, SlotPiece


@dataclass(frozen=True, slots=True)
class Copy:
    """`numel` elements of parameter `name`, from `start` of its flattened form on; offsets are in the shards' own buffers."""

    name: str
    start: int
    numel: int
    old_shard: int
    old_offset: int
    new_shard: int
    new_offset: int


def plan_copies(old: Layout, new: Layout) -> tuple[Copy, ...]:
    """The copies that turn the shards of `old` into those of `new`. Raises LayoutError when the parameters differ."""
    _check_same_parameters(old, new)
    before, after = _pieces_by_name(old), _pieces_by_name(new)
    return tuple(copy for name in before for copy in _intersect(name, before[name], after[name]))


def _pieces_by_name(layout: Layout) -> dict[str, list[tuple[int, SlotPiece]]]:
    """The (shard, piece)s of each parameter, in the order of its elements."""
    result: dict[str, list[tuple[int, SlotPiece]]] = {slot.name: [] for slot in layout.slots}
    for shard in range(layout.shards):
        for piece in layout.slot_intersections(shard):
            result[layout.slots[piece.slot].name].append((shard, piece))
    return result


def _intersect(name: str, before: list, after: list):
    """Walk two lists of intervals, each of which covers [0, n) in order."""
    i = j = 0
    while i < len(before) and j < len(after):
        (old_shard, old), (new_shard, new) = before[i], after[j]
        start, stop = max(old.start, new.start), min(old.stop, new.stop)
        yield Copy(name, start, stop - start, old_shard, old.offset + start - old.start,
                   new_shard, new.offset + start - new.start)
        i += old.stop == stop
        j += new.stop == stop


def _check_same_parameters(old: Layout, new: Layout) -> None:
    sizes = [{slot.name: slot.numel for slot in layout.slots} for layout in (old, new)]
    if sizes[0] != sizes[1]:
        odd = sorted(name for name in sizes[0].keys() | sizes[1].keys() if sizes[0].get(name) != sizes[1].get(name))
        raise LayoutError(f"cannot reshard: {len(odd)} parameters differ between the layouts, first {odd[0]} "
                          f"({sizes[0].get(odd[0])} and {sizes[1].get(odd[0])} elements).")
