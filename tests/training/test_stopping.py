"""How runs end: signals, limits of steps, samples and time; each saves, says why, and exits with code 0."""

import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from megatron_ds.checkpoint.load import latest
from tests.harness.limits import HUNG
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    SEQ_LENGTH,
    STEPS,
    TINY,
    losses,
    records,
    run_file,
    train,
)
from tests.harness.spoilers import (
    files_limited,
    signal_at_step,
    signal_in_evaluation,
    signal_outside_the_loop,
)
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
LONG = [*TINY, "--mock-data", "--train-iters", "100000"]
EVALUATING = ["--eval-interval", "2", "--eval-iters", "3"]


@pytest.mark.quick
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_any_one_rank_saves_after_the_step_and_exits_well_on_all(
    tmp_path, name, victim
):
    number = getattr(signal, name)
    job = [*MOCK, "--pipeline-model-parallel-size", "2", "--save", tmp_path]
    ended = train(
        2, job, spoil=partial(signal_at_step, number=number, step=3, victim=victim)
    )
    assert latest(tmp_path) == 4, "the ranks agree in the step after"
    assert (
        f"training ended: rank {victim} received {name}; 4 steps, total time 0:0"
        in ended[0].out
    )
    assert (
        run_file(tmp_path, latest(tmp_path))["progress"]["samples"]
        == latest(tmp_path) * GLOBAL_BATCH
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_during_evaluation_saves_and_exits_well(tmp_path, victim):
    job = [*MOCK, *EVALUATING, "--tensor-model-parallel-size", "2", "--save", tmp_path]
    ended = train(
        2,
        job,
        spoil=partial(signal_in_evaluation, number=signal.SIGTERM, victim=victim),
    )
    assert latest(tmp_path) == 2 and list(losses(tmp_path)) == [1, 2]
    assert f"training ended: rank {victim} received SIGTERM; " in ended[0].out
    assert (
        "evaluating on validation: 3 batches of 4 samples\n" in ended[0].out
        and "evaluation time (s): " in ended[0].out
    )


def test_without_a_save_folder_a_signal_still_ends_the_run_well():
    ended = train(
        1, MOCK, spoil=partial(signal_at_step, number=signal.SIGTERM, step=2, victim=0)
    )
    assert (
        "iteration        2/" in ended[0].out
        and "iteration        4/" not in ended[0].out
    )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("at", ["read_flags", "build_replica", "_load"])
def test_a_signal_in_start_up_ends_all_ranks_with_code_0_before_the_first_step(
    tmp_path, at, victim
):
    spoil = partial(
        signal_outside_the_loop, number=signal.SIGTERM, at=at, victim=victim
    )
    ended = train(
        2, [*MOCK, "--tensor-model-parallel-size", "2", "--save", tmp_path], spoil=spoil
    )
    assert (
        "stopped by SIGTERM before the first step: there is nothing to save"
        in ended[0].out
    )
    assert "iteration        1/" not in ended[0].out and latest(tmp_path) is None


def test_a_signal_after_the_last_save_changes_nothing(tmp_path):
    spoil = partial(
        signal_outside_the_loop, number=signal.SIGTERM, at="close", victim=0
    )
    ended = train(1, [*MOCK, "--save", tmp_path], spoil=spoil)
    assert latest(tmp_path) == STEPS and "stopped by" not in ended[0].out


def test_exit_interval_ends_at_its_next_multiple(tmp_path):
    job = [*MOCK, "--save", tmp_path, "--load", tmp_path, "--exit-interval", "2"]
    for step in (2, 4, 6):
        ended = train(1, job)
        assert latest(tmp_path) == step
        assert ("training ended: exit interval 2" in ended[0].out) == (step < STEPS)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_exit_duration_ends_in_good_time_and_saves(tmp_path):
    ended = train(2, [*LONG, "--save", tmp_path, "--exit-duration-in-mins", "0.05"])
    assert "training ended: time limit of 0.05 min reached; " in ended[0].out
    assert latest(tmp_path) == max(losses(tmp_path)) < 100000


def test_train_samples_with_a_growing_batch_ends_with_the_last_whole_batch(tmp_path):
    job = [
        *TINY,
        *"--mock-data --train-samples 40 --rampup-batch-size 2 2 16 --eval-interval 2".split(),
    ]
    at = job.index("--lr-warmup-iters")
    job[at : at + 2] = ["--lr-warmup-samples", "8"]
    job[job.index("--eval-iters") + 1] = "1"
    job[job.index("--global-batch-size") + 1] = "8"
    train(1, [*job, "--save", tmp_path])
    sizes = [record["global_batch_size"] for record in records(tmp_path)]
    assert sizes == [2, 2, 2, 4, 4, 6, 8, 8], (
        "a last batch of 4 of 8 samples is left over"
    )
    assert [record["steps"] for record in records(tmp_path)] == [8] * 8
    last = records(tmp_path)[-1]
    assert [record["step"] for record in records(tmp_path, "validation")] == [
        2,
        4,
        6,
        8,
    ]
    assert (
        last["step"] == 8
        and last["samples"] == 36
        and last["tokens"] == 36 * SEQ_LENGTH
    )


def test_evaluation_gives_the_same_numbers_in_every_layout(tmp_path):
    layouts = [
        (1, []),
        (2, ["--zero-stage", "1"]),
        (
            4,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split(),
        ),
    ]
    found = []
    for ranks, flags in layouts:
        folder = tmp_path / str(ranks)
        ended = train(
            ranks, [*MOCK, *EVALUATING, "--eod-mask-loss", *flags, "--save", folder]
        )
        found.append(
            [
                (r["step"], r["loss"])
                for split in ("validation", "test")
                for r in records(folder, split)
            ]
        )
    assert [step for step, _ in found[0]] == [2, 4, 6, 6]
    for other in found[1:]:
        assert [loss for _, loss in other] == pytest.approx(
            [loss for _, loss in found[0]], rel=1e-6
        )
    assert len({round(loss, 6) for _, loss in found[0]}) == 4, (
        "each evaluation sees other samples"
    )
    assert (
        ended[0].out.count(" validation loss at iteration ") == 3
        and ended[0].out.count(" test loss at iteration ") == 1
    )


def test_evaluation_changes_nothing_of_the_training(tmp_path):
    train(1, [*MOCK, "--save", tmp_path / "plain"])
    train(1, [*MOCK, *EVALUATING, "--save", tmp_path / "evaluated"])
    assert losses(tmp_path / "plain") == losses(tmp_path / "evaluated")


def test_a_disk_that_is_too_full_for_logs_ends_no_run(tmp_path):
    sinks = {
        "--metrics-path": "m.jsonl",
        "--tensorboard-dir": "tb",
        "--trace": "traces",
    }
    flags = [
        word for flag, name in sinks.items() for word in (flag, str(tmp_path / name))
    ]
    out = train(1, [*MOCK, *flags], spoil=partial(files_limited, size=1000))[0].out
    for name in ("to .*m.jsonl", "to .*tb", ".*pipeline-rank-0.json"):
        assert len(re.findall(f"cannot write {name}: File too large", out)) == 1, out
    assert len(re.findall(r"[1-9] record\(s\) of this run are missing in ", out)) == 2
    assert f"iteration        {STEPS}/" in out and "training ended: finished" in out


# From outside, as users do it.


def script(*argv) -> subprocess.Popen:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [warm_python(), *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def read_until(process: subprocess.Popen, words: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it ended without saying {words!r}:\n{said}")


def test_the_first_ctrl_c_saves_and_exits_with_code_0(tmp_path):
    process = script("pretrain_gpt.py", *LONG, "--save", tmp_path)
    try:
        read_until(process, "iteration        2/")
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=HUNG)[0]
    finally:
        process.kill()
    assert process.returncode == 0, rest
    assert "SIGINT" in rest and "Traceback" not in rest
    assert latest(tmp_path) == max(losses(tmp_path)) >= 2


def test_torchrun_that_is_terminated_leaves_a_checkpoint(tmp_path):
    process = script(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "pretrain_gpt.py",
        *LONG,
        "--tensor-model-parallel-size",
        "2",
        "--save",
        tmp_path,
    )
    try:
        read_until(process, "iteration        2/")
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=HUNG)[0]
    finally:
        process.kill()
    assert "training ended: " in rest
    assert latest(tmp_path) == max(losses(tmp_path)) >= 2
