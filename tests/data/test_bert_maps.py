"""Rows of BERT samples: values of Megatron's C++, and the C++ standard's own value of the random numbers."""

import numpy as np
import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.bert.maps import (
    build_blocks_mapping,
    build_mapping,
    mt19937_64,
    short_ratio,
)

pytestmark = pytest.mark.plan

DOCUMENTS = np.array([0, 3, 4, 9, 11])
SIZES = np.array([10, 12, 9, 30, 7, 8, 20, 15, 6, 5, 5], np.int32)
TITLES = np.array([2, 20, 5, 3], np.int32)
SHORT = [
    [0, 3, 20],
    [9, 11, 20],
    [3, 4, 20],
    [9, 11, 20],
    [7, 9, 5],
    [4, 6, 11],
    [0, 3, 15],
    [7, 9, 20],
    [6, 7, 20],
    [3, 4, 20],
    [4, 7, 20],
]
ALL_SHORT = [[9, 11, 10], [4, 6, 15], [6, 9, 18]]
ONE_SENTENCE = [[7, 9, 2, 2], [0, 3, 0, 0], [4, 7, 2, 1], [9, 11, 3, 3]]


def mapping(documents=DOCUMENTS, sizes=SIZES, **changed):
    arguments = dict(
        num_epochs=1,
        max_num_samples=2**62,
        max_seq_length=32,
        short_seq_prob=0.1,
        seed=1234,
        min_num_sent=2,
    )
    return build_mapping(documents, sizes, **{**arguments, **changed})


def blocks(sizes=SIZES, **changed):
    arguments = dict(
        num_epochs=2,
        max_num_samples=100,
        max_seq_length=32,
        seed=1234,
        use_one_sent_blocks=False,
    )
    return build_blocks_mapping(DOCUMENTS, sizes, TITLES, **{**arguments, **changed})


def with_size(sentence, size):
    sizes = SIZES.copy()
    sizes[sentence] = size
    return sizes


def test_mapping_has_the_golden_values():
    assert (
        mapping().tolist() == [[7, 9, 32], [0, 3, 32], [4, 7, 32], [9, 11, 32]]
        and mapping().dtype == np.uint32
    )
    assert mapping(short_seq_prob=0, min_num_sent=1)[:, :2].tolist() == [
        [3, 4],
        [0, 3],
        [4, 7],
        [9, 11],
        [7, 9],
    ]
    assert mapping(num_epochs=3, max_num_samples=5)[:, :2].tolist() == [
        [0, 3],
        [4, 7],
        [4, 7],
        [9, 11],
        [0, 3],
        [7, 9],
        [7, 9],
        [9, 11],
    ]


def test_short_samples_are_drawn_as_c_draws_them():
    assert short_ratio(0.4) == 3 and short_ratio(0.1) == 10 and short_ratio(0) == 0
    assert (
        mapping(
            num_epochs=2, max_seq_length=20, short_seq_prob=0.4, seed=7, min_num_sent=1
        ).tolist()
        == SHORT
    )
    assert (
        mapping(DOCUMENTS[1:], max_seq_length=20, short_seq_prob=1, seed=7).tolist()
        == ALL_SHORT
    )


def test_documents_with_a_long_sentence_are_left_out_unless_it_is_all_they_have():
    assert mapping(sizes=with_size(5, 513))[:, :2].tolist() == [[0, 3], [9, 11]]
    assert mapping(sizes=with_size(5, 512))[:, :2].tolist() != [[0, 3], [9, 11]]
    assert [3, 4] in mapping(sizes=with_size(3, 513), min_num_sent=1)[:, :2].tolist()
    assert [3, 4] not in blocks(with_size(3, 513), use_one_sent_blocks=True)[
        :, :2
    ].tolist()


def test_blocks_have_the_golden_values():
    assert blocks().tolist() == [
        [0, 3, 0, 0],
        [4, 7, 2, 1],
        [4, 7, 2, 1],
        [9, 11, 3, 3],
        [0, 3, 0, 0],
        [7, 9, 2, 2],
        [7, 9, 2, 2],
        [9, 11, 3, 3],
    ]
    assert (
        blocks(with_size(3, 513), num_epochs=1, use_one_sent_blocks=True).tolist()
        == ONE_SENTENCE
    )


def test_random_numbers_are_those_of_the_c_standard():
    assert (
        mt19937_64(5489, 10000)[-1] == 9981545732273789042
    )  # [rand.predef] of the standard
    assert mt19937_64(5489, 0).tolist() == []


def test_nothing_to_map_is_an_empty_mapping():
    empty = mapping(np.array([0]), np.array([], np.int32))
    assert empty.shape == (0, 3) and empty.dtype == np.uint32
    assert mapping(np.array([0, 0, 1]), np.array([4], np.int32)).shape == (0, 3)
    assert mapping(max_num_samples=0).shape == (0, 3)


def test_boundaries_of_another_corpus_are_an_error():
    for documents in ([], [0, 12], [0, 5, 4], [-1, 3]):
        with pytest.raises(DataError, match="document_indices"):
            mapping(np.array(documents, np.int64))
    with pytest.raises(DataError, match="too short"):
        mapping(max_seq_length=1)
    with pytest.raises(DataError, match="seed -1"):
        mapping(seed=-1)
