"""`make test` runs a part of the costly tests, and `make test-rest` the others."""

import pytest

from tests.harness.samples import left_for_rest

pytestmark = pytest.mark.plan


def kept(*tests: tuple[str, int]) -> list[int]:
    left = left_for_rest(tests)
    return [i for i in range(len(tests)) if i not in left]


def test_a_test_without_marker_is_kept():
    assert kept(*[("plain", 1)] * 4) == [0, 1, 2, 3]


def test_of_few_cases_the_first_is_kept():
    assert kept(("short", 3), ("short", 3), ("another", 3)) == [0, 2]


def test_one_of_n_is_kept_each_at_another_place():
    assert kept(*[("costly", 3)] * 11) == [0, 4, 8, 9]
