"""Difficulties against the integers of DeepSpeed's scheduler (0.19.8), and what a wrong schedule is told."""

import math
import sys
from fractions import Fraction
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.data_efficiency.difficulty import Rise, make_difficulty

pytestmark = pytest.mark.plan

STEPS = (1, 2, 5, 6, 20, 21, 40, 50, 60, 61, 89, 90, 100, 101, 120)
DEEPSPEED = [
    (
        64,
        1024,
        "fixed_linear",
        {"total_curriculum_step": 100, "difficulty_step": 8},
        [72, 80, 112, 120, 256, 264, 448, 544, 640, 648, 912, 928, 1024, 1024, 1024],
    ),
    (
        8,
        100,
        "fixed_linear",
        {"total_curriculum_step": 40, "difficulty_step": 16},
        [16, 16, 16, 16, 48, 48, 96, 100, 100, 100, 100, 100, 100, 100, 100],
    ),
    (
        10,
        1000,
        "fixed_root",
        {"total_curriculum_step": 80, "difficulty_step": 7, "root_degree": 2},
        [
            119,
            161,
            252,
            280,
            504,
            511,
            707,
            791,
            861,
            868,
            1000,
            1000,
            1000,
            1000,
            1000,
        ],
    ),
    (
        1,
        100,
        "fixed_root",
        {"total_curriculum_step": 90, "difficulty_step": 1, "root_degree": 3},
        [23, 28, 38, 41, 60, 61, 76, 82, 87, 87, 99, 100, 100, 100, 100],
    ),
    (
        1,
        2048,
        "fixed_root",
        {"total_curriculum_step": 90, "difficulty_step": 64, "root_degree": 0.5},
        [64, 64, 64, 64, 64, 64, 384, 576, 896, 896, 1984, 2048, 2048, 2048, 2048],
    ),
    (
        8,
        512,
        "fixed_discrete",
        {"difficulty": [8, 128, 64, 512, 256], "max_step": [5, 20, 21, 60]},
        [8, 8, 8, 128, 128, 64, 512, 512, 512, 512, 512, 512, 512, 512, 512],
    ),  # once at the maximum it stays
    (
        8,
        1024,
        "fixed_discrete",
        {"difficulty": [8, 128, 64, 512], "max_step": [5, 20, 50]},
        [8, 8, 8, 128, 128, 64, 64, 64, 512, 512, 512, 512, 512, 512, 512],
    ),
]


def block(low=8, high=1024, kind="fixed_linear", config=None, **more):
    config = (
        {"total_curriculum_step": 10, "difficulty_step": 8}
        if config is None
        else config
    )
    return {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": kind,
        "schedule_config": config,
        **more,
    }


@pytest.mark.parametrize("low, high, kind, config, expected", DEEPSPEED)
def test_difficulties_are_deepspeeds_integers(low, high, kind, config, expected):
    difficulty = make_difficulty(block(low, high, kind, config))
    assert [difficulty.at(step) for step in STEPS] == expected


@pytest.mark.parametrize(
    "kind, config",
    [
        ("fixed_linear", {"total_curriculum_step": 9, "difficulty_step": 64}),
        ("fixed_discrete", {"difficulty": [3, 5], "max_step": [4]}),
    ],
)
def test_a_schedule_that_cannot_rise_stays_at_its_only_value(kind, config):
    assert {
        make_difficulty(block(100, 100, kind, config)).at(step) for step in range(1, 30)
    } == {100}


def test_without_a_lowest_value_a_rise_may_begin_below_its_minimum():
    assert [Rise(8, 100, 40, 16, lowest=0).at(step) for step in (0, 1, 4, 40, 48)] == [
        0,
        0,
        16,
        96,
        100,
    ]


