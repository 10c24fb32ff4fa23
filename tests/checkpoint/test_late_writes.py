"""Requests of a suspended job that arrive late, twice or not at all: nothing is lost, and no healthy job ends.

Job A saves, and one of its requests has a fate (`tests/harness/late_requests.py`). Job B takes over meanwhile,
continues from the newest checkpoint, and ends. Afterwards the store holds what B saved.
"""

import os
import random
from contextlib import suppress

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megatron_ds.checkpoint import known_saves
from megatron_ds.checkpoint import lock as locks
from megatron_ds.checkpoint.folder import TRACKER, steps_in
from megatron_ds.checkpoint.load import latest, load, read_run
from megatron_ds.checkpoint.lock import locked
from megatron_ds.checkpoint.place import place_of
from megatron_ds.errors import CheckpointError
from megatron_ds.extensions.stores import store_objects
from megatron_ds.mpu.group import solo
from tests.harness.gcs_server import gcs_server
from tests.harness.late_requests import LateRequests, drawn
from tests.harness.limits import HUNG
from tests.harness.s3_server import s3_server
from tests.harness.states import Layout, pieces_of, save_step

pytestmark = pytest.mark.processes

ORDERS = 200
ORDERS_OF_A_SERVER = 100 if os.environ.get("MEGATRON_DS_TEST_ALL") else 6
LATE = 3600.0  # seconds: no beat but those of the test
A, B, C = 1, 2, 3  # seeds of the jobs' states
BLAMING = ("another job", "another process", "another program", "taken over by")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(known_saves, "PAUSES", (0.0,) * 2)
    monkeypatch.setattr(store_objects, "PAUSES", (0.0,) * 2)


@pytest.fixture(scope="module", params=[s3_server, gcs_server], ids=["s3", "gs"])
def bucket(request):
    """The address of a bucket of a server."""
    with request.param() as made:
        place_of(f"{made}/x").fs.mkdir("bucket")
        yield made


def job(store, seed, steps, limit):
    """Acquire the lock, continue from the newest checkpoint, save so many steps, and release the lock."""
    with locked(place_of(store), solo(), beat=LATE, stale=0.0, poll=0.0) as lock:
        newest = latest(store) or 0
        for step in range(newest + 1, newest + 1 + steps):
            save_step(store, step, seed, limit)
            # the thread of the beat goes on after an error
            with suppress(OSError, CheckpointError):
                lock._renew()
    return newest


def elsewhere(function):
    """Run a function as a process of another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_held", {})
        patch.setattr(locks, "_runs_here", lambda owner: None)
        return function()


def seed_of(store, step):
    """Load a checkpoint, compare every bit, and return whose state it is."""
    seed = read_run(store, step)["seed"]
    pieces = pieces_of(Layout(), 0, seed=None)
    load(store, step, pieces, coordinates={}, world=solo())
    for piece, right in zip(pieces, pieces_of(Layout(), 0, seed), strict=True):
        assert torch.equal(piece.tensor, right.tensor), f"iteration {step} is damaged"
    return seed


def one_order(store, draw, requests):
    """Two jobs whose requests meet as drawn. Returns whether the other job ran."""
    saved_by_b = []
    steps, limit = draw.randint(1, 3), draw.choice([None, 1, 2])

    def other_job():
        newest = elsewhere(lambda: job(store, B, steps, limit))
        saved_by_b.extend(range(newest + 1, newest + 1 + steps))

    place = place_of(store)
    fate = drawn(draw, requests)
    late = LateRequests(place.fs, other_job=other_job, **fate)
    error = None
    with late.intercepted():
        try:
            job(store, A, 3, draw.choice([None, 1, 2]))
        except (CheckpointError, OSError) as found:
            error = found
    if saved_by_b:
        kept = [step for step in saved_by_b if limit is None or step in steps_in(place)]
        assert saved_by_b[-1] in kept and latest(store) == saved_by_b[-1]
        assert (place / TRACKER).read_text() == str(saved_by_b[-1])
        assert {seed_of(store, step) for step in kept} == {B}
    elif error is not None:
        assert not [words for words in BLAMING if words in str(error)], error
    # what there is, is complete
    for step in steps_in(place):
        assert seed_of(store, step) in (A, B)
    # and the next job finds nothing in its way
    newest = elsewhere(lambda: job(store, C, 1, None))
    assert seed_of(store, newest + 1) == C
    commits = {path.read_text() for path in place.glob("iter_*.commit")}
    assert commits == {path.name for path in place.iterdir() if path.is_dir()}
    return late.other_job_ran


def requests_of(store):
    """Number of changes that job A asks for."""
    late = LateRequests(place_of(store).fs)
    with late.intercepted():
        job(store, A, 3, None)
    return late.sent


@pytest.mark.parametrize("part", range(4))
def test_late_and_failing_writes_lose_nothing_and_end_no_healthy_job(part):
    draw = random.Random(part)
    requests = requests_of("memory://store/count")
    others = 0
    for _ in range(ORDERS // 4):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        others += one_order("memory://store/run", draw, requests)
    MemoryFileSystem.store.clear()
    assert others > ORDERS / 4 / 3


@pytest.mark.timeout(2 * HUNG + 20 * ORDERS_OF_A_SERVER)
def test_late_and_failing_writes_of_a_server(bucket):
    draw = random.Random(7)
    requests = requests_of(f"{bucket}/count")
    for order in range(ORDERS_OF_A_SERVER):
        one_order(f"{bucket}/{order}", draw, requests)
