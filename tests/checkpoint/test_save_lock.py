import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ds.checkpoint import lock as locks
from megatron_ds.checkpoint.lock import SaveLock, locked, this_process
from megatron_ds.checkpoint.lock_file import LOCK
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.group import solo
from tests.harness.deaths import forked
from tests.harness.limits import HUNG
from tests.harness.states import save_step

pytestmark = pytest.mark.plan

SOON, LATE = 0.05, 3600.0  # seconds


def left_behind(folder: Path, **changes) -> Path:
    """The lock of a process that did not release it; by default one that runs elsewhere."""
    owner = replace(
        this_process({}), **{"machine": "another boot", "host": "node7", **changes}
    )
    (folder / LOCK).write_text(json.dumps(vars(owner)))
    return folder / LOCK


def a_process_that_ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_live_process_of_this_machine_keeps_others_out_at_once_and_is_named(tmp_path):
    keeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        machine = this_process({}).machine
        left_behind(
            tmp_path,
            machine=machine,
            pid=keeper.pid,
            born=locks._born(keeper.pid),
            since="Monday",
            job="Slurm job 7",
        )
        os.utime(tmp_path / LOCK, (0, 0))  # suspended for long
        with (
            pytest.raises(
                CheckpointError,
                match=rf"cannot save in .*: it is in use by process {keeper.pid} on node7 "
                r"\(Slurm job 7\), since Monday\. .*delete .*/\.lock",
            ),
            locked(tmp_path, solo(), stale=LATE),
        ):
            pass
        with pytest.raises(CheckpointError, match=f"process {keeper.pid}"):
            save_step(tmp_path, 1, seed=1)
    finally:
        keeper.communicate(b"\n")
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.parametrize(
    "changes",
    [{"pid": "ended"}, {"born": 1}],
    ids=["no such process", "its pid was given to another"],
)
def test_a_lock_of_a_process_of_this_machine_that_is_gone_is_taken_over_at_once(
    tmp_path, changes, caplog
):
    changes = {
        name: a_process_that_ended() if value == "ended" else value
        for name, value in changes.items()
    }
    left_behind(tmp_path, machine=this_process({}).machine, **changes)
    with locked(tmp_path, solo(), stale=LATE) as lock:
        assert json.loads((tmp_path / LOCK).read_text())["token"] == lock.mine.token
    assert "taking over the lock" in caplog.text and "node7" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_live_process_whose_start_time_could_not_be_read_is_not_taken_for_ended(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        # /proc cannot be read for a moment
        patch.setattr(locks, "_born", lambda pid: locks.HIDDEN)
        owner = this_process({})
    assert locks._runs_here(owner) is None
    assert locks._runs_here(replace(owner, pid=a_process_that_ended())) is False


def test_a_save_killed_by_sigkill_leaves_nothing_that_the_next_one_waits_for(tmp_path):
    def hold():
        with locked(tmp_path, solo()):
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(hold), 0)
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path, solo(), stale=LATE):
        pass


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"token": 1}'])
def test_a_lock_from_elsewhere_is_taken_over_when_its_time_does_not_change(
    tmp_path, content, caplog
):
    path = left_behind(tmp_path)
    if content is not None:
        path.write_text(content)
    with locked(tmp_path, solo(), stale=SOON, poll=SOON) as lock:
        assert json.loads(path.read_text())["host"] == lock.mine.host
    assert "for a renewal" in caplog.text and "taking over" in caplog.text


def test_a_lock_that_is_a_link_to_nothing_is_an_error_and_not_a_loop(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="a broken link"):
        save_step(tmp_path, 1, seed=1)


@pytest.mark.parametrize("pid", ["1e999", str(2**70), "-3", "[" * 100_000])
def test_a_damaged_lock_has_no_owner(tmp_path, pid):
    left_behind(tmp_path)
    path = tmp_path / LOCK
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "pid": "PID"}).replace('"PID"', pid)
    )
    assert SaveLock(tmp_path)._read()[0] is None


def test_a_lock_from_elsewhere_whose_time_changes_is_that_of_a_live_job(tmp_path):
    path, lock = left_behind(tmp_path), SaveLock(tmp_path, stale=LATE)
    assert "on node7" in lock.try_acquire()
    os.utime(path)
    with pytest.raises(CheckpointError, match="in use by process .* on node7"):
        lock.try_acquire()


def test_a_lock_from_elsewhere_that_is_hours_old_is_not_watched(tmp_path):
    os.utime(left_behind(tmp_path), (time.time() - 7200,) * 2)
    assert SaveLock(tmp_path).try_acquire() is None


def test_the_holder_renews_the_time_of_its_lock(tmp_path):
    with locked(tmp_path, solo(), beat=0.01):
        os.utime(tmp_path / LOCK, (0, 0))
        latest = time.monotonic() + HUNG
        while (
            not (renewed := (tmp_path / LOCK).stat().st_mtime)
            and time.monotonic() < latest
        ):
            time.sleep(0.01)
        assert abs(time.time() - renewed) < HUNG


def test_a_process_that_lost_the_lock_publishes_nothing_and_leaves_the_new_lock(
    tmp_path,
):
    save_step(tmp_path, 1, seed=1)
    with (
        pytest.raises(CheckpointError, match="taken over by process .* on node7"),
        locked(tmp_path, solo(), beat=LATE),
    ):
        left_behind(tmp_path)
        save_step(tmp_path, 2, seed=2)
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node7"
    assert sorted(p.name for p in tmp_path.glob("*iter*")) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


def test_of_two_that_take_over_at_the_same_time_the_slower_puts_the_lock_of_the_faster_back(
    tmp_path,
):
    left_behind(tmp_path)
    slow, fast = SaveLock(tmp_path, stale=SOON), SaveLock(tmp_path, stale=SOON)
    dead = slow._read()[0]
    fast._remove(dead)
    assert fast._create()
    slow._remove(dead)
    assert fast._read()[0] == fast.mine


def test_a_run_holds_its_lock_through_its_saves(tmp_path):
    with locked(tmp_path, solo()) as lock:
        save_step(tmp_path, 1, seed=1)
        assert lock._read()[0] == lock.mine
        save_step(tmp_path, 2, seed=2)
    assert not (tmp_path / LOCK).exists()


def test_a_removed_folder_is_said_once_and_made_anew_by_the_next_save(tmp_path, caplog):
    folder = tmp_path / "run"
    with caplog.at_level(logging.WARNING), locked(folder, solo(), beat=LATE) as lock:
        save_step(folder, 1, seed=1)
        shutil.rmtree(folder)
        lock.check()
        for step in (2, 3):
            save_step(folder, step, seed=step)
        assert lock._read()[0] == lock.mine
    assert caplog.text.count("was removed while") == 1
    assert sorted(p.name for p in folder.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000003",
    ]