@given(
    low=st.integers(1, 500),
    more=st.integers(1, 5000),
    steps=st.integers(1, 1000),
    multiple=st.integers(1, 64),
    root=st.sampled_from([1, 2, 3]),
    step=st.integers(1, 2000),
)
def test_a_rise_never_falls_keeps_its_bounds_and_is_near_the_exact_root(
    low, more, steps, multiple, root, step
):
    rise = Rise(low, low + more, steps, multiple, root)
    value = rise.at(step)
    assert value <= rise.at(step + 1) and value <= low + more
    assert value % multiple == 0 or value == low + more
    if (
        rise.floor < value < low + more
    ):  # value ≤ (t/T)^(1/p) (max − min) + min < value + k, exactly
        slack = Fraction(1, 10**6)  # a float may lie on the other side of an integer
        least, most = (
            max(Fraction(0), (bound - low) / Fraction(more)) ** root
            for bound in (value - slack, value + multiple + slack)
        )
        assert least <= Fraction(step, steps) <= most


def test_a_custom_schedule_is_called_with_the_step_and_its_answer_checked(monkeypatch):
    module = ModuleType("my_schedules")
    module.squares, module.number = (lambda step: step * step if step != 3 else 2.5), 7
    monkeypatch.setitem(sys.modules, "my_schedules", module)
    difficulty = make_difficulty(
        block(1, 25, "custom", {"function": "my_schedules:squares"})
    )
    assert [difficulty.at(step) for step in (1, 2, 4, 5)] == [1, 4, 16, 25]
    for step, said in [
        (3, "returned 2.5 for step 3"),
        (6, "from 1 to the max_difficulty, 25"),
    ]:
        with pytest.raises(ConfigError, match=said):
            difficulty.at(step)
    for name, said in [
        ("squares", "import path"),
        ("my_schedules:cubes", "cannot be imported"),
        ("no_such:f", "PYTHONPATH"),
        ("my_schedules:number", "not a function"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make_difficulty(block(1, 25, "custom", {"function": name}))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"min_difficulty": 8}, "max_difficulty is missing"),
        (block(low=9.5), "min_difficulty is 9.5; give an integer"),
        (block(low=True), "min_difficulty is True"),
        (block(low=2000), "min_difficulty 2000 is above max_difficulty 1024"),
        (block(kind="fixed_liner"), "did you mean 'fixed_linear'"),
        (block(kind=None), "Known: fixed_linear, fixed_root, fixed_discrete, custom"),
        (block(config=[]), "not a block"),
        (
            block(config={"difficulty_step": 8, "root_degree": 2}),
            "missing: total_curriculum_step and unknown: root_degree",
        ),
        (
            block(config={"difficulty_step": 0, "total_curriculum_step": 5}),
            "difficulty_step is 0; give an integer of at least 1",
        ),
        (
            block(
                kind="fixed_root",
                config={
                    "difficulty_step": 8,
                    "total_curriculum_step": 5,
                    "root_degree": 0,
                },
            ),
            "degree is 0",
        ),
        (
            block(
                kind="fixed_root",
                config={
                    "difficulty_step": 8,
                    "total_curriculum_step": 5,
                    "root_degree": math.nan,
                },
            ),
            "is nan",
        ),
        (
            block(
                kind="fixed_discrete",
                config={"difficulty": [8, 16], "max_step": [5, 9]},
            ),
            "must be shorter by one",
        ),
        (
            block(
                kind="fixed_discrete",
                config={"difficulty": [8, 16, 32], "max_step": [9, 9]},
            ),
            "the steps must rise",
        ),
        (
            block(
                kind="fixed_discrete", config={"difficulty": [8, 2048], "max_step": [9]}
            ),
            "2048, above max_difficulty 1024",
        ),
        (
            block(kind="fixed_discrete", config={"difficulty": "8", "max_step": [9]}),
            "give a list of integers",
        ),
    ],
)
def test_a_wrong_schedule_is_named_with_its_numbers(settings, said):
    with pytest.raises(
        ConfigError, match="^the seqlen metric: .*" + said.replace("(", r"\(")
    ):
        make_difficulty(settings, "the seqlen metric")
