"""Layouts against brute force: an array of owners, filled element by element."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.errors import LayoutError
from megatron_ds.zero.layout import plan_layout

pytestmark = pytest.mark.plan

SIZES = st.lists(st.integers(0, 700), max_size=12)


def items_of(sizes):
    return [(f"p{i}", n) for i, n in enumerate(sizes)]


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 2000), st.integers(1, 5))
def test_every_element_of_every_parameter_is_in_exactly_one_shard(
    sizes, bucket_elements, shards
):
    layout = plan_layout(items_of(sizes), bucket_elements, shards)
    owners = {name: [0] * n for name, n in items_of(sizes)}
    for shard in range(shards):
        for piece in layout.slot_intersections(shard):
            slot = layout.slots[piece.slot]
            assert piece.flat == slot.start + piece.start
            assert layout.spans(piece.slot)[shard] == (piece.start, piece.stop)
            for element in range(piece.start, piece.stop):
                owners[slot.name][element] += 1
    assert all(count == 1 for owner in owners.values() for count in owner)
    assert all(
        sum(b - a for a, b in layout.spans(i)) == slot.numel
        for i, slot in enumerate(layout.slots)
    )


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 2000), st.integers(1, 5))
def test_pieces_are_aligned_disjoint_and_inside_their_shard_also_with_their_padding(
    sizes, bucket_elements, shards
):
    layout = plan_layout(items_of(sizes), bucket_elements, shards)
    for shard in range(shards):
        at = 0
        for piece in layout.slot_intersections(shard):
            assert (
                piece.flat % 64 == 0
                and piece.offset % 64 == 0
                and piece.padded_numel % 64 == 0
            )
            assert (
                piece.offset >= at
                and piece.padded_numel >= piece.stop - piece.start > 0
            )
            at = piece.offset + piece.padded_numel
        assert at <= layout.shard_numel


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 2000), st.integers(1, 5))
def test_buckets_tile_the_buffer_and_their_shards_are_equal(
    sizes, bucket_elements, shards
):
    layout = plan_layout(items_of(sizes), bucket_elements, shards)
    assert [b.start for b in layout.buckets] == [0, *(b.stop for b in layout.buckets)][
        : len(layout.buckets)
    ]
    for bucket in layout.buckets:
        pieces = [layout.shard_pieces(shard)[bucket.index] for shard in range(shards)]
        assert [p.start for p in pieces] == [
            bucket.start,
            *(p.stop for p in pieces[:-1]),
        ]
        assert (
            pieces[-1].stop == bucket.stop
            and len({p.stop - p.start for p in pieces}) == 1
        )
        slots = layout.slots[bucket.first_slot : bucket.last_slot]
        assert all(
            s.bucket == bucket.index
            and bucket.start <= s.start
            and s.padded_stop <= bucket.stop
            for s in slots
        )
        assert (
            sum(s.numel > 0 for s in slots) <= 1
            or slots[-1].padded_stop - bucket.start <= bucket_elements
        )


def test_slots_lie_in_reverse_forward_order_and_a_large_one_has_a_bucket_of_its_own():
    layout = plan_layout(
        [("first", 10), ("large", 1000), ("b", 3), ("last", 7)],
        bucket_elements=200,
        shards=3,
    )
    assert [s.name for s in layout.slots] == ["last", "b", "large", "first"]
    assert [s.start for s in layout.slots] == [0, 64, 192, 192 + 1152]
    assert [(b.start, b.stop) for b in layout.buckets] == [
        (0, 192),
        (192, 1344),
        (1344, 1536),
    ]
    assert layout.shard_numel == 512


def test_a_shard_may_hold_padding_only():
    layout = plan_layout([("seven", 7)], bucket_elements=100, shards=3)
    assert [len(layout.slot_intersections(shard)) for shard in range(3)] == [1, 0, 0]


def test_nothing_to_lay_out_is_an_empty_layout():
    layout = plan_layout([], bucket_elements=100, shards=3)
    assert (
        layout.numel,
        layout.buckets,
        layout.shard_pieces(2),
        layout.whole_slots(),
    ) == (0, (), (), ())


@pytest.mark.parametrize(
    "items, bucket, shards",
    [([("a", 1), ("a", 2)], 1, 1), ([("a", -1)], 1, 1), ([], 0, 1), ([], 1, 0)],
)
def test_impossible_sizes_are_refused(items, bucket, shards):
    with pytest.raises(LayoutError):
        plan_layout(items, bucket, shards)
