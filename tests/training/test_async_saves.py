"""--async-save: the run and its checkpoints are those of one without it, one save is under way at a time, and an
error of a writer ends all ranks."""

import contextlib
import math
import re
import signal
import threading
import time
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_ds.checkpoint.load import latest
from megatron_ds.host import places
from megatron_ds.host.place_file import PlaceWriter, read_places
from megatron_ds.training.saves import Saves
from tests.harness.pretraining import (
    GLOBAL_BATCH,
    MOCK,
    TINY,
    losses,
    records,
    run_pretrain,
    train,
)
from tests.harness.spoilers import poisoned, signal_at_step

pytestmark = pytest.mark.processes

EACH_STEP = ["--save-interval", "1"]
SAVED = re.compile(r"saved \S+iter_0*(\d+) in [\d.]+ s, of which training waited")


def tensors(folder, step):
    path = folder / f"iter_{step:07d}"
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


@contextlib.contextmanager
def slow_writers(rank: int, *, seconds: float):
    """A file takes several steps."""
    from megatron_ds.checkpoint.save import Saving

    write = Saving.write

    def slowly(saving, pieces, pace):
        time.sleep(seconds)
        return write(saving, pieces, pace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "write", slowly)
        yield


@contextlib.contextmanager
def late_copies(rank: int, *, seconds: float = 2.0):
    """The thread copies the state as late as it may: when the update waits for it. No update follows the last save."""
    from megatron_ds.checkpoint.state_copies import CopiesUnderWay

    wait, tiles = CopiesUnderWay.wait, CopiesUnderWay.tiles
    is_awaited = defaultdict(threading.Event)

    def waiting(copies):
        is_awaited[id(copies)].set()
        wait(copies)

    def late(copies):
        is_awaited[id(copies)].wait(seconds)
        return tiles(copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopiesUnderWay, "wait", waiting)
        patch.setattr(CopiesUnderWay, "tiles", late)
        with slow_writers(rank, seconds=0.2):
            yield


@contextlib.contextmanager
def failing_writer(rank: int, *, victim: int, step: int):
    """The disk of one rank is full in the save of a step."""
    from megatron_ds.checkpoint.save import Saving

    write = Saving.write

    def failing(saving, pieces, pace):
        if rank == victim and saving.step == step:
            raise OSError(28, "No space left on device")
        return write(saving, pieces, pace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saving, "write", failing)
        yield


def test_a_run_and_its_checkpoints_are_those_of_one_that_waits(tmp_path):
    layout = ["--zero-stage", "1", "--save-interval", "2"]
    folders = tmp_path / "waits", tmp_path / "behind"
    train(2, [*MOCK, *layout, "--save", folders[0]])
    ended = train(
        2,
        [*MOCK, *layout, "--save", folders[1], "--async-save"],
        spoil=late_copies,
    )
    assert losses(folders[0]) == losses(folders[1])
    for step in (2, 4, 6):
        assert tensors(folders[0], step) == tensors(folders[1], step) != {}
    # each is reported once, when it is complete
    assert SAVED.findall(ended[0].out) == ["2", "4", "6"]
    for folder in folders:
        saves = records(folder, "save")
        assert [record["step"] for record in saves] == [2, 4, 6]
        assert all(record["save_seconds"] > 0 for record in saves)


def test_a_save_before_the_first_step_is_reported(tmp_path):
    """Also where --load is given, and there was nothing to load: the newest step is 0 from the start."""
    words = ["--save", tmp_path, "--load", tmp_path, "--extra-save-iters", "0"]
    words += ["--async-save", "--train-iters", "1", "--lr-warmup-iters", "0"]
    ended = train(1, [*MOCK, *words])
    assert SAVED.findall(ended[0].out) == ["0"]
    assert [record["step"] for record in records(tmp_path, "save")] == [0, 1]


def test_a_save_waits_for_the_one_before(tmp_path):
    """Each step asks for one while a file takes longer than a step: none is lost."""
    job = [*MOCK, *EACH_STEP, "--save", tmp_path, "--async-save"]
    ended = train(1, job, spoil=partial(slow_writers, seconds=0.1))
    assert SAVED.findall(ended[0].out) == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_of_a_writer_ends_all_ranks_with_its_code(tmp_path, victim):
    job = [*TINY, "--mock-data", "--train-iters", "100000"]
    job += ["--save-interval", "2", "--save", tmp_path, "--async-save"]
    ended = run_pretrain(2, job, spoil=partial(failing_writer, victim=victim, step=4))
    assert [rank.code for rank in ended] == [2, 2]
    error = f"could not save iteration 4 to {tmp_path}"
    assert error in ended[0].err and f"rank {victim}" in ended[0].err
    assert "No space left" in ended[0].err
    assert latest(tmp_path) == 2


def test_an_update_that_waits_for_copies_is_in_the_phase_of_a_save(
    tmp_path, monkeypatch
):
    """A rank may take long in it. The launcher counts one that trains as hung after ten seconds and two steps."""
    path = tmp_path / "places"
    writer = PlaceWriter(path, {})
    writer.step(2)
    monkeypatch.setattr(places, "_writer", [writer])
    seen = []
    note = lambda: seen.append(read_places(path).places[-1].phase)
    save = SimpleNamespace(copied=SimpleNamespace(wait=note))
    checkpoint = SimpleNamespace(async_save=False, save=None)
    engine = SimpleNamespace(config=SimpleNamespace(checkpoint=checkpoint), states={})
    found = Saves(engine, {}, None)
    found._pending = SimpleNamespace(save=save, stall=0.0)
    found.before_update()
    note()
    assert seen == [places.SAVING, places.TRAINING]


@contextlib.contextmanager
def overflowing(rank: int, *, step: int):
    """All gradients of a step overflow, while the save before it is written."""
    samples = range(step * GLOBAL_BATCH - GLOBAL_BATCH, step * GLOBAL_BATCH)
    with poisoned(rank, module="decoder.layers.1", samples=samples, value=math.inf):
        with slow_writers(rank, seconds=0.5):
            yield


def test_an_error_of_all_ranks_completes_the_save_under_way(tmp_path):
    """The loss scale cannot be lowered."""
    job = [*MOCK, "--fp16", "--hysteresis", "1", "--save-interval", "3"]
    job += ["--initial-loss-scale", "2", "--min-loss-scale", "2"]
    job += ["--save", tmp_path, "--async-save"]
    ended = run_pretrain(2, job, spoil=partial(overflowing, step=4))
    assert [rank.code for rank in ended] == [2, 2]
    assert "at its minimum of 2" in ended[0].err
    assert latest(tmp_path) == 3


def test_a_signal_completes_the_save_under_way_and_saves_the_last_step(tmp_path):
    job = [*TINY, "--mock-data", "--train-iters", "100000", "--save-interval", "2"]
    ended = train(
        2,
        [*job, "--save", tmp_path, "--async-save"],
        spoil=partial(signal_at_step, number=signal.SIGTERM, step=3, victim=1),
    )
    assert latest(tmp_path) == 4
    assert "rank 1 received SIGTERM; 4 steps" in ended[0].out
    assert "saved " in ended[0].out
