"""Document, sample and shuffle indices: Megatron's golden values, and a slow walk over the tokens as
reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.loading.index_maps import (
    build_document_index,
    build_index_maps,
    build_sample_index,
    build_shuffle_index,
    epochs_needed,
    last_epoch_is_separate,
)
from megatron_ds.errors import DataError

pytestmark = pytest.mark.plan

SIZES = np.array([5, 3, 8, 1, 10, 4], np.int32)
ORDER = np.array([2, 0, 5, 4, 1, 3], np.int32)


def walk(lengths, document_index, seq_length):
    """Sample boundaries found token by token, the way the format is defined."""
    stream = [(p, o) for p, d in enumerate(document_index) for o in range(lengths[d])]
    rows = [stream[i] for i in range(0, len(stream), seq_length)] if stream else []
    return [[0, 0], *map(list, rows[1:])]


def test_sample_index_has_the_golden_values():
    one = [[0, 0], [0, 4], [1, 0], [1, 4], [2, 3], [3, 3], [3, 7], [4, 1]]
    assert build_sample_index(SIZES, ORDER, 4).tolist() == one
    two = one + [[7, 0], [8, 1], [8, 5], [8, 9], [9, 3], [10, 3], [11, 2], [11, 6]]
    assert (
        build_sample_index(SIZES, np.concatenate([ORDER, ORDER[::-1]]), 4).tolist()
        == two
    )


def test_shuffles_have_the_golden_values():
    random = np.random.RandomState(1234)
    assert build_document_index(np.arange(6), 1, False, random).tolist() == [
        2,
        1,
        5,
        0,
        4,
        3,
    ]
    assert build_shuffle_index(7, 7, random).tolist() == [5, 0, 3, 4, 2, 6, 1]
    two_epochs = build_document_index(
        np.arange(4), 2, False, np.random.RandomState(1234)
    )
    assert (
        two_epochs.tolist() == [2, 1, 2, 0, 0, 1, 3, 3] and two_epochs.dtype == np.int32
    )


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_sample_index_equals_a_walk_over_the_tokens(sizes, seq_length, random):
    if sum(sizes) == 0:
        return
    order = random.sample(range(len(sizes)), len(sizes))
    index = build_sample_index(
        np.array(sizes, np.int32), np.array(order, np.int32), seq_length
    )
    expected = walk(sizes, order, seq_length)
    assert index.tolist() == expected[: (sum(sizes) - 1) // seq_length + 1]
    assert index.dtype == np.int32


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 60))
def test_epochs_are_the_fewest_that_hold_the_samples(tokens, seq_length, samples):
    epochs = epochs_needed(tokens, seq_length, samples)
    assert epochs * tokens >= samples * seq_length + 1
    assert epochs == 1 or (epochs - 1) * tokens < samples * seq_length + 1


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=12).filter(any),
    st.integers(1, 6),
    st.integers(1, 60),
)
def test_maps_read_each_document_once_an_epoch_and_each_sample_once(
    sizes, seq_length, samples
):
    lengths, documents = np.array(sizes, np.int32), np.arange(1, len(sizes))
    tokens = int(lengths[1:].sum())
    if tokens == 0:
        return
    maps = build_index_maps(lengths, documents, seq_length, samples, seed=5)
    epochs = epochs_needed(tokens, seq_length, samples)
    total = (epochs * tokens - 1) // seq_length
    assert total >= samples
    assert sorted(maps.document_index.tolist()) == sorted(documents.tolist() * epochs)
    assert (
        sorted(maps.shuffle_index.tolist()) == list(range(total))
        and maps.shuffle_index.dtype == np.uint32
    )
    if last_epoch_is_separate(tokens, seq_length, samples, epochs):
        before = ((epochs - 1) * tokens - 1) // seq_length
        assert (
            sorted(maps.document_index[-len(documents) :].tolist())
            == documents.tolist()
        )
        assert sorted(maps.shuffle_index[:before].tolist()) == list(range(before))


def test_a_barely_used_last_epoch_is_shuffled_by_itself():
    # 31 tokens an epoch at s = 4: 7 samples an epoch, so int(0.8 · 7) = 5; 15 of the samples are in two
    # epochs.
    assert last_epoch_is_separate(31, 4, 16, 3) and last_epoch_is_separate(31, 4, 19, 3)
    assert not last_epoch_is_separate(31, 4, 20, 3) and not last_epoch_is_separate(
        31, 4, 7, 1
    )
    maps = build_index_maps(SIZES, np.arange(6), 4, 16, seed=1234)
    assert sorted(maps.document_index[:12].tolist()) == sorted([*range(6)] * 2)
    assert maps.document_index[:12].tolist() != sorted(
        maps.document_index[:12].tolist()
    )
    # The same stream of random numbers: documents of two epochs, then of the last, then both parts of the
    # samples.
    random = np.random.RandomState(1234)
    two, one = np.array([*range(6)] * 2), np.arange(6)
    first, second = np.arange(15), np.arange(15, 23)
    for array in (two, one, first, second):
        random.shuffle(array)
    assert maps.document_index.tolist() == [*two, *one]
    assert maps.shuffle_index.tolist() == [*first, *second]


def test_documents_without_a_sample_are_an_error():
    with pytest.raises(DataError, match="hold 0 tokens"):
        build_index_maps(np.array([0, 0], np.int32), np.arange(2), 4, 10, seed=1)
    with pytest.raises(DataError, match="not one sample of 4"):
        build_index_maps(np.array([2, 2], np.int32), np.arange(2), 4, None, seed=1)
