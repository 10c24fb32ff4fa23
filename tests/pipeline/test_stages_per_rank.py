"""Real ranks that hold several stages, or split their backward: train, evaluate, save, go on at another
schedule."""

import math
import re
from functools import partial

import pytest

from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    STEPS,
    losses,
    records,
    run_pretrain,
    saved_state,
    train,
)
from tests.harness.spoilers import poisoned

pytestmark = pytest.mark.processes

HALF = STEPS // 2


def with_values(job, **values):
    """The job with other values of flags that it has."""
    job = list(job)
    for name, value in values.items():
        job[job.index("--" + name.replace("_", "-")) + 1] = str(value)
    return job


JOB = [*with_values(MOCK, num_layers=4, eval_iters=2), "--eval-interval", str(HALF)]
PP2 = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED, ZB_V = (
    [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"],
    [*PP2, "--pipeline-schedule", "zb-v"],
)


@pytest.mark.quick
def test_a_run_goes_on_at_other_schedules_as_if_nothing_had_happened(tmp_path):
    alone, folder = tmp_path / "alone", tmp_path / "ranks"
    train(1, [*JOB, "--save", alone])
    job = [*JOB, "--save", folder, "--load", folder]
    said = [
        train(2, [*job, *flags])[0].out
        for flags in (
            [*INTERLEAVED, "--exit-interval", 2],
            [*ZB_V, "--exit-interval", 4],
            [*PP2, "--enable-zbh1-pipeline"],
        )
    ]
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-6) and list(
        losses(folder)
    ) == [1, 2, 3, 4, 5, 6]
    evaluations, expected = (
        [r["loss"] for r in records(where, "validation")] for where in (folder, alone)
    )
    assert len(expected) > 1 and evaluations == pytest.approx(expected, rel=1e-6)
    assert saved_state(folder, STEPS).keys() == saved_state(alone, STEPS).keys()
    assert [
        f"schedule: {name}, " in out
        for name, out in zip(("interleaved", "zb-v", "zb-h1"), said)
    ] == [True] * 3
    assert "F0'" in said[0] and re.search(
        r"stage 3: .*% +rank 0 +1 block, .* decoder", said[1]
    )


def test_a_nan_is_located_by_the_stage_of_the_model_that_made_it():
    module, rank, stage = (
        "decoder.layers.2",
        1,
        2,
    )  # zb-v: stages 0 and 3 on rank 0, 1 and 2 on rank 1
    spoil = partial(
        poisoned,
        module=module,
        samples=range(2 * GLOBAL_BATCH, 2 * GLOBAL_BATCH + 1),
        value=math.nan,
    )
    zero, one = run_pretrain(2, [*JOB, *ZB_V], spoil=spoil)
    assert zero.code == one.code == 2 and one.err == ""
    assert (
        f"loss is nan at iteration 3, first seen on rank {rank} (pipeline stage {stage}): "
        f"output of {module} "
    ) in zero.err
