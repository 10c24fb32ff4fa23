"""A model that predicts several tokens trains at random layouts as in one process, and each depth learns.

The layouts are random cases of the axes of the grid (test_layout_grid.py).
"""

import random

import pytest

from tests.grid.axes.optimizers import tolerance
from tests.grid.axes.ranks import at_most
from tests.grid.test_layout_grid import (
    OPTIONS,
    RULES,
    alone,
    check_metrics,
    job_of,
    layout_of,
    name_of,
    with_clear_choices,
)
from tests.harness.covering import random_case
from tests.harness.layout_comparison import difference
from tests.harness.layout_runs import run_layout

pytestmark = pytest.mark.threads

NUMBER, QUICK = 40, 1
DEPTHS = ("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.6").split()
# What the depths do not compose with, what has a tolerance of its own, and adapters, which freeze the depths.
LEFT_OUT = {
    "style": ("llama",),
    "dtype": ("fp32",),
    "adapters": ("none",),
    "embeddings": ("tied", "untied", "biased"),
}


def has_equal_tokens(case: dict) -> bool:
    """Whether tokens that begin documents alike may have equal scores, one of which is dropped: rounding chooses
    which where tensor-parallel ranks add."""
    is_divided = case["tp"] > 1
    return case["documents"] == "apart" and case["experts"] == "probs" and is_divided


def cases() -> list[dict]:
    """Random cases, tied and untied by turns, each of other ranks."""
    draw = random.Random(5)
    drawn: list[dict] = []
    found: list[dict] = []
    while len(found) < NUMBER:
        embeddings = ("tied", "untied")[len(drawn) % 2]
        options = OPTIONS | LEFT_OUT | {"embeddings": (embeddings,)}
        case = random_case(options, (*RULES, at_most(4)), draw)
        if case["tp"] * case["cp"] * case["pp"] * case["dp"] == 1:
            continue
        drawn.append(case)
        if not has_equal_tokens(case):
            found.append(case)
    return found


CASES = [
    pytest.param(
        case, id=f"{i}-{name_of(case)}", marks=[pytest.mark.rest] * (i >= QUICK)
    )
    for i, case in enumerate(cases())
]


def test_the_layouts_hold_every_kind_of_parallelism():
    """Each way to share a sequence, each ZeRO stage, and zero-bubble schedules, tied and untied."""
    for name, wanted in (
        ("embeddings", {"tied", "untied"}),
        ("comm", {"none", "p2p", "all_gather", "a2a"}),
        ("zero", {0, 1, 2, 3}),
        ("schedule", {"1f1b", "interleaved", "zb-h2", "zb-v"}),
        ("sp", {0, 1}),
    ):
        assert wanted <= {case[name] for case in cases()}, name


@pytest.mark.parametrize("case", CASES)
def test_a_layout_predicts_several_tokens_like_one_process(case):
    job = [*job_of(case), *DEPTHS]
    layout = layout_of(case)
    job, reference, _ = with_clear_choices(job, layout)
    run = run_layout(job, layout)
    apart = difference(run.merged, reference.merged, run.model)
    limit = tolerance(case)
    assert apart.is_within(limit), apart
    check_metrics(run, reference, 2 * limit.loss)
    for step in run.merged[0].metrics:
        assert {"mtp 1 loss", "mtp 2 loss"} <= step.keys()
    assert "mtp.layers.1.eh_proj.weight" in run.merged[1]


def test_a_layout_trains_otherwise_without_the_depths():
    """Their losses change what the other weights learn."""
    case = cases()[0]
    seeded = [*job_of(case), "--seed", "1"]
    plain = alone(tuple(seeded), "")[0].merged
    predicting = alone(tuple([*seeded, *DEPTHS]), "")[0].merged
    assert predicting[0].losses[-1] != pytest.approx(plain[0].losses[-1], rel=1e-5)
