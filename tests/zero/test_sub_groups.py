"""Sub-groups: every element once, contiguous wherever it lies, on pages, and no more than the share asked
for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.mpu.param_spec import DATA_AXES
from megatron_ds.zero.layout import plan_layout
from megatron_ds.zero.offload_settings import OffloadSettings
from megatron_ds.zero.prediction import ElementBytes, predict_places, predict_sets
from megatron_ds.zero.set_plan import Fact, plan_sets
from megatron_ds.zero.settings import STAGES, ZeroSettings
from megatron_ds.zero.sub_groups import PAGE_ELEMENTS, plan_sub_groups

pytestmark = pytest.mark.plan

SIZES = st.lists(st.integers(1, 9000), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(
    SIZES,
    st.integers(1, 20000),
    st.integers(1, 4),
    st.integers(1, 9000),
    st.floats(0, 1),
    st.booleans(),
)
def test_each_element_is_in_one_place(sizes, bucket, shards, elements, ratio, whole):
    layout = plan_layout([(f"p{i}", n) for i, n in enumerate(sizes)], bucket, shards)
    for shard in range(shards):
        pieces = layout.whole_slots() if whole else layout.slot_intersections(shard)
        groups, stay = plan_sub_groups(layout, pieces, elements, ratio)
        away = [piece for group in groups for piece in group.pieces]
        covered = sorted((p.slot, p.start, p.stop) for p in (*away, *stay))
        for piece in pieces:
            parts = [
                (a, b)
                for slot, a, b in covered
                if slot == piece.slot and piece.start <= a and b <= piece.stop
            ]
            assert parts[0][0] == piece.start and parts[-1][1] == piece.stop
            assert all(left[1] == right[0] for left, right in zip(parts, parts[1:]))
        assert sum(b - a for _, a, b in covered) == sum(
            p.stop - p.start for p in pieces
        )
        total, gone = (sum(p.padded_numel for p in part) for part in (pieces, away))
        assert sum(p.padded_numel for p in (*away, *stay)) == total
        assert (
            round(total * ratio)
            <= gone
            < round(total * ratio) + PAGE_ELEMENTS * len(layout.buckets)
        )
        for group in groups:
            assert group.begin % PAGE_ELEMENTS == 0
            assert group.numel <= max(elements, PAGE_ELEMENTS)
            assert {layout.slots[p.slot].bucket for p in group.pieces} == {group.bucket}
            for left, right in zip(group.pieces, group.pieces[1:]):
                assert (
                    left.flat + left.padded_numel == right.flat
                    and left.offset + left.padded_numel == right.offset
                )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_places_add_up_to_the_bytes_of_all(stage, ratio):
    facts = [
        Fact(f"p{i}", n, "bf16", stage=0, layer=i)
        for i, n in enumerate((90_000, 7, 40_001, 63))
    ]
    offload = OffloadSettings(
        "nvme", "cpu" if stage == 3 else "device", ratio, sub_group_elements=4096
    )
    settings = ZeroSettings(
        (), STAGES[stage], bucket_elements=30_000, persistence=10, offload=offload
    )
    plans = plan_sets(facts, settings, {DATA_AXES: 3})
    total = predict_sets(plans, {DATA_AXES: 1}, ElementBytes(2)).total
    places = predict_places(plans, {DATA_AXES: 1}, ElementBytes(2), offload)
    assert sum(places.values()) == total
    assert places["nvme"] == pytest.approx(
        12 * sum(f.numel for f in facts) / 3 * ratio, rel=0.25
    )
    assert (places.get("cpu", 0) > 0) == (stage == 3)
