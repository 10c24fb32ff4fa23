"""Resharding moves real numbers between real buffers; each element arrives, once."""

import random

import pytest

from megatron_ds.errors import LayoutError
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.reshard import plan_copies


def filled_shards(layout):
    """Shard buffers whose elements are (name, index in the parameter); None where there is padding."""
    buffers = [[None] * layout.shard_numel for _ in range(layout.shards)]
    for shard, buffer in enumerate(buffers):
        for piece in layout.slot_intersections(shard):
            for k in range(piece.stop - piece.start):
                buffer[piece.offset + k] = (layout.slots[piece.slot].name, piece.start + k)
    return buffers


@pytest.mark.parametrize("seed", range(40))
def test_copies_turn_the_shards_of_one_layout_into_those_of_another(seed):
    rng = random.Random(seed)
    items = [(f"p{i}", rng.choice([0, 1, 7, 64, 65, 300, 1000])) for i in range(rng.randrange(1, 8))]
    old = plan_layout(items, rng.randrange(1, 1500), rng.randrange(1, 6))
    new = plan_layout(rng.sample(items, len(items)), rng.randrange(1, 1500), rng.randrange(1, 6), align=rng.choice([8, 64]))
    source, target = filled_shards(old), [[None] * new.shard_numel for _ in range(new.shards)]
    copied = 0
    for c in plan_copies(old, new):
        target[c.new_shard][c.new_offset:c.new_offset + c.numel] = source[c.old_shard][c.old_offset:c.old_offset + c.numel]
        assert source[c.old_shard][c.old_offset] == (c.name, c.start)
        copied += c.numel
    assert target == filled_shards(new)
    assert copied == sum(n for _, n in items)


def test_layouts_of_different_parameters_are_refused():
    with pytest.raises(LayoutError, match=r"first b \(2 and 3 elements\)"):
        plan_copies(plan_layout([("a", 1), ("b", 2)], 10, 1), plan_layout([("a", 1), ("b", 3)], 10, 1))
