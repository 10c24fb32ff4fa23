"""Boxes against numpy: a logical tensor of distinct numbers is sharded by slicing; every box must name the same numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.checkpoint.logical import flat_offset, interval_boxes, logical_boxes
from megatron_ds.mpu.param_spec import Init, ParamSpec

PADDING = -1


def shards(spec, size):
    """The ranks' shards of a logical tensor holding 0, 1, 2, ...; padding is -1. By slicing alone."""
    logical = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    if spec.split_dim is None:
        return [logical] * size
    if spec.padded:
        missing = [(0, spec.padded - n if d == spec.split_dim else 0) for d, n in enumerate(spec.shape)]
        logical = np.pad(logical, missing, constant_values=PADDING)
    parts = [np.split(part, size, axis=spec.split_dim) for part in np.split(logical, spec.parts, axis=spec.split_dim)]
    return [np.concatenate([part[rank] for part in parts], axis=spec.split_dim) for rank in range(size)]


def box_of(corner, sizes):
    return tuple(slice(at, at + n) for at, n in zip(corner, sizes))


@st.composite
def specs(draw):
    size = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    split_dim = draw(st.sampled_from([None, *range(len(shape))]))
    parts, padded = 1, None
    if split_dim is not None:
        if draw(st.booleans()):
            padded = -(-shape[split_dim] // size) * size + size * draw(st.integers(0, 1))
        else:
            parts = draw(st.integers(1, 3))
            shape[split_dim] *= size * parts
    return ParamSpec("w", tuple(shape), Init("zeros"), split_dim, parts, padded), size


@given(specs(), st.data())
@settings(max_examples=300, deadline=None)
def test_every_element_of_an_interval_is_in_one_box_with_its_logical_place_and_padding_in_none(spec_and_size, data):
    spec, size = spec_and_size
    logical = np.arange(math.prod(spec.shape)).reshape(spec.shape)
    rank = data.draw(st.integers(0, size - 1))
    local = shards(spec, size)[rank]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, local.size)] * 2)))
    found = np.full(local.size, PADDING)
    times = np.zeros(local.size, int)
    for box in logical_boxes(spec, rank, size, start, stop):
        found.reshape(local.shape)[box_of(box.local, box.sizes)] = logical[box_of(box.logical, box.sizes)]
        times.reshape(local.shape)[box_of(box.local, box.sizes)] += 1
    inside = (np.arange(local.size) >= start) & (np.arange(local.size) < stop)
    assert np.array_equal(times, inside & (local.ravel() != PADDING))
    assert np.array_equal(found, np.where(inside, local.ravel(), PADDING))


@given(specs(), st.data())
@settings(max_examples=150, deadline=None)
def test_shards_cut_anywhere_cover_the_logical_tensor_once(spec_and_size, data):
    spec, size = spec_and_size
    times = np.zeros(spec.shape, int)
    for rank in range(size if spec.split_dim is not None else 1):
        total = math.prod(spec.local_shape(size))
        inner = data.draw(st.lists(st.integers(0, total), max_size=4))
        for start, stop in itertools.pairwise(sorted([0, *inner, total])):
            for box in logical_boxes(spec, rank, size, start, stop):
                times[box_of(box.logical, box.sizes)] += 1
    assert (times == 1).all()


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
