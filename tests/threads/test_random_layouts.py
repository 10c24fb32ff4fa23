"""Random models, optimizers and layouts that the configuration accepts train like one process."""

import os

import pytest

from tests.harness.layout_runs import stray
from tests.harness.random_jobs import nth_job
from tools.compare_layouts import TOLERANCE
from tools.layout_comparison import Difference

STEPS = 4
SEEDS = range(200 if os.environ.get("MEGATRON_DS_TEST_ALL") else 10)
# Losses of LAMB and Muon: the update follows the rounding of the gradient (test_optimizer_layouts.py).
LOOSE = Difference(loss=1e-5, grad_norm=1e-5, weights=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accepted_trains_like_one_process(seed):
    job, layout = nth_job(seed)
    difference, _ = stray(job, layout, STEPS)
    within = LOOSE if {"muon", "lamb"} & set(job) else TOLERANCE["fp32"]
    assert difference.is_within(within), f"{layout}: {difference}\n{' '.join(job)}"
