"""A job that was suspended, while another job took over its folder, trained and ended, overwrites nothing."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

import megatron_ds
from megatron_ds.checkpoint import folder as folders
from megatron_ds.checkpoint import known_saves
from megatron_ds.checkpoint import lock as locks
from megatron_ds.checkpoint.folder import read_tracker, steps_in
from megatron_ds.checkpoint.known_saves import KnownSaves
from megatron_ds.checkpoint.load import load, read_run
from megatron_ds.checkpoint.lock import locked
from megatron_ds.checkpoint.lock_file import LOCK
from megatron_ds.checkpoint.save_folder import saved_run_in
from megatron_ds.compat.engine import known_tags
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training import trainer
from megatron_ds.training.pretrain import pretrain
from tests.harness.deaths import forked, survived
from tests.harness.engine_runs import config_of, make, on_ranks, train
from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK
from tests.harness.states import Layout, pieces_of, save_step

pytestmark = [pytest.mark.plan, pytest.mark.one_in(2, together=True)]

ROOT = Path(__file__).parents[2]
LATE = 3600.0  # seconds: the beat of a suspended owner does not come


def seeds_in(folder):
    """step → the seed in run.json, which names the job that wrote it."""
    return {
        step: json.loads((folder / f"iter_{step:07d}" / "run.json").read_text())["seed"]
        for step in steps_in(folder)
    }


def seem_suspended_elsewhere(folder):
    """The lock becomes that of a process on another machine that has not renewed it for hours."""
    path = folder / LOCK
    owner = json.loads(path.read_text())
    path.write_text(json.dumps(owner | {"machine": "another boot", "host": "node7"}))
    os.utime(path, (time.time() - 7200,) * 2)


def successor(folder, steps, ends_well):
    """In a process of its own: take over the lock, save, and end with or without releasing the lock."""

    def run():
        with locked(folder, solo(), beat=LATE):
            for step in steps:
                save_step(folder, step, seed=2)
            if not ends_well:
                os.kill(os.getpid(), signal.SIGKILL)

    assert survived(forked(run)) == ends_well


@pytest.mark.parametrize("trial", range(20))
def test_a_resumed_owner_loses_no_checkpoint_of_its_successor(tmp_path, trial):
    random_trial = random.Random(trial)
    saved = sorted(random_trial.sample(range(1, 10), random_trial.randint(0, 3)))
    first = max(saved, default=0)
    theirs = [first + gap for gap in range(1, random_trial.randint(2, 4))]
    with (
        pytest.raises(CheckpointError, match="while this process .* was suspended"),
        locked(tmp_path, solo(), beat=LATE) as lock,
    ):
        lock._beat = 0.01  # how long a missing lock is looked for again
        for step in saved:
            save_step(tmp_path, step, seed=1)
        # The owner is suspended here; its successor runs, saves and ends.
        seem_suspended_elsewhere(tmp_path)
        successor(tmp_path, theirs, ends_well=random_trial.random() < 0.8)
        before = seeds_in(tmp_path), read_tracker(tmp_path)
        # Resumed: the thread of the beat may run first.
        if random_trial.random() < 0.5:
            lock._renew()
        save_step(tmp_path, random_trial.choice([*theirs, theirs[-1] + 1]), seed=1)
    assert (seeds_in(tmp_path), read_tracker(tmp_path)) == before
    assert before[0] == {**dict.fromkeys(saved, 1), **dict.fromkeys(theirs, 2)}
    assert not list(tmp_path.glob(".iter_*"))


def test_a_lock_that_is_gone_is_lost_and_not_made_again_and_the_run_is_stopped(
    tmp_path,
):
    calls = []
    with locked(tmp_path, solo(), beat=0.02) as lock:
        lock.on_lost = lambda: calls.append("lost")
        (tmp_path / LOCK).unlink()
        latest = time.monotonic() + HUNG
        while not calls and time.monotonic() < latest:
            time.sleep(0.01)
        with pytest.raises(
            CheckpointError, match=r"lock of .* was removed, or another job"
        ):
            save_step(tmp_path, 1, seed=1)
    assert calls == ["lost"] and not list(tmp_path.iterdir())


def test_a_checkpoint_that_the_owner_does_not_know_is_not_overwritten_even_if_the_lock_is_its_own(
    tmp_path,
):
    with locked(tmp_path, solo(), beat=LATE) as lock:
        save_step(tmp_path, 2, seed=1)
        text = (tmp_path / LOCK).read_text()
        seem_suspended_elsewhere(tmp_path)
        successor(tmp_path, [4], ends_well=True)
        (tmp_path / LOCK).write_text(text)
        with pytest.raises(
            CheckpointError, match=r"iter_0000004 was saved by another job.*--load"
        ):
            save_step(tmp_path, 4, seed=1)
        assert seeds_in(tmp_path) == {2: 1, 4: 2} and lock._lost == ""


def test_known_saves_accept_own_ones_and_earlier_ones_and_a_second_save_of_a_step(
    tmp_path,
):
    saves = KnownSaves()
    save_step(tmp_path, 10, seed=1)
    save_step(tmp_path, 20, seed=1)
    saves.check(tmp_path)  # the first call looks
    save_step(tmp_path, 20, seed=1)
    with pytest.raises(CheckpointError, match="iter_0000020 was saved by another job"):
        saves.check(tmp_path)
    saves.look(tmp_path)
    saves.check(tmp_path)
    (tmp_path / "iter_0000020").rename(tmp_path / "moved")
    saves.check(tmp_path)


@pytest.fixture
def vanished(tmp_path, monkeypatch):
    """A folder whose checkpoint another program deletes between the listing of the folder and the look at it."""
    save_step(tmp_path, 10, seed=1)
    saves = KnownSaves()
    saves.look(tmp_path)
    monkeypatch.setattr(folders, "find", lambda folder, step: None)
    return tmp_path, saves


def test_a_save_is_refused_when_the_newest_checkpoint_vanishes(vanished):
    folder, saves = vanished
    with pytest.raises(
        CheckpointError, match=r"iter_0000010/run.json .*\(it is gone\)"
    ):
        saves.check(folder)


def test_a_checkpoint_that_vanishes_is_not_pruned_and_is_no_run(vanished):
    folder, _ = vanished
    folders.prune(folder, 20, limit=1)
    assert steps_in(folder) == [10]
    assert saved_run_in(folder).step is None  # only the tracker is left of the run


# Changes of the file system that a save makes, and what it waits for between them.
CHANGES = ("rename", "replace", "mkdir", "fsync", "unlink", "utime")


class SuspendedAt:
    """Before its n-th change of the file system a job is suspended, while another one takes over, saves and ends."""

    def __init__(self, number, folder, steps):
        self.count = 0
        self.saved = []  # by the other job
        self._number = number
        self._folder = folder
        self._steps = steps

    @contextlib.contextmanager
    def patched(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGES:
                patch.setattr(os, name, self._counted(getattr(os, name)))
            yield

    def _counted(self, change):
        def changed(*values, **options):
            self.count += 1
            if self.count == self._number:
                self._take_over()
            return change(*values, **options)

        return changed

    def _take_over(self):
        """In this process, which seems to be another one, on another machine."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "_held", {})
            patch.setattr(locks, "_runs_here", lambda owner: None)
            with locked(self._folder, solo(), beat=LATE, stale=0.0, poll=0.0):
                newest = int(read_tracker(self._folder) or 0)
                for step in range(newest + 1, newest + 1 + self._steps):
                    save_step(self._folder, step, seed=2, limit=2)
                    self.saved.append(step)


