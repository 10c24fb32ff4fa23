"""`engine.tput_timer` counts micro-batches and updates, and measures after the first updates."""

import pytest

from megatron_ds.compat.engine import throughput

pytestmark = pytest.mark.plan


def test_time_is_added_up_after_the_first_updates(monkeypatch):
    clock = iter(range(1, 100))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(clock)))
    timer = throughput.Throughput(batch_size=8, start_step=1)
    timer.stop()
    assert not timer.initialized and timer.micro_step_count == 0
    seen = []
    for _ in range(3):
        for is_last in (False, True):
            timer.start()
            assert timer.initialized and timer.started
            timer.stop(global_step=is_last)
            seen.append((timer.total_elapsed_time, timer.step_elapsed_time))
    # A second each from the second update on.
    assert seen == [(0, 0), (0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert timer.end_time - timer.start_time == 1
    assert (timer.micro_step_count, timer.global_step_count) == (6, 3)
    assert timer.avg_samples_per_sec() == 8 * 2 / 4
