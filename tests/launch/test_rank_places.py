"""Which rank is behind, and when reports of several hosts mean that a job hangs."""

import math
import os
from dataclasses import replace

import pytest

from megatron_ds.extensions.launch import stalls as stalls_module
from megatron_ds.extensions.launch import watch as watch_module
from megatron_ds.extensions.launch.job import Job, RankProgram
from megatron_ds.extensions.launch.rank_places import (
    STOPPED,
    DeviceAt,
    NodeReport,
    RankPlace,
    behind,
    hang_text,
    report_in,
    table_text,
)
from megatron_ds.extensions.launch.stalls import SILENT_SECONDS, Stalls
from megatron_ds.extensions.launch.watch import StepTimes, Watch
from megatron_ds.host import places
from megatron_ds.host.place_file import NONE, DeviceEntry, PlaceWriter
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.schedules import SCHEDULES
from megatron_ds.pipeline.simulate import simulate

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
    found = behind([rank(0), rank(1, **first), rank(2)])
    assert [one.rank for one in found.ranks] == [1] and not found.is_device


def test_a_stopped_rank_comes_before_one_that_computes():
    ranks = [rank(0, is_waiting=False, step=3), rank(1, state=STOPPED)]
    assert behind(ranks).ranks[0].rank == 1


def at_device(number: int, host: str = "n1", done: int = 9, **values) -> RankPlace:
    """A rank whose host waits for its device. values: of the place of the device"""
    found = dict(step=5, launched=12, moment=done, instruction="REDUCE", stage=0)
    device = DeviceAt(done=done, **found | values)
    return rank(number, host, waits_for_device=True, device=device)


def named(ranks) -> list[int]:
    found = behind(ranks)
    assert found.is_device
    return [one.rank for one in found.ranks]


class TestDevices:
    """All hosts wait for their devices, as those of GPUs do: they launch a whole step ahead."""

    def test_the_device_at_the_earliest_place_is_behind_not_the_host_that_came_first(
        self,
    ):
        ranks = [at_device(i) for i in range(4)]
        ranks[2] = replace(ranks[2], idle_seconds=30.0)
        ranks.append(at_device(4, "n2", done=3, instruction="F", microbatch=1))
        assert named(ranks) == [4]
        assert behind(ranks).host == "n2"

    def test_a_device_of_an_earlier_step_is_behind(self):
        assert named([at_device(0, done=1), at_device(1, step=4)]) == [1]

    def test_no_host_is_accused_where_all_devices_are_at_one_place(self):
        ranks = [at_device(0), at_device(1, "n2")]
        found = behind(ranks)
        assert found.is_device and found.host == "" and len(found.ranks) == 2
        text = hang_text(found, total=2)
        assert "No host is behind; a device is: one of those of all ranks" in text

    def test_no_device_is_named_where_a_place_is_not_known(self):
        ranks = [at_device(0), rank(1, "n2", waits_for_device=True)]
        assert named(ranks) == [0, 1]

    def test_a_host_that_does_not_wait_comes_before_devices(self):
        busy = replace(rank(1, is_waiting=False), device=at_device(1, done=12).device)
        assert [one.rank for one in behind([at_device(0), busy]).ranks] == [1]

    def test_a_host_that_stands_in_a_launch_is_at_its_device(self):
        """The queue of the device is full, so the host cannot go on."""
        full = replace(at_device(1, done=3), is_waiting=False, waits_for_device=False)
        assert named([at_device(0), full]) == [1]

    @pytest.mark.parametrize("name, p", [("1f1b", 4), ("gpipe", 3), ("zb-h1", 3)])
    def test_every_instruction_of_a_pipeline_is_found_if_it_does_not_end(self, name, p):
        """The device of each stage stands where it waits for the instruction, which no count of instructions shows."""
        schedule = lower(SCHEDULES[name](p, 6), p)
        starts = simulate(schedule).starts
        for stuck, program in enumerate(schedule):
            for at, i in enumerate(program):
                if i.op not in (Op.F, Op.B, Op.I):
                    continue
                done = done_without(schedule, i)
                places = [
                    at_device(
                        r,
                        done=done[r],
                        moment=int(starts[r][done[r]]),
                        stage=schedule[r][done[r]].stage,
                    )
                    for r in range(p)
                    if done[r] < len(schedule[r])
                ]
                assert done[stuck] == at and stuck in named(places), i
                assert len(named(places)) == 1, i


def done_without(schedule, stuck: Instruction) -> list[int]:
    """How many instructions each rank can do if one does not end. Receives are posted without a wait."""
    ended: set[Instruction] = set()
    done = [0] * len(schedule)

    def can_end(i: Instruction) -> bool:
        before = {
            Op.F: Instruction(Op.F, i.stage - 1, i.microbatch),
            Op.B: Instruction(Op.B, i.stage + 1, i.microbatch),
            Op.I: Instruction(Op.I, i.stage + 1, i.microbatch),
        }.get(i.op)
        is_outer = before is None or not 0 <= before.stage < len(schedule)
        return i != stuck and (is_outer or before in ended)

    is_moving = True
    while is_moving:
        is_moving = False
        for r, program in enumerate(schedule):
            while done[r] < len(program) and can_end(program[done[r]]):
                ended.add(program[done[r]])
                done[r] += 1
                is_moving = True
    return done