@pytest.mark.rest
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step again"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_job_that_is_suspended_anywhere_in_a_save_changes_nothing_afterwards(
    tmp_path, step, steps
):
    ended = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        with locked(folder, solo(), beat=LATE) as lock:
            lock._beat = 0.001
            for earlier in (1, 2):
                save_step(folder, earlier, seed=1)
            suspended = SuspendedAt(number, folder, steps)
            try:
                with suspended.patched():
                    save_step(folder, step, seed=1, limit=2)
            except CheckpointError as error:
                assert "suspended or cut off" in str(error), error
                ended += 1
        if not suspended.saved:
            break
        assert read_tracker(folder) == str(suspended.saved[-1])
        seeds = seeds_in(folder)
        assert {seeds[number] for number in suspended.saved[-2:]} == {2}
        # and what is there is complete
        for found in steps_in(folder):
            assert seed_of(folder, found) == seeds[found]
        assert not list(folder.glob(".*[0-9a-f]*.writing*")) and len(seeds) <= 3
    assert ended > 5 and number > 10


def seed_of(folder, step):
    """Load a checkpoint, compare every bit, and return whose state it is."""
    seed = read_run(folder, step)["seed"]
    pieces = pieces_of(Layout(), 0, seed=None)
    load(folder, step, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, seed), strict=True):
        assert torch.equal(piece.tensor, right.tensor), f"iteration {step} is damaged"
    return seed


