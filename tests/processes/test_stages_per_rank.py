"""Real ranks that hold several stages, or split their backward: train, evaluate, save, go on at another schedule."""

import math
from functools import partial

import pytest

from tests.harness.pretraining import GLOBAL_BATCH, MOCK, STEPS, losses, records, run_pretrain, saved_state, train
from tests.harness.spoilers import poisoned

HALF = STEPS // 2


def with_values(job, **values):
    """The job with other values of flags that it has."""
    job = list(job)
    for name, value in values.items():
        job[job.index("--" + name.replace("_", "-")) + 1] = str(value)
    return job


JOB = [*with_values(MOCK, num_layers=4, eval_iters=2), "--eval-interval", str(HALF)]
PP2 = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED, ZB_V = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"], [*PP2, "--pipeline-schedule", "zb-v"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(1, [*JOB, "--save", folder])
    return folder


@pytest.mark.parametrize("first, then", [(INTERLEAVED, ZB_V), (ZB_V, [*PP2, "--enable-zbh1-pipeline"])],
                         ids=["interleaved, zb-v", "zb-v, zb-h1"])
def test_a_run_goes_on_at_another_schedule_as_if_nothing_had_happened(tmp_path, one_process, first, then):
    job = [*JOB, "--save", tmp_path, "--load", tmp_path]
    started = train(2, [*job, *first, "--exit-interval", HALF])[0].out
    ended = train(2, [*job, *then])[0].out
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=1e-6) and list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    evaluations, expected = ([r["loss"] for r in records(folder, "validation")] for folder in (tmp_path, one_process))
    assert len(expected) > 1 and evaluations == pytest.approx(expected, rel=1e-6)
    assert saved_state(tmp_path, STEPS).keys() == saved_state(one_process, STEPS).keys()
    assert f"schedule: {'interleaved' if first is INTERLEAVED else 'zb-v'}, " in started and "F0'" in started
    assert f"schedule: {'zb-v' if then is ZB_V else 'zb-h1'}, " in ended
    if ZB_V in (first, then):
        assert "stage 3:" in (started + ended) and "rank 0   decoder" in (started + ended)


@pytest.mark.parametrize("flags, rank", [(INTERLEAVED, 0), (ZB_V, 1)], ids=["interleaved", "zb-v"])
def test_a_nan_is_located_by_the_stage_of_the_model_that_made_it(flags, rank):
    module, stage = "decoder.layers.2", 2
    spoil = partial(poisoned, module=module, samples=range(2 * GLOBAL_BATCH, 2 * GLOBAL_BATCH + 1), value=math.nan)
    zero, one = run_pretrain(2, [*JOB, *flags], spoil=spoil)
    assert zero.code == one.code == 2 and one.err == ""
    assert f"loss is nan at iteration 3, first seen on rank {rank} (pipeline stage {stage}): output of {module} " in zero.err
