"""Boxes against numpy: a logical tensor of distinct numbers is sharded by slicing; every box must name the
same numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.checkpoint.pieces import flat_offset, interval_boxes, logical_boxes
from megatron_ds.errors import LayoutError
from megatron_ds.mpu.param_spec import Box, Init, ParamSpec, Split

pytestmark = pytest.mark.plan

PADDING = -1


def shard(spec, coordinates):
    """A rank's shard of a logical tensor holding 0, 1, 2, ...; padding is -1. By slicing alone, one dimension
    at a time."""
    local = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    for split in spec.splits:
        rank, size = coordinates[split.axis]
        if split.padded:
            missing = [
                (0, split.padded - n if d == split.dim else 0)
                for d, n in enumerate(local.shape)
            ]
            local = np.pad(local, missing, constant_values=PADDING)
        parts = [
            np.split(part, size, axis=split.dim)[rank]
            for part in np.split(local, split.parts, axis=split.dim)
        ]
        local = np.concatenate(parts, axis=split.dim)
    return local


def everywhere(sizes):
    """The coordinates of all ranks."""
    return [
        dict(zip(sizes, zip(ranks, sizes.values())))
        for ranks in itertools.product(*map(range, sizes.values()))
    ]


def box_of(corner, sizes):
    return tuple(slice(at, at + n) for at, n in zip(corner, sizes))


@st.composite
def specs(draw):
    """A spec split over none, one or two axes, and the sizes of the axes."""
    sizes = {"tp": draw(st.integers(1, 4)), "ep": draw(st.integers(1, 3))}
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    axes = draw(
        st.lists(
            st.sampled_from(["tp", "ep"]), unique=True, max_size=min(2, len(shape))
        )
    )
    dims = draw(st.permutations(range(len(shape))))
    splits = []
    for axis, dim in zip(axes, dims):
        size, parts, padded = sizes[axis], draw(st.integers(1, 3)), None
        if draw(st.booleans()):
            padded = (
                (-(-shape[dim] // (size * parts)) + draw(st.integers(0, 1)))
                * size
                * parts
            )
        else:
            shape[dim] *= size * parts
        splits.append(Split(axis, dim, parts, padded))
    return ParamSpec("w", tuple(shape), Init("zeros"), tuple(splits)), sizes


@given(specs(), st.data())
@settings(max_examples=300, deadline=None)
def test_every_element_of_an_interval_is_in_one_box_with_its_logical_place_and_padding_in_none(
    spec_and_sizes, data
):
    spec, sizes = spec_and_sizes
    logical = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    coordinates = data.draw(st.sampled_from(everywhere(sizes)))
    local = shard(spec, coordinates)
    assert local.shape == spec.local_shape(sizes)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, local.size)] * 2)))
    found = np.full(local.size, PADDING)
    times = np.zeros(local.size, int)
    for box in logical_boxes(spec, coordinates, start, stop):
        found.reshape(local.shape)[box_of(box.local, box.sizes)] = logical[
            box_of(box.logical, box.sizes)
        ]
        times.reshape(local.shape)[box_of(box.local, box.sizes)] += 1
    inside = (np.arange(local.size) >= start) & (np.arange(local.size) < stop)
    assert np.array_equal(times, inside & (local.ravel() != PADDING))
    assert np.array_equal(found, np.where(inside, local.ravel(), PADDING))


@given(specs(), st.data())
@settings(max_examples=150, deadline=None)
def test_shards_cut_anywhere_cover_the_logical_tensor_once(spec_and_sizes, data):
    spec, sizes = spec_and_sizes
    times = np.zeros(spec.shape, int)
    for coordinates in everywhere(
        {axis: size for axis, size in sizes.items() if spec.is_split_over(axis)}
    ):
        total = math.prod(spec.local_shape(sizes))
        inner = data.draw(st.lists(st.integers(0, total), max_size=4))
        for start, stop in itertools.pairwise(sorted([0, *inner, total])):
            for box in logical_boxes(spec, coordinates, start, stop):
                times[box_of(box.logical, box.sizes)] += 1
    assert (times == 1).all()


def test_boxes_are_the_product_of_the_splits():
    spec = ParamSpec(
        "gated experts",
        (4, 6, 5),
        Init("zeros"),
        (Split("ep", 0), Split("tp", 1, parts=2)),
    )
    assert spec.local_shape({"ep": 2, "tp": 3}) == (2, 2, 5) and spec.local_shape(
        {}
    ) == (4, 6, 5)
    assert spec.boxes({"ep": (1, 2), "tp": (2, 3)}) == (
        Box((0, 0, 0), (2, 2, 0), (2, 1, 5)),
        Box((0, 1, 0), (2, 5, 0), (2, 1, 5)),
    )
    assert spec.split_over("tp") == Split("tp", 1, 2) and spec.split_over("pp") is None


def test_the_axes_of_the_gradients_sum_follow_from_what_a_parameter_is_split_over():
    reduced = lambda *splits, **rest: (
        ParamSpec("w", (4, 6), Init("zeros"), splits, **rest).reduced_over
    )
    assert (
        reduced()
        == reduced(Split("tp", 1))
        == reduced(partial_over=("tp",))
        == ("dp", "cp")
    )
    assert (
        reduced(Split("ep", 0))
        == reduced(Split("tp", 1), Split("ep", 0))
        == reduced(distinct_over=("ep",))
        == ("edp",)
    )


@pytest.mark.parametrize(
    "splits, rest, message",
    [
        ((Split("tp", 0), Split("ep", 0)), {}, "two splits cut dimension 0"),
        ((Split("tp", 0), Split("tp", 1)), {}, "named more than once"),
        ((Split("tp", 0),), {"partial_over": ("tp",)}, "named more than once"),
        ((Split("ep", 0),), {"distinct_over": ("ep",)}, "named more than once"),
        ((Split("tp", 2),), {}, "cuts dimension 2"),
        ((Split("tp", 0, parts=0),), {}, "parts >= 1"),
        ((Split("tp", 0, padded=3),), {}, "padded >= 4"),
        ((Split("cp", 0),), {}, "names the axis 'cp'"),
        ((), {"partial_over": ("pp",)}, "names the axis 'pp'"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(splits, rest, message):
    with pytest.raises(LayoutError, match=message):
        ParamSpec("w", (4, 6), Init("zeros"), splits, **rest)


def test_a_dimension_that_does_not_divide_names_the_axis():
    spec = ParamSpec(
        "w", (4, 6), Init("zeros"), (Split("tp", 1), Split("ep", 0, parts=2))
    )
    with pytest.raises(
        LayoutError,
        match=r"dimension 0 has size 4 in 2 part\(s\), which is not divisible by 3 ep ranks",
    ):
        spec.local_shape({"tp": 2, "ep": 3})


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (5, 1, 3), (2, 3, 2, 3)])
def test_an_interval_is_at_most_2n_minus_1_rectangles_which_follow_each_other(shape):
    total, most = math.prod(shape), max(2 * len(shape) - 1, 1)
    for start, stop in itertools.combinations(range(total + 1), 2):
        rectangles = list(interval_boxes(shape, start, stop))
        assert len(rectangles) <= most
        at = start
        for corner, sizes in rectangles:
            assert flat_offset(shape, corner) == at
            at += math.prod(sizes)
        assert at == stop
