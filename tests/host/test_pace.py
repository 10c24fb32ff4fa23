"""A thread that is paced takes its share of a processor, and hurries when something waits for it."""

import threading
import time

import pytest

from megatron_ds.errors import MegatronDSError
from megatron_ds.host import pace as module
from megatron_ds.host.pace import Pace

pytestmark = pytest.mark.plan


class Clock:
    """The processor time of a thread, and the pauses that it was asked to make."""

    def __init__(self):
        self.used = 0.0
        self.pauses = []

    def thread_time(self):
        return self.used


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


@pytest.mark.parametrize("share", [0.02, 0.25, 1.0])
def test_pauses_keep_the_share(clock, share, monkeypatch):
    pace = Pace(share)
    monkeypatch.setattr(pace._hurried, "wait", clock.pauses.append)
    for _ in range(10):
        pace.pause()
        clock.used += 0.3
    # the first call has nothing to make up for
    assert len(clock.pauses) == 9
    busy = 0.3 * len(clock.pauses)
    assert busy / (busy + sum(clock.pauses)) == pytest.approx(share)


def test_hurry_ends_the_pause_and_all_later_ones(clock):
    pace = Pace(1e-9)
    pace.pause()
    clock.used += 1
    ended = threading.Event()

    def work():
        for _ in range(3):
            pace.pause()
            clock.used += 1
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not ended.is_set()
    pace.hurry()
    assert ended.wait(60)


def test_stop_ends_the_work(clock):
    pace = Pace(1e-9)
    parts = pace.checked(range(3))
    pace.pause()
    assert next(parts) == 0
    clock.used += 1
    pace.stop()
    for more in (pace.pause, lambda: next(parts)):
        with pytest.raises(MegatronDSError, match="ends"):
            more()
