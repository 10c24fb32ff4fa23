"""`make test` runs a part of the costly tests: all parts together are all cases."""

import pytest

from tests.harness.samples import left_for_other_parts

pytestmark = pytest.mark.plan

# a test that is not divided, one of seven cases in three parts, one of two cases in three parts
TESTS = [("plain", 1)] * 4 + [("costly", 3)] * 7 + [("short", 3)] * 2


def kept(part: int) -> set[int]:
    return set(range(len(TESTS))) - set(left_for_other_parts(TESTS, part))


def test_parts_in_a_row_have_all_cases():
    assert kept(329) | kept(330) | kept(331) == set(range(len(TESTS)))


@pytest.mark.parametrize("part", range(6))
def test_every_part_has_every_test_and_no_more_than_its_share(part):
    names = [TESTS[i][0] for i in kept(part)]
    assert names.count("plain") == 4
    assert names.count("costly") in (2, 3)
    assert names.count("short") == 1
