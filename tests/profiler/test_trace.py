"""`--trace` on real ranks: what was recorded is what the schedule says, in an order that could have been."""

from functools import partial

import pytest

from megatron_ds.extensions.report.trace_files import read_traces, steps_of
from megatron_ds.pipeline.instruction import COMPUTE, Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from tests.harness.pretraining import GLOBAL_BATCH, MOCK, run_pretrain, train

pytestmark = pytest.mark.processes


def test_the_recorded_steps_are_the_schedule_with_true_dependencies(tmp_path):
    train(
        2,
        [
            *MOCK,
            *"--train-iters 4 --pipeline-model-parallel-size 2".split(),
            "--trace",
            tmp_path,
            "--trace-steps",
            "2",
            "3",
        ],
    )
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["pipeline-rank-0.json", "pipeline-rank-1.json"]
    steps = steps_of(read_traces(tmp_path / name for name in files))
    assert len(steps) == 2
    lowered = lower(SCHEDULES["1f1b"](2, GLOBAL_BATCH), 2, tied=(0, 1))
    for step in steps:
        when = {}
        for rank, entries in step.items():
            assert tuple(i for i, _, _ in entries if i.op in COMPUTE) == tuple(
                i for i in lowered[rank] if i.op in COMPUTE
            )
            assert all(start <= end for _, start, end in entries)
            assert all(
                end <= start for (_, _, end), (_, start, _) in zip(entries, entries[1:])
            )
            when |= {
                (i.op, i.stage, i.microbatch): (start, end) for i, start, end in entries
            }
        slack = 0.0005  # the two processes measure the distance between their two clocks each by itself
        for k in range(GLOBAL_BATCH):
            assert when[Op.F, 0, k][1] <= when[Op.F, 1, k][0] + slack
            assert when[Op.F, 1, k][1] <= when[Op.B, 1, k][0]
            assert when[Op.B, 1, k][1] <= when[Op.B, 0, k][0] + slack


def test_of_several_pipelines_the_first_is_recorded_and_none_without_the_flag(tmp_path):
    train(
        2,
        [
            *MOCK,
            "--train-iters",
            "3",
            "--trace",
            tmp_path / "traces",
            "--trace-steps",
            "1",
            "5",
        ],
    )
    (path,) = (tmp_path / "traces").iterdir()
    assert len(steps_of(read_traces([path]))) == 3
    train(1, [*MOCK, "--train-iters", "3"])
    assert [p.name for p in tmp_path.iterdir()] == ["traces"]


def test_a_place_that_cannot_be_written_to_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    fails = partial(run_pretrain, 1)
    (ended,) = fails([*MOCK, "--trace", tmp_path / "file"])
    assert ended.code == 2 and "--trace: nothing can be written in" in ended.err
    (ended,) = fails([*MOCK, "--trace", tmp_path, "--trace-steps", "3", "2"])
    assert ended.code == 2 and "ends before it begins" in ended.err
    (ended,) = fails([*MOCK, "--trace-steps", "3", "4"])
    assert ended.code == 2 and "without --trace" in ended.err
