"""Checkpoints in stores: complete or invisible at every operation and after every kill, equal to those of a folder,
loaded at another layout, one writer at a time.

Without a server the store is fsspec's memory; with one it is moto's S3, and a stand-in for Google's store where
its packages are installed.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megatron_ds.checkpoint.chunk_file import new_file
from megatron_ds.checkpoint.folder import LONGEST_PATH, check_writable, steps_in
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.lock import SaveLock, locked, this_process
from megatron_ds.checkpoint.place import place_of
from megatron_ds.checkpoint.save import save
from megatron_ds.errors import CheckpointError
from megatron_ds.host.direct_file import BLOCK, read_range
from megatron_ds.mpu.group import solo
from tests.harness.gcs_server import GCS, gcs_server
from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK, losses, train
from tests.harness.s3_server import S3, in_environment, s3_server
from tests.harness.states import Layout, pieces_of

pytestmark = pytest.mark.processes

KILLS = 200 if os.environ.get("MEGATRON_DS_TEST_ALL") else 2


@pytest.fixture
def memory():
    yield "memory://store/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module", params=[s3_server, gcs_server], ids=["s3", "gs"])
def bucket(request):
    """The address of a bucket of a server."""
    with request.param() as made:
        place_of(f"{made}/x").fs.mkdir("bucket")
        yield made


def save_step(store, step, seed=None, limit=None):
    pieces = pieces_of(Layout(), 0, seed or step)
    run = {"seed": seed or step}
    return save(store, step, pieces, coordinates={}, world=solo(), run=run, limit=limit)


def loaded_seed(store):
    """Load what `latest` finds, compare every bit, and return whose state it is; None without a checkpoint."""
    step = latest(store)
    if step is None:
        return None
    seed = read_run(store, step)["seed"]
    pieces = pieces_of(Layout(), 0, seed=None)
    load(store, step, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, seed), strict=True):
        assert torch.equal(piece.tensor, right.tensor), f"iteration {step} is damaged"
    return seed


def test_steps_are_saved_again_and_pruned(memory):
    for step, seed in ((1, 1), (2, 2), (2, 3), (3, 4)):
        save_step(memory, step, seed, limit=2)
        assert loaded_seed(memory) == seed
    place = place_of(memory)
    assert steps_in(place) == [2, 3]
    # nothing is left of what was replaced, pruned or locked
    commits = {path.name for path in place.glob("iter_*.commit")}
    folders = {path.read_text() for path in place.glob("iter_*.commit")}
    names = {path.name for path in place.iterdir()}
    assert names == commits | folders | {"latest_checkpointed_iteration.txt"}


class Crash(BaseException):
    """The end of the process."""


class Dying:
    """Operations that change the store, of which the nth and all later ones do not happen."""

    CHANGES = ("pipe_file", "rm", "rm_file", "_rm")

    def __init__(self, patch, last):
        self.done = 0
        self._last = last
        for name in self.CHANGES:
            method = getattr(MemoryFileSystem, name)
            patch.setattr(MemoryFileSystem, name, self._counted(method))
        method = MemoryFileSystem.open
        patch.setattr(MemoryFileSystem, "open", self._opened(method))

    def _count(self):
        self.done += 1
        if self.done > self._last:
            raise Crash

    def _counted(self, method):
        def changed(*arguments, **options):
            self._count()
            return method(*arguments, **options)

        return changed

    def _opened(self, method):
        def opened(fs, path, mode="rb", **options):
            if "r" not in mode:
                self._count()
            return method(fs, path, mode, **options)

        return opened


# What a crash leaves open is closed later, in vain.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "a step again"])
def test_a_save_that_ends_anywhere_leaves_the_old_state_or_the_new_one(memory, step):
    seen = []
    for last in range(100):
        MemoryFileSystem.store.clear()
        save_step(memory, 1, seed=1)
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, last)
            try:
                save_step(memory, step, seed=9, limit=1)
            except Crash:
                pass
            else:
                break
        seen.append(loaded_seed(memory))
        # the next process finds the lock of one that has ended
        (place_of(memory) / ".lock").unlink(missing_ok=True)
        save_step(memory, 3, seed=7)
        assert loaded_seed(memory) == 7
        assert not [p for p in place_of(memory).iterdir() if p.name.endswith(".now")]
    # old until one operation, new from there on; both are seen
    assert seen == sorted(seen) and set(seen) == {1, 9} and last == dying.done


def test_a_commit_that_names_another_place_is_refused(memory):
    save_step(memory, 1)
    commit = place_of(memory) / "iter_0000001.commit"
    for name in ("../other", "iter_0000002.00000000", "iter_0000001.x/../../y", ""):
        commit.write_text(name)
        with pytest.raises(CheckpointError, match="is damaged: it names"):
            load(memory, 1, [], coordinates={}, world=solo())


def test_one_job_at_a_time_saves(memory):
    place = place_of(memory)
    with locked(place, solo()):
        with pytest.raises(CheckpointError, match="in use by process"):
            SaveLock(place).try_acquire()
        save_step(memory, 1)
    assert SaveLock(place).try_acquire() is None


def test_the_lock_of_a_machine_that_does_not_renew_it_is_taken_over(memory):
    place = place_of(memory)
    owner = replace(this_process({}), machine="another boot", host="node7")
    (place / ".lock").write_text(json.dumps(vars(owner)))
    with pytest.raises(CheckpointError, match="taken over by process .* on node7"):
        with locked(place, solo(), stale=0.05, poll=0.01):
            (place / ".lock").write_text(json.dumps(vars(owner)))
            save_step(memory, 1)
    assert latest(memory) is None


def test_a_store_without_its_library_is_an_error_with_advice():
    with pytest.raises(CheckpointError, match=r"nowhere://.*megatron_ds\[stores\]"):
        place_of("nowhere://bucket/run")


@pytest.mark.parametrize("text", ["gs://", "s3:///run"])
def test_a_place_without_a_bucket_is_an_error(text):
    with pytest.raises(CheckpointError, match=f"{text} names no bucket"):
        place_of(text)


def test_an_error_of_the_network_is_named_with_its_place(memory, monkeypatch):
    """gcsfs raises an error of the system where no server answers."""
    refused = ConnectionRefusedError(111, "Connect call failed")
    monkeypatch.setattr(MemoryFileSystem, "exists", Mock(side_effect=refused))
    with pytest.raises(CheckpointError, match="store/run cannot be reached .*failed"):
        latest(memory)


def test_a_bucket_that_is_missing_is_found_before_training(bucket):
    with pytest.raises(CheckpointError, match="no checkpoint can be written there"):
        check_writable(place_of(f"{bucket[:2]}://another-bucket/run"))


def test_a_long_name_is_no_error(memory):
    check_writable(place_of(memory) / ("x" * LONGEST_PATH))


def test_large_files_are_sent_and_read_in_parts(bucket):
    """More blocks than are read at once, from bytes in the middle of blocks."""
    path = place_of(f"{bucket}/large/file")
    content = torch.arange((9 * BLOCK + 1000) // 4, dtype=torch.int32)
    with new_file(path) as file:
        file.write(b"1234")
        file.write_tensor(content, torch.int32)
        file.sync()
    expected = content.view(torch.uint8)
    for begin, length in ((0, len(expected)), (BLOCK - 3, BLOCK + 5), (7, 0)):
        found = read_range(path, 4 + begin, length)
        assert torch.equal(found, expected[begin : begin + length])
    beyond = read_range(path, len(expected), 100)
    assert torch.equal(beyond, expected[-4:])


def test_a_file_that_is_not_complete_is_no_object(bucket):
    path = place_of(f"{bucket}/cut/file")
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file.write(bytes(3 * BLOCK))
        raise ZeroDivisionError
    assert not path.exists()


@pytest.mark.timeout(2 * HUNG + 100 * KILLS)
def test_kills_at_random_moments_lose_nothing(bucket):
    command = "-m tests.checkpoint.killed_store_saves".split()
    ended = subprocess.run(
        [sys.executable, *command, f"{bucket}/killed", str(KILLS), "1"],
        capture_output=True,
        text=True,
        timeout=HUNG + 100 * KILLS,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{KILLS} kills" in ended.stdout


def test_a_run_goes_on_from_a_store_at_another_layout(bucket, tmp_path):
    """The files are those of a folder; the second half trains on other ranks, and saves behind training."""
    half = ["--exit-interval", "3", "--save-interval", "3"]
    folder = tmp_path / "folder"
    store = f"{bucket}/run"
    train(2, [*MOCK, *half, "--zero-stage", "1", "--save", folder])
    values = {name: os.environ[name] for name in (*S3, *GCS) if name in os.environ}
    reach = partial(in_environment, values=values)
    train(2, [*MOCK, *half, "--zero-stage", "1", "--save", store], spoil=reach)
    saved = place_of(store) / (place_of(store) / "iter_0000003.commit").read_text()
    for file in (folder / "iter_0000003").glob("*.distcp"):
        assert (saved / file.name).read_bytes() == file.read_bytes()
    each = ["--save-interval", "1", "--async-save"]
    for place in (folder, store):
        rest = [*each, "--load", place, "--save", place]
        metrics = tmp_path / ("store" if place == store else "folder-behind")
        metrics.mkdir()
        rest += ["--metrics-path", metrics / "metrics.jsonl"]
        train(1, [*MOCK, *rest], spoil=reach)
    assert steps_in(place_of(store)) == [3, 4, 5, 6]
    assert losses(tmp_path / "store") == losses(tmp_path / "folder-behind") != {}


@pytest.mark.parametrize("use", [latest, check_writable])
def test_a_store_that_cannot_be_reached_is_named(use, monkeypatch):
    """No server listens at port 9, and the library's error is none of the system's."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    place = place_of("s3://absent/run")
    place.fs.connect(refresh=True)
    with pytest.raises(CheckpointError, match="absent/run cannot be reached .*AWS_"):
        use(place)