def reads_that_fail(patch, failing):
    """Reads of run.json whose numbers (from 0) are in `failing` raise an error of the file system."""
    numbers = count()
    real = folders.read_regular

    def read(path):
        if path.name == "run.json" and next(numbers) in failing:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    patch.setattr(known_saves.folders, "read_regular", read)
    patch.setattr(known_saves, "PAUSES", (0.0,) * 3)


@pytest.mark.parametrize("first", range(6))
def test_a_read_that_fails_for_a_moment_neither_ends_a_run_nor_names_another_job(
    tmp_path, monkeypatch, first
):
    save_step(tmp_path, 1, seed=1)
    # three in a row fail, wherever they begin
    reads_that_fail(monkeypatch, {first, first + 1, first + 2})
    with locked(tmp_path, solo(), beat=LATE):
        for step in (2, 3):
            save_step(tmp_path, step, seed=1)
    assert steps_in(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_json_that_cannot_be_read_is_named_as_that(
    tmp_path, monkeypatch, is_gone
):
    with locked(tmp_path, solo(), beat=LATE):
        save_step(tmp_path, 1, seed=1)
        if is_gone:
            (tmp_path / "iter_0000001" / "run.json").unlink()
        else:
            reads_that_fail(monkeypatch, range(100))
        with pytest.raises(
            CheckpointError, match=r"iter_0000001.run.json cannot be read"
        ) as raised:
            save_step(tmp_path, 2, seed=1)
    assert "was saved by another job" not in str(raised.value)
    assert steps_in(tmp_path) == [1]


def test_what_a_run_has_published_is_known_without_being_read(tmp_path, monkeypatch):
    with locked(tmp_path, solo(), beat=LATE) as lock:
        with monkeypatch.context() as patch:
            reads_that_fail(patch, range(100))
            save_step(tmp_path, 1, seed=1)
        lock.saves.check(tmp_path)


# A holder that saves, waits to be stopped and continued, and saves again; a successor on "another machine".
HOLDER = """
import sys
from pathlib import Path
from megatron_ds.checkpoint.load import load, read_run
from megatron_ds.checkpoint.lock import locked
from megatron_ds.cli import main_guard
from megatron_ds.mpu.group import solo
from tests.checkpoint.test_suspended_jobs import save_step
folder = Path(sys.argv[1])
def run():
    with locked(folder, solo(), beat=0.1):
        save_step(folder, 2, seed=1)
        print("saved", flush=True)
        sys.stdin.readline()
        save_step(folder, 4, seed=1)
sys.exit(main_guard(run))
"""


def test_a_process_that_was_stopped_by_sigstop_and_continued_ends_with_code_2(
    tmp_path, monkeypatch
):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=environment,
        text=True,
        cwd=ROOT,
        **pipes,
    )
    try:
        assert holder.stdout.readline() == "saved\n"
        holder.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(locks, "_machine", lambda: "another boot")
        with locked(tmp_path, solo(), beat=0.1, stale=0.5, poll=0.1):
            save_step(tmp_path, 4, seed=2)
            save_step(tmp_path, 6, seed=2)
        before = seeds_in(tmp_path), read_tracker(tmp_path)
        holder.send_signal(signal.SIGCONT)
        _, error = holder.communicate("\n", timeout=HUNG)
    finally:
        holder.kill()
        holder.wait()
    assert holder.returncode == 2 and "was suspended or cut off" in error, error
    assert (
        (seeds_in(tmp_path), read_tracker(tmp_path))
        == before
        == ({2: 1, 4: 2, 6: 2}, "6")
    )


