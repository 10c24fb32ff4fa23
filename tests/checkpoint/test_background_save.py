"""A save in the background has the bytes of a save, holds the state of its beginning whatever happens to it then,
is invisible until it is published, and fails on all ranks."""

import contextlib
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint import background_save, state_copies
from megatron_ds.checkpoint.background_save import BackgroundSave, Copies
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.save import Saving, save
from megatron_ds.errors import CheckpointError
from megatron_ds.host.pace import Pace
from megatron_ds.host.side_streams import SideStream
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.param_spec import Init, ParamSpec
from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.harness.states import Layout, StatePiece, pieces_of, tp_coordinates
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

LAYOUT = Layout(tp=2, dp=2, stage=1)


def begun(folder, step, pieces, copies=None, coordinates=None, world=None, seed=None):
    saving = Saving(folder, step, coordinates or {}, world or solo())
    return BackgroundSave(saving, pieces, {"seed": seed}, copies or Copies())


def digests(folder):
    """SHA-256 of the tensors' files; the index and run.json have the save's random id."""
    files = sorted(folder.glob("*.distcp"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def spoil(pieces):
    for piece in pieces:
        piece.tensor.fill_(-7)


def test_the_files_are_those_of_a_save_at_the_moment_of_its_beginning(tmp_path):
    """On four ranks; the state changes as soon as it is copied, and the memory serves a second save."""
    both = tmp_path / "now", tmp_path / "behind"

    def main(rank, world):
        group = world.group("world", range(LAYOUT.world_size), rank)
        coordinates = tp_coordinates(LAYOUT, rank)
        copies = Copies()
        for step in (1, 2):
            pieces = pieces_of(LAYOUT, rank, step)
            own = dict(coordinates=coordinates, world=group)
            save(both[0], step, pieces, run={"seed": step}, **own)
            pending = begun(both[1], step, pieces, copies, coordinates, group, step)
            pending.copied.wait()
            spoil(pieces)
            pending.finish()
        return copies.nbytes

    assert all(run_ranks(LAYOUT.world_size, main))
    for step in (1, 2):
        now, behind = (folder / f"iter_{step:07d}" for folder in both)
        assert digests(now) == digests(behind) and digests(now)
        assert read_run(both[1], step)["seed"] == step


def test_nothing_is_visible_before_all_have_written(tmp_path, monkeypatch):
    gate = threading.Event()
    write = Saving.write

    def held(saving, pieces, pace):
        assert gate.wait(60)
        return write(saving, pieces, pace)

    save(tmp_path, 1, pieces_of(Layout(), 0, 1), coordinates={}, world=solo(), run={})
    monkeypatch.setattr(Saving, "write", held)
    pending = begun(tmp_path, 2, pieces_of(Layout(), 0, 2))
    assert not pending.is_ready and latest(tmp_path) == 1
    gate.set()
    pending.advance()
    assert latest(tmp_path) == 1
    path = pending.finish()
    assert path.name == "iter_0000002" and latest(tmp_path) == 2
    pieces = pieces_of(Layout(), 0, seed=None)
    load(tmp_path, 2, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, 2), strict=True):
        assert torch.equal(piece.tensor, right.tensor)


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(tmp_path, monkeypatch):
    write = Saving.write

    def failing(saving, pieces, pace):
        if saving._world.rank == 2:
            raise OSError(28, "No space left on device")
        return write(saving, pieces, pace)

    monkeypatch.setattr(Saving, "write", failing)

    def main(rank, world):
        group = world.group("world", range(LAYOUT.world_size), rank)
        pieces = pieces_of(LAYOUT, rank, 1)
        pending = begun(
            tmp_path, 1, pieces, coordinates=tp_coordinates(LAYOUT, rank), world=group
        )
        with pytest.raises(CheckpointError, match=r"rank 2.*No space left"):
            pending.finish()

    run_ranks(LAYOUT.world_size, main)
    assert latest(tmp_path) is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter")]


class OnGpu:
    """A piece whose tensor is on the fake GPU."""

    def __init__(self, piece):
        self.__dict__.update(vars(piece))
        self.tensor = piece.tensor.to("cuda")


@pytest.mark.parametrize("waits", [True, False])
def test_a_gpu_copies_beside_the_model_and_before_the_update(
    tmp_path, waits, monkeypatch
):
    """The update changes the state behind the mark; without the wait the copy races with it."""
    written = []
    monkeypatch.setattr(
        Saving, "write", lambda saving, pieces, pace: written.append(pieces)
    )
    monkeypatch.setattr(background_save, "torch_thread", AtOnce)
    with fake_cuda(), FakeGpu() as gpu:
        pieces = [OnGpu(piece) for piece in pieces_of(Layout(), 0, 1)]
        pending = begun(tmp_path, 1, pieces)
        if waits:
            pending.copied.wait()
        with torch.no_grad():
            spoil(pieces)
        problems = sorted(set(gpu.order.problems))
    assert bool(problems) is not waits, problems


@contextlib.contextmanager
def apart(stream):
    """`SideStream.behind_current` without its wait."""
    with stream.apart():
        yield


# Name of a wait → what replaces it where it is left out.
LEFT_OUT = {
    "nothing": (),
    "the copies' wait for the model": (SideStream, "behind_current", apart),
    "the thread's wait for the copies": (
        state_copies,
        "wait_for_mark_in_thread",
        lambda mark: None,
    ),
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_a_gpu_copies_what_the_model_has_written_and_the_thread_reads_what_is_copied(
    tmp_path, left_out, monkeypatch
):
    """The state changes right before the save begins, and the thread looks at the copies and writes them."""
    seen = []

    def look(pieces):
        seen.extend(piece.tensor.sum().item() for piece in pieces)

    def write(saving, pieces, pace):
        seen.extend(piece.tensor.sum().item() for piece in pieces)

    monkeypatch.setattr(Saving, "write", write)
    monkeypatch.setattr(background_save, "torch_thread", AtOnce)
    if left_out != "nothing":
        monkeypatch.setattr(*LEFT_OUT[left_out])
    with fake_cuda(), FakeGpu() as gpu:
        pieces = [OnGpu(piece) for piece in pieces_of(Layout(), 0, 1)]
        with torch.no_grad():
            for piece in pieces:
                piece.tensor.add_(1)
        pending = BackgroundSave(
            Saving(tmp_path, 1, {}, solo()), pieces, {}, Copies(), look
        )
        pending._work.result()
        problems = sorted(set(gpu.order.problems))
    pending._saving.abandon()
    assert len(seen) > len(pieces)
    assert bool(problems) is (left_out != "nothing"), problems


class AtOnce:
    """A thread that runs when it is started, for a recording in one thread."""

    def __init__(self, function, name, stop):
        self._run = function

    def join(self):
        self._run()

    def is_alive(self):
        return False


def test_a_reason_of_one_rank_drops_the_save_on_all(tmp_path):
    def main(rank, world):
        group = world.group("world", range(LAYOUT.world_size), rank)
        saving = Saving(tmp_path, 1, tp_coordinates(LAYOUT, rank), group)
        refuse = lambda pieces: "a bad value" if rank == 3 else None
        pieces = pieces_of(LAYOUT, rank, 1)
        pending = BackgroundSave(saving, pieces, {}, Copies(), refuse)
        return pending.finish(), pending.reasons

    expected = (None, [None, None, None, "a bad value"])
    assert run_ranks(LAYOUT.world_size, main) == [expected] * LAYOUT.world_size
    assert latest(tmp_path) is None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iter")]


def refuse_at_once(pieces):
    return "a bad value"


def fail_at_once(pieces):
    raise MemoryError("no memory is left")


@pytest.mark.parametrize("look", [refuse_at_once, fail_at_once])
def test_an_update_does_not_wait_for_what_is_not_copied(tmp_path, look):
    saving = Saving(tmp_path, 1, {}, solo())
    pending = BackgroundSave(saving, pieces_of(Layout(), 0, 1), {}, Copies(), look)
    update = threading.Thread(target=pending.copied.wait, daemon=True)
    update.start()
    update.join(60)
    assert not update.is_alive()
    with contextlib.suppress(CheckpointError):
        pending.finish()
    assert latest(tmp_path) is None


FAILING = """
import sys
import torch
from megatron_ds.checkpoint.background_save import BackgroundSave, Copies
from megatron_ds.checkpoint.save import Saving
from megatron_ds.mpu.group import solo
from megatron_ds.mpu.param_spec import Init, ParamSpec
from tests.harness.states import StatePiece

def look(pieces):
    for piece in pieces:
        for _ in range(1000):
            torch.aminmax(piece.tensor)

size = 1 << 26
spec = ParamSpec("large", (size,), Init("zeros"))
piece = StatePiece(spec, "weight", 0, size, torch.zeros(1).expand(size), 0, 1)
save = BackgroundSave(Saving(sys.argv[1], 1, {}, solo()), [piece], {}, Copies(), look)
sys.exit(3)
"""


def test_a_process_that_fails_beside_the_thread_keeps_its_exit_code(tmp_path):
    """The interpreter aborts where a thread is inside an operation of torch at its end."""
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert ended.returncode == 3 and "terminate" not in ended.stderr
    assert latest(tmp_path) is None


def test_a_rank_that_cannot_copy_fails_the_save_on_all_ranks(tmp_path):
    class NoMemory(Copies):
        def take(self, pieces):
            raise MemoryError("no memory is left")

    def main(rank, world):
        group = world.group("world", range(LAYOUT.world_size), rank)
        copies = NoMemory() if rank == 1 else Copies()
        pieces = pieces_of(LAYOUT, rank, 1)
        coordinates = tp_coordinates(LAYOUT, rank)
        pending = begun(tmp_path, 1, pieces, copies, coordinates, group)
        with pytest.raises(CheckpointError, match=r"rank 1.*no memory is left"):
            pending.finish()

    run_ranks(LAYOUT.world_size, main)
    assert latest(tmp_path) is None


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_gpu_still_copies_keeps_its_memory(tmp_path, keeps, monkeypatch):
    """Pieces may be made for a save alone: their memory must not serve the model before the copy has ended."""
    monkeypatch.setattr(background_save, "torch_thread", AtOnce)
    with fake_cuda(), FakeGpu() as gpu:
        pieces = [OnGpu(piece) for piece in pieces_of(Layout(), 0, 1)]
        pending = begun(tmp_path, 1, pieces)
        if not keeps:
            pending.copied._sources = ()
        del pieces
        pending.copied.wait()
        problems = sorted(set(gpu.order.problems))
    assert bool(problems) is not keeps, problems


def test_the_thread_computes_with_no_thread_but_its_own(tmp_path):
    """A process with more OpenMP threads than processors waits longer at each barrier of its steps."""
    counted = []

    def threads_of_openmp():
        return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()

    class Watched(Pace):
        def pause(self):
            counted.append(threads_of_openmp())

    def finite(pieces):
        for piece in pieces:
            torch.aminmax(piece.tensor)

    threads = torch.get_num_threads()
    spec = ParamSpec("large", (1 << 22,), Init("zeros"))
    piece = StatePiece(spec, "weight", 0, 1 << 22, torch.zeros(1 << 22), 0, 1)
    try:
        torch.set_num_threads(2)
        piece.tensor.add_(1)  # the team of this thread
        before = threads_of_openmp()
        saving = Saving(tmp_path, 1, {}, solo())
        BackgroundSave(saving, [piece], {}, Copies(), finite, Watched()).finish()
    finally:
        torch.set_num_threads(threads)
    assert max(counted) == before
