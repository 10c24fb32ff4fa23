"""Random models, optimizers and layouts that the configuration accepts train like one process."""

import os

import pytest

from tests.harness.layout_comparison import Difference
from tests.harness.layout_runs import stray
from tests.harness.random_jobs import BATCH, STEPS, nth_job
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.threads

SEEDS = range(200 if os.environ.get("MEGATRON_DS_TEST_ALL") else 10)
# Adam normalizes gradients of any size, so a weight whose gradient is nearly rounding moves by it; updates of
# LAMB and Muon follow the rounding of whole gradients (test_optimizer_layouts.py).
WITHIN = Difference(loss=1e-6, grad_norm=1e-6, weights=1e-4)
LOOSE = Difference(loss=1e-5, grad_norm=1e-5, weights=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accepted_trains_like_one_process(seed):
    job, layout = nth_job(seed)
    difference, _ = stray(job, layout, STEPS)
    within = LOOSE if {"muon", "lamb"} & set(job) else WITHIN
    assert difference.is_within(within), f"{layout}: {difference}\n{' '.join(job)}"


def test_a_sink_without_a_weight_is_on_the_device_of_the_queries():
    """ZeRO 3 builds a model on the meta device."""
    job = [
        *tiny_job("gpt2", "fp32", False, 0.0, 2, BATCH, STEPS),
        "--softmax-type",
        "off-by-one",
    ]
    difference, _ = stray(job, "dp=2,zero=3", STEPS)
    assert difference.is_within(WITHIN), difference