# ------------------------------------------------------------------ whole runs and engines
@contextlib.contextmanager
def lock_removed_at_step(rank, step):
    """In that step the lock disappears, as if a successor had taken it over and ended."""
    real = trainer.train_step

    def train_step(engine, batch, progress, **options):
        if progress.step + 1 == step:
            # Engines of other tests of this process may hold locks, too.
            folder = Path(engine.config.checkpoint.save).resolve()
            held = locks._held.values()
            [lock] = [own for own in held if own.path.parent.resolve() == folder]
            lock._beat = 0.01
            lock.path.unlink()
            lock._renew()
        return real(engine, batch, progress, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", train_step)
        yield


def test_a_run_that_lost_its_folder_stops_at_the_next_step_with_code_2_and_saves_nothing(
    tmp_path, capsys
):
    with lock_removed_at_step(0, 3):
        code = pretrain(
            [
                *MOCK,
                *"--global-batch-size 1 --train-iters 9".split(),
                "--save",
                str(tmp_path),
                *"--save-interval 2 --lr-warmup-iters 0".split(),
            ]
        )
    shown = capsys.readouterr()
    assert code == 2 and "was removed, or another job took it over" in shown.err
    assert steps_in(tmp_path) == [2] and "step 4/9" not in shown.out


@pytest.mark.parametrize("tags", [None, ("a", "b", "c", "d")], ids=["steps", "tags"])
def test_an_engine_does_not_save_over_what_another_program_saved_meanwhile(
    tmp_path, tags
):
    def main(engine, rank):
        save = lambda at: engine.save_checkpoint(tmp_path, tags and tags[at])
        train(engine, rank, 1)
        save(0)
        here = {place: set(names) for place, names in known_tags._known.items()}
        another(tags and tags[1])
        known_tags._known.clear()  # the other engine is of another process
        known_tags._known.update(here)
        train(engine, rank, 1, first=1)
        with pytest.raises(
            CheckpointError, match="was saved by another program while this one"
        ):
            save(2)
        engine.load_checkpoint(tmp_path)
        train(engine, rank, 1, first=2)
        save(3)
        save(3)
        return engine.global_steps

    def another(tag):
        engine, *_ = megatron_ds.initialize(
            model=make(), config=config_of(0, 1), mpu=Mesh(Grid.fit(1), 0)
        )
        train(engine, 0, 4)
        engine.save_checkpoint(tmp_path, tag)

    assert on_ranks(1, main, make, config_of(0, 1)) == [5]


def test_an_engine_whose_read_fails_for_a_moment_saves_on(tmp_path, monkeypatch):
    def main(engine, rank):
        for step in range(3):
            train(engine, rank, 1, first=step)
            engine.save_checkpoint(tmp_path, "abc"[step])
        return engine.global_steps

    # the next reads succeed
    reads_that_fail(monkeypatch, set(range(0, 100, 2)))
    assert on_ranks(1, main, make, config_of(0, 1)) == [3]
