"""Cuts of the list of layers: exact against brute force, and layouts read as written."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.errors import ConfigError, LayoutError
from megatron_ds.pipeline.stage_bounds import parse_layout, partition

pytestmark = pytest.mark.plan


def loads(costs, bounds):
    return [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:])]


def all_cuts(n, stages):
    return [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 9))
def test_the_cut_is_the_best_of_all_cuts(costs, stages):
    stages = min(stages, len(costs))
    rank = lambda bounds: (
        max(loads(costs, bounds)),
        sum(x * x for x in loads(costs, bounds)),
        bounds,
    )
    assert partition(costs, stages) == min(all_cuts(len(costs), stages), key=rank)


def test_the_largest_stage_is_minimised_not_the_spread():
    assert partition([2, 9, 4, 5], 3) == (
        0,
        1,
        2,
        4,
    )  # minimising max - min gives (0, 2, 3, 4), largest 11


def test_equal_layers_that_do_not_divide_leave_the_early_stages_lighter():
    assert partition([1] * 7, 3) == (0, 2, 4, 7)


def test_costs_that_are_equal_fractions_count_as_equal():
    assert partition([0.1] * 6, 3) == (0, 2, 4, 6)
    assert partition([0.3] + [0.1] * 3, 2) == (0, 1, 4)


def test_layers_that_cost_nothing_still_fill_a_stage():
    assert partition([0, 0, 5], 3) == (0, 1, 2, 3)


def test_many_layers_and_stages_are_cut_at_once():
    costs = [3.7] + [1.1, 1.3] * 64 + [0.01, 9.3]
    assert len(partition(costs, 32)) == 33


@pytest.mark.parametrize(
    "costs, stages, message",
    [
        ([1, 1], 3, "2 layers cannot be cut into 3.*1 to 2"),
        ([1, 1], 0, "into 0.*1 to 2"),
        ([1, -2], 1, "has cost -2"),
        ([1, float("nan")], 1, "has cost nan"),
        ([1, float("inf")], 2, "has cost inf"),
    ],
)
def test_an_impossible_cut_is_refused_with_the_possible_ones(costs, stages, message):
    with pytest.raises(LayoutError, match=message):
        partition(costs, stages)


IS_BLOCK = [False, *[True] * 8, False, False]


@pytest.mark.parametrize(
    "text, bounds",
    [
        ("3,2,3", (0, 4, 6, 11)),
        (" 3, 2 ,3", (0, 4, 6, 11)),
        ("0,4,4", (0, 1, 5, 11)),
        ("4,4,0", (0, 5, 9, 11)),
        ("Et*3|tt|t*3L", (0, 4, 6, 11)),
        ("E t*3, | t*2 | t*3 L", (0, 4, 6, 11)),
        ("ttt|tt|ttt", (0, 4, 6, 11)),
        ("E|(tt)*4|L", (0, 1, 9, 11)),
        ("Et|(t|)*6tL", (0, 2, 3, 4, 5, 6, 7, 8, 11)),
        ("((t)*2|)*3t*2", (0, 3, 5, 7, 11)),
        ("Et*8L", (0, 11)),
        ("8", (0, 11)),
    ],
)
def test_a_layout_is_read_as_written(text, bounds):
    assert parse_layout(text, IS_BLOCK, len(bounds) - 1) == bounds


@pytest.mark.parametrize(
    "text, stages, message",
    [
        (
            "3,2,2",
            3,
            "7 decoder layers, but the model has 8.*for example 2,3,3 or Et.2|t.3|t.3L",
        ),
        ("3,2,99999999999", 3, "100000000004 decoder layers"),
        ("4,4", 3, "2 stages, but the pipeline has 3"),
        ("4,0,4", 3, "stage 1 would hold no layer"),
        ("t*4||t*4", 3, "stage 1 would hold no layer"),
        ("t*4E|t*4L", 2, "E comes once"),
        ("t*4L|t*4", 2, "L once"),
        ("Et*4|Et*4L", 2, "E comes once"),
        ("x*4|t*4", 2, "contains 'x', which is not valid.*Valid: "),
        ("(t*4|t*4", 2, r"contains '\('"),
        ("t*|t*4", 2, r"contains '\*'"),
        ("", 2, "1 stages"),
        ("t*999999999|t", 2, "repeats a part 999999999 times.*at most"),
        ("((((t*9999)*9999)*9999)*9999)", 2, "at most"),
        ("4,-4", 2, "contains '4'"),
    ],
)
def test_a_wrong_layout_is_refused_with_an_example_of_a_right_one(
    text, stages, message
):
    with pytest.raises(ConfigError, match=message):
        parse_layout(text, IS_BLOCK, stages)
