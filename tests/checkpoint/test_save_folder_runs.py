"""A save folder belongs to one run and to one live job, seen from the entry script."""

import json
import os
import re
import signal
import subprocess
from functools import partial

import pytest

from megatron_ds.checkpoint.load import latest
from tests.harness.pretraining import (
    MOCK,
    STEPS,
    TINY,
    losses,
    records,
    run_file,
    run_pretrain,
    train,
)
from tests.harness.spoilers import signal_at_step
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes


def files_in(folder):
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(argv, ranks=1, spoil=None):
    """The error, which rank 0 reports for all, before the model is built."""
    ended = run_pretrain(ranks, argv, spoil=spoil)
    assert [e.code for e in ended] == [2] * ranks and [e.err for e in ended[1:]] == [
        ""
    ] * (ranks - 1), ended
    assert "Traceback" not in ended[0].err and "grid: " not in ended[0].out
    return ended[0].err


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """(folder, what rank 0 logged) of a run that saved three times."""
    folder = tmp_path_factory.mktemp("used") / "s1"
    return folder, train(1, [*MOCK, "--save", folder, "--save-interval", "2"])[0].out


def test_a_run_writes_nothing_into_the_folder_of_another(used):
    folder, _ = used
    before = files_in(folder)
    run_id = run_file(folder, STEPS)["run_id"]
    message = refused(
        [*TINY, "--mock-data", "--train-iters", "3", "--seed", "7", "--save", folder],
        ranks=2,
    )
    assert message.startswith(
        f"error: --save {folder} holds another run: iteration {STEPS} (run id "
        f"{run_id}, written "
    )
    assert files_in(folder) == before


def test_saves_and_the_end_are_logged_with_path_seconds_and_size(used):
    folder, out = used
    for step in (2, 4, 6):
        assert re.search(
            rf"^saved {folder}/iter_000000{step} in \d+\.\d s \(\d+\.\d kB\)$",
            out,
            re.MULTILINE,
        )
    assert f"the last checkpoint is {folder}/iter_0000006" in out


def test_a_finished_run_has_nothing_to_do(used):
    folder, _ = used
    out = train(2, [*TINY, "--mock-data", "--train-iters", "5", "--load", folder])[
        0
    ].out
    assert (
        "training ended: nothing to do: the checkpoint is at iteration 6 (24 samples, 384 tokens) and "
        "--train-iters is 5" in out
    )
    assert re.search(
        rf"^loaded {folder}, iteration 6, in \d+\.\d s$", out, re.MULTILINE
    )


def test_a_run_keeps_its_id_through_restarts_and_overwrite_save_keeps_the_former_run(
    tmp_path,
):
    job = [*MOCK, "--save", tmp_path, "--save-interval", "2", "--exit-interval", "2"]
    train(1, [*job, "--load", tmp_path])
    train(2, [*job, "--load", tmp_path])
    first = run_file(tmp_path, 2)["run_id"]
    assert run_file(tmp_path, 4)["run_id"] == first
    train(2, [*job, "--overwrite-save", "--seed", "7"])
    [aside] = tmp_path.glob(f"replaced-{first}-*")
    assert (
        latest(tmp_path) == 2
        and latest(aside) == 4
        and list(losses(aside)) == [1, 2, 3, 4]
    )
    run = run_file(tmp_path, 2)
    assert (
        run["run_id"] != first
        and run["config"]["checkpoint"]["overwrite_save"] is False
    )
    assert list(losses(tmp_path)) == [1, 2]


def test_a_save_interval_without_a_folder_is_a_warning():
    out = train(1, [*MOCK, "--save-interval", "2"])[0].out
    assert re.search(
        r"--save-interval 2 +no checkpoint is written without --save DIR", out
    )


class second_job:
    """While the first job is in its third step, the command `argv`; its end is left in `path`."""

    def __init__(self, rank, *, argv, path):
        self.rank, self.argv, self.path = rank, argv, path

    def __enter__(self):
        from megatron_ds.training import trainer

        self.real = trainer.train_step
        trainer.train_step = self.step

    def step(self, engine, batch, progress, **options):
        if self.rank == 0 and progress.step == 2:
            environment = {
                k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")
            }
            ended = subprocess.run(
                self.argv,
                capture_output=True,
                text=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )
            self.path.write_text(
                json.dumps([ended.returncode, ended.stderr, os.getpid()])
            )
        return self.real(engine, batch, progress, **options)

    def __exit__(self, *_):
        from megatron_ds.training import trainer

        trainer.train_step = self.real


@pytest.mark.quick
def test_a_second_live_job_is_refused_naming_the_first_which_goes_on_undisturbed(
    tmp_path,
):
    folder, path = tmp_path / "tw", tmp_path / "second"
    job = [
        str(word)
        for word in (*MOCK, "--save", folder, "--load", folder, "--save-interval", "1")
    ]
    train(
        1,
        job,
        spoil=partial(
            second_job, argv=[warm_python(), "pretrain_gpt.py", *job], path=path
        ),
    )
    code, err, pid = json.loads(path.read_text())
    assert code == 2
    assert re.search(
        rf"^error: cannot save in {folder}: it is in use by process {pid} on \S+, since "
        rf"\d{{4}}-",
        err,
    )
    assert latest(folder) == STEPS and [
        record["step"] for record in records(folder)
    ] == [1, 2, 3, 4, 5, 6]
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_after_a_signal_the_next_start_takes_the_folder_at_once(tmp_path, number):
    job = [*MOCK, "--save", tmp_path, "--load", tmp_path, "--save-interval", "1"]
    spoil = partial(signal_at_step, number=number, step=3, victim=0)
    if number == signal.SIGTERM:
        train(2, job, spoil=spoil)
    else:
        with pytest.raises(RuntimeError, match="code -9"):
            run_pretrain(2, job, spoil=spoil)
    assert (tmp_path / ".lock").exists() == (number == signal.SIGKILL)
    out = train(2, job)[0].out
    assert latest(tmp_path) == STEPS and ("taking over the lock" in out) == (
        number == signal.SIGKILL
    )
