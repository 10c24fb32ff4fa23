"""Adapters at layouts drawn at random, against one process, by the rule of the layout grid.

The grid has every pair of values; here each option is drawn, so that many meet at once.
"""

import random

import pytest

from tests.grid.axes.optimizers import tolerance
from tests.grid.axes.ranks import at_most
from tests.grid.test_layout_grid import (
    MOST_RANKS,
    OPTIONS,
    RULES,
    job_of,
    layout_of,
    name_of,
    with_clear_choices,
)
from tests.harness.covering import random_case
from tests.harness.layout_comparison import difference
from tests.harness.layout_runs import run_layout

pytestmark = [pytest.mark.threads, pytest.mark.one_in(20)]

NUMBER, SEED = 40, 29
EACH_DAY = 20  # the others belong to `make test-all`
WITH_ADAPTERS = [value for value in OPTIONS["adapters"] if value != "none"]


def cases() -> list[dict]:
    draw = random.Random(SEED)
    options = OPTIONS | {"dtype": ("fp32",), "adapters": WITH_ADAPTERS}
    rules = (*RULES, at_most(MOST_RANKS), lambda tp, cp, pp, dp: tp * cp * pp * dp > 1)
    return [random_case(options, rules, draw) for _ in range(NUMBER)]


def marked() -> list:
    return [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.all] * (at >= EACH_DAY))
        for at, case in enumerate(cases())
    ]


@pytest.mark.parametrize("case", marked())
def test_adapters_train_like_in_one_process(case):
    job = job_of(case)
    layout = layout_of(case)
    job, reference, _ = with_clear_choices(job, layout)
    run = run_layout(job, layout)
    apart = difference(run.merged, reference.merged, run.model)
    assert apart.is_within(tolerance(case)), apart
    assert any(".lora_b." in name for name in run.merged[1])
