"""When a stage may be pinned: the comparison, and what a machine tells."""

import sys

import pytest
import torch

from megatron_ds.planning.keep_gathered import (
    PinBudget,
    _cgroup,
    _machine,
    decide_pinning,
    free_memory,
    gradient_buffers,
)


@pytest.mark.parametrize("spare, pinned", [(0, True), (-1, False)])
def test_the_tightest_rank_decides_to_the_byte(spare, pinned):
    roomy, tight = PinBudget(10_000, 1, 2, 3, 4), PinBudget(1000, 100, 200, 300, 300 - spare)
    decision = decide_pinning([roomy, tight, roomy])
    assert (decision.pinned, decision.rank, decision.budget) == (pinned, 1, tight)      # 1000 - a tenth = 900


def test_nothing_is_pinned_where_nothing_is_gathered_or_memory_is_unknown():
    assert not decide_pinning([PinBudget(10_000, 1, 2, 3, 0)]).pinned
    assert not decide_pinning([PinBudget(0, 1, 2, 3, 4)]).pinned
    # a stage of small ones
    assert decide_pinning([PinBudget(10_000, 1, 2, 3, 0), PinBudget(10_000, 1, 2, 3, 4)]).pinned


def test_whole_gradients_take_all_layers_others_those_under_way():
    assert gradient_buffers([10, 30, 20], 2, kept_whole=True, gradient_bytes=4) == 240
    assert gradient_buffers([10, 30, 20], 2, kept_whole=False, gradient_bytes=4) == 240
    assert gradient_buffers([10, 30, 20] * 5, 2, kept_whole=False, gradient_bytes=4) == 480
    assert gradient_buffers([], 2, kept_whole=False, gradient_bytes=4) == 0


def test_a_machine_tells_its_memory_and_a_container_less(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:   1500 kB\n")
    assert _machine(tmp_path / "meminfo") == 1500 * 1024
    assert _machine(tmp_path / "missing") is None and _cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert _cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert _cgroup(tmp_path) == 350


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine_tells():
    assert free_memory(torch.device("cpu")) > 0