def test_a_report_passes_as_a_line():
    report = NodeReport("n1", (at_device(0), rank(1, collective="all_reduce over dp")))
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

    def test_all_hosts_wait_for_devices(self, stalls):
        """A collective of NCCL that does not end is no fault of the host that came first."""
        idle = [69.91, 69.93, 69.97, 69.92, 69.90, 69.95, 69.94, 69.96]
        ranks = [at_device(r, "n1" if r < 4 else "n2") for r in range(8)]
        ranks[5] = at_device(5, "n2", done=3, instruction="F", microbatch=1)
        ranks = [replace(one, idle_seconds=s) for one, s in zip(ranks, idle)]
        stalls.add(NodeReport("n1", tuple(ranks[:4])))
        stalls.add(NodeReport("n2", tuple(ranks[4:])))
        hang = stalls.hang()
        assert hang.host == "n2" and "that of rank 5 on n2 has not moved" in hang.text
        assert "is at F of micro-batch 1 at stage 0 (3 of 12" in hang.text
        assert "rank 2 on n1 is behind" not in hang.text

    def test_devices_may_wait_for_hosts_that_are_not_seen(self):
        stalls = Stalls(["n1"], sees_all=False)
        stalls.add(NodeReport("n1", (at_device(0),)))
        assert stalls.hang() is None

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


class Clock:
    """The seconds of a test, in which nothing takes any time by itself."""

    def __init__(self):
        self.now = 100.0

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


class TestWatch:
    @pytest.fixture
    def clock(self, monkeypatch):
        clock = Clock()
        for module in (watch_module, places):
            monkeypatch.setattr(module, "time", clock)
        return clock

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
        writer.wait(places.FOR_RANKS)
        assert self.limit(job, tmp_path / "p") == job.patience_seconds
        writer.phase(places.SAVING)
        assert self.limit(job, tmp_path / "p") == job.patience_seconds
        writer.step(1)  # the time of a step is not known
        assert self.limit(job, tmp_path / "p") == job.patience_seconds

    def test_two_median_steps_are_allowed(self, job, clock, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        for step in range(1, 5):
            writer.instruction("F", 0, 0)
            clock.now += 0.1
            writer.step(step)
            watch.look()
        [found] = watch.look(is_last=True).ranks
        assert found.limit_seconds - job.hang_seconds == pytest.approx(0.2)

    def test_ranks_that_move_are_not_listed(self, job, clock, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        assert watch.look().ranks == ()
        clock.now += 0.1
        assert watch.look().ranks[0].idle_seconds == pytest.approx(0.1)
        writer.step(1)
        assert watch.look().ranks == ()

    def test_a_device_that_moves_is_no_hang_while_its_host_waits(
        self, job, clock, tmp_path
    ):
        """A long step, as of a later stage of a curriculum: the host launched all of it long ago."""
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        writer.step(5)
        writer.wait(places.FOR_DEVICE)
        for done in range(4):
            clock.now += 0.1
            now = clock.monotonic_ns()
            writer.device(DeviceEntry(now, now, 5, done, 9, done, "F", 0, NONE))
            assert watch.look().ranks == ()
        clock.now += 0.1
        [found] = watch.look().ranks
        assert found.is_at_device and found.idle_seconds == pytest.approx(0.1)
        assert found.device == DeviceAt(5, 3, 9, 3, "F", 0, NONE)

    def test_an_old_look_at_a_device_says_nothing(self, job, clock, tmp_path):
        writer = PlaceWriter(tmp_path / "p", {})
        then = clock.monotonic_ns() - int(60e9)
        writer.device(DeviceEntry(then, then, 5, 1, 9, 1, "F", 0, 0))
        [found] = Watch(job, "n1", [Process(tmp_path / "p")]).look(is_last=True).ranks
        assert found.device is None

    @pytest.mark.parametrize("phase", [places.COMPILING, places.EXPORTING])
    def test_compilations_and_exports_may_take_long(self, job, clock, tmp_path, phase):
        writer = PlaceWriter(tmp_path / "p", {})
        watch = Watch(job, "n1", [Process(tmp_path / "p")])
        for step in range(3):
            writer.instruction("F", 0, 0)
            writer.step(step)
            watch.look()
        before = writer.phase(phase)
        [found] = watch.look(is_last=True).ranks
        assert found.limit_seconds == job.patience_seconds
        writer.phase(before)
        [found] = watch.look(is_last=True).ranks
        assert found.limit_seconds == job.hang_seconds

    def test_a_program_without_places_is_not_watched(self, job, tmp_path):
        assert Watch(job, "n1", [Process(tmp_path / "p")]).look() is None
