"""The planned bytes of gradients that fill up are those that a step holds: models below and above one bucket."""

import pytest

from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.planning.gradient_memory import Filling, gradient_buffers
from tests.harness.engines import config_of, on_engines, train
from tests.harness.tiny_jobs import tiny_job


def held_and_planned(layout, samples, untie=False):
    """(bytes of gradients that fill up after two steps, those of the plan), of two ranks that split them."""
    job = tiny_job("gpt2", "fp32", untie, 0.0, 4, samples, 8)
    config = config_of(job, f"dp=2,zero=2,{layout}")

    def main(engine):
        train(engine, range(2))
        return engine.optimizer.working_bytes

    held = on_engines(config, main)
    plan = plan_world(config, 0, "cpu").rank_plan(0)
    assert held[0] == held[1]
    return held[0], plan.buffers


@pytest.mark.threads
@pytest.mark.parametrize("samples", [2, 4, 8], ids="{} samples".format)
@pytest.mark.parametrize("bucket", [10**9, 40_000, 20_000, 5000, 1000])
def test_with_accumulation_the_plan_has_what_lives_at_once(bucket, samples):
    """The model has 57,000 parameters. Its embedding, which the head uses as well, fills during all of the backward."""
    held, planned = held_and_planned(f"bucket={bucket}", samples)
    assert held == planned


@pytest.mark.threads
@pytest.mark.parametrize(
    "layout, most_besides",
    [
        ("bucket=1000000000", 0),
        ("bucket=5000", 0),
        ("bucket=5000,accumulate=full", 0),
        ("bucket=40000", 1),
    ],
)
def test_without_a_shared_weight_at_most_one_buffer_more_is_planned(
    layout, most_besides
):
    for samples in (2, 8):
        held, planned = held_and_planned(layout, samples, untie=True)
        assert held <= planned <= held + most_besides * 40_000 * 4


@pytest.mark.plan
def test_buffers_of_one_stage_fill_at_a_time_and_the_next_one_beside_a_sum():
    one = Filling(0, whole=100, at_once=20, longest=10)
    other = Filling(1, whole=60, at_once=24, longest=12)
    shared = Filling(None, whole=5, at_once=5, longest=5)
    sets = [one, other, shared]
    assert gradient_buffers(sets, microbatches=2, kept_whole=False) == 24 + 5 + 12
    assert gradient_buffers(sets, microbatches=2, kept_whole=True) == 165
    assert gradient_buffers(sets, microbatches=1, kept_whole=True) == 41
    # One bucket is one buffer, and two from the second micro-batch on.
    single = [Filling(0, whole=7, at_once=7, longest=7)]
    assert gradient_buffers(single, microbatches=1, kept_whole=False) == 7
    assert gradient_buffers(single, microbatches=2, kept_whole=False) == 14
    assert gradient_buffers([], microbatches=2, kept_whole=False) == 0
