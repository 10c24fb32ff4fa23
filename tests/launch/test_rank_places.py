"""Which rank is behind, and when reports of several hosts mean that a job hangs."""

import math
import os
import time

import pytest

from megatron_ds.extensions.launch import stalls as stalls_module
from megatron_ds.extensions.launch.job import Job, RankProgram
from megatron_ds.extensions.launch.rank_places import (
    STOPPED,
    NodeReport,
    RankPlace,
    behind,
    report_in,
    table_text,
)
from megatron_ds.extensions.launch.stalls import SILENT_SECONDS, Stalls
from megatron_ds.extensions.launch.watch import StepTimes, Watch
from megatron_ds.host import places
from megatron_ds.host.places import PlaceWriter

pytestmark = pytest.mark.plan


def rank(number: int, host: str = "n1", **values) -> RankPlace:
    usual = dict(idle_seconds=20.0, limit_seconds=10.0, step=5, is_waiting=True)
    return RankPlace(number, host, **usual | values)


@pytest.mark.parametrize(
    "first",
    [
        dict(state=STOPPED),
        dict(step=-1, is_waiting=False),
        dict(is_waiting=False),
        dict(step=4),
        dict(idle_seconds=20.5),
    ],
)
def test_the_rank_for_which_others_wait_is_behind(first):
    assert behind([rank(0), rank(1, **first), rank(2)]).rank == 1


def test_a_stopped_rank_comes_before_one_that_computes():
    ranks = [rank(0, is_waiting=False, step=3), rank(1, state=STOPPED)]
    assert behind(ranks).rank == 1


def test_a_report_passes_as_a_line():
    report = NodeReport("n1", (rank(0), rank(1, collective="all_reduce over dp")))
    assert report_in(f"n1: {report.line()}\n") == report
    assert report_in(report.line()[:-9]) is None
    assert report_in("a line of the training") is None


def test_a_table_has_a_line_for_each_rank():
    ranks = [rank(1, instruction="F", stage=2, microbatch=3, is_waiting=False), rank(0)]
    first, second = table_text(ranks).splitlines()[1:]
    assert "rank 0" in first and "waits for other ranks" in first
    assert "step 6" in second and "F of micro-batch 3 at stage 2" in second


class TestStalls:
    @pytest.fixture
    def stalls(self):
        return Stalls(["n1", "n2"])

    def test_a_host_that_moves_is_no_hang(self, stalls):
        stalls.add(NodeReport("n1", (rank(0),)))
        assert stalls.hang() is None
        stalls.add(NodeReport("n2"))
        assert stalls.hang() is None
        stalls.add(NodeReport("n2", (rank(1, "n2", is_waiting=False),)))
        hang = stalls.hang()
        assert hang.host == "n2" and "rank 1 on n2 is behind" in hang.text

    def test_a_rank_that_saves_has_its_own_limit(self, stalls):
        stalls.add(NodeReport("n1", (rank(0),)))
        saves = rank(1, "n2", is_waiting=False, phase="saving", limit_seconds=100.0)
        stalls.add(NodeReport("n2", (saves,)))
        assert stalls.hang() is None

    def test_a_host_that_is_silent_is_named(self, stalls, monkeypatch):
        now = stalls_module.time.monotonic()
        stalls.add(NodeReport("n2"))
        later = now + SILENT_SECONDS + 1
        monkeypatch.setattr(stalls_module.time, "monotonic", lambda: later)
        stalls.add(NodeReport("n1", (rank(0),)))
        hang = stalls.hang()
        assert hang.host == "n2" and "no report of n2" in hang.text

    def test_a_host_whose_ranks_have_ended_is_not_silent(self, stalls, monkeypatch):
        now = stalls_module.time.monotonic()
        stalls.add(NodeReport("n2", is_last=True))
        later = now + SILENT_SECONDS + 1
        monkeypatch.setattr(stalls_module.time, "monotonic", lambda: later)
        stalls.add(NodeReport("n1", (rank(0),)))
        assert stalls.hang().host == "n1"

    def test_ranks_that_wait_for_hosts_that_are_not_seen_do_not_hang(self):
        stalls = Stalls(["n1"], sees_all=False)
        stalls.add(NodeReport("n1", (rank(0),)))
        assert stalls.hang() is None
        stalls.add(NodeReport("n1", (rank(0), rank(1, is_waiting=False))))
        assert "rank 1 on n1 is behind" in stalls.hang().text

    def test_the_furthest_step_is_kept(self, stalls):
        stalls.add(NodeReport("n1", (rank(0, step=9),), is_last=True))
        stalls.add(NodeReport("n2", (rank(1, step=8),), is_last=True))
        assert stalls.step == 9
        assert stalls.hang() is None


def test_the_median_is_of_steps():
    times = StepTimes()
    assert times.median == 0 and times.is_empty
    # a run that continues: its first step begins after 25 s
    times.begin(100, int(25e9))
    times.add(101, int(30e9))
    assert times.median == 5 and not times.is_empty
    for step, seconds in ((102, 32), (102, 33), (104, 38), (105, 40)):
        times.add(step, int(seconds * 1e9))
    # of 5, 2, 3 and 2: a step counts from when it was first seen
    assert times.median == 2.5


class Process:
    """A rank for `Watch`: this process, with places of its own."""

    def __init__(self, path, code=None):
        self.number = 0
        self.pid = os.getpid()
        self.places = path
        self._code = code

    def poll(self):
        return self._code


class TestWatch:
    @pytest.fixture
    def job(self):
        program = RankProgram(("train.py",), "")
        return Job("j", {"n1": (0,)}, program, {}, "/", "n1", 1, hang_seconds=0.05)

    def limit(self, job, path) -> float:
        [found] = Watch(job, "n1", [Process(path)]).look(is_last=True).ranks
        return found.limit_seconds

    def test_a_limit_follows_from_the_phase(self, job, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        assert self.limit(job, tmp_path / "p") == math.inf  # a program's own loop
        writer.wait(True)
        assert self.limit(job, tmp_path / "p") == job.patience_seconds
        writer.phase(places.SAVING)
        assert self.limit(job, tmp_path / "p") == job.patience_seconds
        writer.step(1)  # the time of a step is not known
        assert self.limit(job, tmp_path / "p") == job.patience_seconds

    def test_two_median_steps_are_allowed(self, job, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        for step in range(1, 5):
            writer.instruction("F", 0, 0)
            time.sleep(0.1)
            writer.step(step)
            watch.look()
        [found] = watch.look(is_last=True).ranks
        assert 0.2 < found.limit_seconds - job.hang_seconds < 100

    def test_ranks_that_move_are_not_listed(self, job, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        assert watch.look().ranks == ()
        time.sleep(0.1)
        assert watch.look().ranks[0].idle_seconds > 0.1
        writer.step(1)
        assert watch.look().ranks == ()

    def test_a_program_without_places_is_not_watched(self, job, tmp_path):
        assert Watch(job, "n1", [Process(tmp_path / "p")]).look() is None
