"""Covering arrays against the whole product."""

import itertools

import pytest

from tests.harness.covering import cover_pairs, with_each_value

pytestmark = pytest.mark.plan

OPTIONS = {
    "a": (1, 2, 4),
    "b": (1, 2, 4),
    "c": ("x", "y", "z"),
    "d": (0, 1),
    "e": (0, 1, 2),
}
RULES = (
    lambda a, b: a * b <= 8,
    lambda c, d: c != "x" or d == 1,
    lambda d, e: e == d or e == 2,
)


def is_legal(case) -> bool:
    first, second, third = RULES
    return (
        first(case["a"], case["b"])
        and second(case["c"], case["d"])
        and third(case["d"], case["e"])
    )


def pairs(cases) -> set:
    return {
        pair
        for case in cases
        for pair in itertools.combinations(sorted(case.items()), 2)
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_of_a_legal_case_is_in_few_legal_cases(seed):
    product = [
        dict(zip(OPTIONS, values)) for values in itertools.product(*OPTIONS.values())
    ]
    legal = [case for case in product if is_legal(case)]
    found = cover_pairs(OPTIONS, RULES, seed=seed)
    assert all(map(is_legal, found))
    assert pairs(found) == pairs(legal)
    assert len(found) <= 14 < len(legal)


def test_chosen_cases_count_and_cheap_ones_are_preferred():
    chosen = cover_pairs(OPTIONS | {"d": (1,)}, RULES)
    found = cover_pairs(OPTIONS, RULES, chosen=chosen)
    assert found[: len(chosen)] == chosen
    assert len(found) - len(chosen) < len(cover_pairs(OPTIONS, RULES))


def test_few_cases_hold_each_value():
    cases = cover_pairs(OPTIONS, RULES)
    few = with_each_value(cases)
    assert len(few) < len(cases)
    assert {*itertools.chain(*(case.items() for case in few))} == {
        (name, value) for name, values in OPTIONS.items() for value in values
    }
