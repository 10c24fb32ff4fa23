"""Whether stages are kept gathered: the comparison, and the free memory of a machine."""

import sys

import pytest
import torch

from megatron_ds.planning.keep_gathered import (
    MemoryBudget,
    _cgroup,
    _machine,
    decide_keep_gathered,
    free_memory,
)

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("spare, keeps", [(0, True), (-1, False)])
def test_the_tightest_rank_decides_to_the_byte(spare, keeps):
    roomy, tight = (
        MemoryBudget(10_000, 1, 2, 3, 4),
        MemoryBudget(1000, 100, 200, 300, 300 - spare),
    )
    decision = decide_keep_gathered([roomy, tight, roomy])
    assert (decision.keeps, decision.rank, decision.budget) == (
        keeps,
        1,
        tight,
    )  # 1000 - a tenth = 900


def test_nothing_is_kept_gathered_where_nothing_is_gathered_or_memory_is_unknown():
    assert not decide_keep_gathered([MemoryBudget(10_000, 1, 2, 3, 0)]).keeps
    assert not decide_keep_gathered([MemoryBudget(0, 1, 2, 3, 4)]).keeps
    small = MemoryBudget(10_000, 1, 2, 3, 0)  # all its parameters are kept whole anyway
    assert decide_keep_gathered([small, MemoryBudget(10_000, 1, 2, 3, 4)]).keeps


def test_free_memory_is_the_machines_or_what_is_left_of_the_containers(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal:  2000 kB\nMemFree:  10 kB\nMemAvailable:   1500 kB\n"
    )
    assert _machine(tmp_path / "meminfo") == 1500 * 1024
    assert _machine(tmp_path / "missing") is None and _cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert _cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert _cgroup(tmp_path) == 350


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_free_memory_of_this_machine_is_known():
    assert free_memory(torch.device("cpu")) > 0
