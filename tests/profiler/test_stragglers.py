"""Slow ranks: which are named, and that a rank that is slow is named while the run goes on."""

import functools
import re
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_ds.extensions.profiler.stragglers import slow_ranks, stragglers_text
from tests.harness.pretraining import MOCK, losses, train


@pytest.mark.plan
class TestSlowRanks:
    def test_a_rank_is_compared_with_its_stage(self):
        # stage 1 takes twice as long as stage 0, which is no reason to name its ranks
        seconds = [1.0, 1.1, 1.5, 2.0, 2.1, 2.0]
        [slow] = slow_ranks(seconds, [0, 0, 0, 1, 1, 1])
        assert slow.rank == 2 and slow.ratio == pytest.approx(1.5 / 1.1)

    def test_ranks_of_small_stages_are_compared_with_all(self):
        [slow] = slow_ranks([1.0, 3.0], [0, 0])
        assert slow.rank == 1 and slow.ratio == 3.0
        assert slow_ranks([1.0, 1.1], [0, 1]) == []

    def test_a_time_that_is_not_known_does_not_count(self):
        assert slow_ranks([0.0, 0.0], [0, 0]) == []
        assert [one.rank for one in slow_ranks([0.0, 1.0, 2.0, 1.0], [0] * 4)] == [2]

    def test_the_slowest_is_named_first_with_its_host(self):
        seconds = [1.0, 1.0, 1.0, 1.3, 2.0]
        slow = slow_ranks(seconds, [0] * 5)
        text = stragglers_text(7, seconds, slow, ["a", "a", "b", "b", "c"])
        assert text == (
            "computation in iteration 7, median 1000.0 ms: rank 4 on c takes 2.00 times the median (2000.0 ms); "
            "rank 3 on b takes 1.30 times the median (1300.0 ms)"
        )
        assert "no rank takes more than 1.2 times" in stragglers_text(
            7, seconds, [], []
        )


@contextmanager
def slow_stage(rank: int, victim: int):
    """The forward of the victim takes 100 s more by the clocks of all ranks, which others spend waiting."""
    from megatron_ds.extensions.profiler import stragglers
    from megatron_ds.pipeline.stage import Stage

    forward, clock, waited = Stage.forward, time.perf_counter, stragglers.waited_seconds
    more = [0.0]

    def slow(self, *arguments):
        more[0] += 100.0
        return forward(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "forward", slow)
        later = SimpleNamespace(perf_counter=lambda: clock() + more[0])
        patch.setattr(stragglers, "time", later)
        if rank != victim:
            patch.setattr(stragglers, "waited_seconds", lambda: waited() + more[0])
        yield


@pytest.mark.processes
def test_a_slow_rank_is_named_and_nothing_else_changes(tmp_path):
    report = ["--straggler-report", "2", "--save", tmp_path / "a"]
    spoil = functools.partial(slow_stage, victim=1)
    first, second = train(2, [*MOCK, *report], spoil=spoil)
    named = re.findall(r"in iteration (\d).*rank 1 on \S+ takes (\S+) times", first.out)
    assert [step for step, _ in named] == ["2", "4"]  # 6 has no step after it
    assert all(float(ratio) > 1.2 for _, ratio in named)
    assert "rank 0 on" not in first.out and "computation in" not in second.out
    train(2, [*MOCK, "--save", tmp_path / "b"])
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
