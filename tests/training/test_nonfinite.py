"""A loss that is not finite is printed, counted and located; training stops or goes on, as told."""

import math
from functools import partial

import pytest

from megatron_ds.checkpoint.folder import steps_in
from megatron_ds.checkpoint.load import latest
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    STEPS,
    records,
    run_file,
    run_pretrain,
    train,
)
from tests.harness.spoilers import poisoned, spoiled_weight

pytestmark = pytest.mark.processes

THIRD_STEP = range(2 * GLOBAL_BATCH, 3 * GLOBAL_BATCH)
ONE_SAMPLE = range(2 * GLOBAL_BATCH + 3, 2 * GLOBAL_BATCH + 4)
PP2 = ["--pipeline-model-parallel-size", "2"]


@pytest.mark.parametrize(
    "module, rank", [("decoder.layers.0", 0), ("decoder.layers.1", 1)]
)
def test_a_nan_stops_the_run_naming_the_first_module_that_made_it(
    tmp_path, module, rank
):
    spoil = partial(poisoned, module=module, samples=ONE_SAMPLE, value=math.nan)
    zero, one = run_pretrain(
        2, [*MOCK, *PP2, "--save", tmp_path, "--save-interval", "2"], spoil=spoil
    )
    assert zero.code == one.code == 2 and one.err == "" and "Traceback" not in zero.err
    assert (
        f"loss is nan at iteration 3, first seen on rank {rank} (pipeline stage {rank}): output of "
        f"{module} (Block, shape [16, 1, 32]): 1 non-finite values"
    ) in zero.err
    assert "--check-for-nan continue" in zero.err
    assert latest(tmp_path) == 2, "the last checkpoint is unharmed"


@pytest.mark.parametrize(
    "value, ranks, flags",
    [
        (math.nan, 1, []),
        (math.inf, 2, ["--zero-stage", "1"]),
        (math.nan, 2, ["--tensor-model-parallel-size", "2", "--bf16"]),
        (math.nan, 2, PP2),
    ],
)
def test_a_run_that_continues_skips_the_step_and_counts_it(
    tmp_path, value, ranks, flags
):
    spoil = partial(
        poisoned, module="decoder.layers.1", samples=THIRD_STEP, value=value
    )
    ended = train(
        ranks,
        [*MOCK, *flags, "--check-for-nan", "continue", "--save", tmp_path],
        spoil=spoil,
    )
    finite = [record["loss"] is not None for record in records(tmp_path)]
    assert finite == [True, True, False, True, True, True]
    assert [record["nan_steps"] for record in records(tmp_path)] == [0, 0, 1, 1, 1, 1]
    assert [record["skipped_steps"] for record in records(tmp_path)] == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    lines = [line for line in ended[0].out.splitlines() if "] iteration " in line]
    assert (
        "| lm loss: NAN |" in lines[2] and "number of nan iterations:   1 |" in lines[2]
    )
    assert "lm loss" in lines[3] and "NAN" not in lines[3]
    assert (
        ended[0].out.count("is skipped (--check-for-nan continue)") == 1
        and "output of decoder.layers.1 " in ended[0].out
    )
    assert run_file(tmp_path, STEPS)["progress"]["nan_steps"] == 1


def test_skipping_leaves_the_weights_as_they_were(tmp_path):
    """The step after the bad one begins where the bad one began: learning rate too."""
    spoil = partial(
        poisoned, module="decoder.layers.0", samples=THIRD_STEP, value=math.nan
    )
    train(1, [*MOCK, "--check-for-nan", "continue", "--save", tmp_path], spoil=spoil)
    rates = [record["learning_rate"] for record in records(tmp_path)]
    assert rates[2] == rates[3] != rates[4]


def test_an_overflow_while_the_loss_scale_is_sought_is_no_nan(tmp_path):
    fp16 = ["--fp16", "--initial-loss-scale", str(2.0**30), "--hysteresis", "1"]
    train(1, [*MOCK, *fp16, "--save", tmp_path])
    last = records(tmp_path)[-1]
    assert last["skipped_steps"] > 1 and last["nan_steps"] == 0
    assert [record["loss_scale"] for record in records(tmp_path)][:3] == [
        2.0**30,
        2.0**29,
        2.0**28,
    ]


@pytest.mark.parametrize(
    "value, flags",
    [
        (math.nan, []),
        (math.inf, ["--zero-stage", "1"]),
        (math.nan, ["--zero-stage", "1", "--async-save"]),
    ],
)
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value, flags):
    spoil = partial(spoiled_weight, step=3, victim=1, value=value)
    command = [
        *MOCK,
        *flags,
        "--check-for-nan",
        "continue",
        "--save",
        tmp_path,
        *"--save-interval 1 --save-total-limit 1".split(),
    ]
    ended = train(2, command, spoil=spoil)
    assert steps_in(tmp_path) == [2] and latest(tmp_path) == 2
    warnings = [line for line in ended[0].out.splitlines() if "is not saved" in line]
    assert len(warnings) == STEPS - 2, "one for each save that was due"
    assert (
        "iteration 3 is not saved: weight of " in warnings[0]
        and f"{tmp_path} are kept" in warnings[0]
    )
    assert f"the last checkpoint is {tmp_path}/iter_0000002" in ended[0].out
