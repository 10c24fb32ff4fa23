"""Ranks that do not go on are named, with the stacks and places of all, before the run ends."""

import re
import time
from pathlib import Path

import pytest

from megatron_ds.extensions.launch.stalls import HANG_CODE
from tests.harness.limits import HUNG
from tests.launch.starts import Launcher, all_end

pytestmark = pytest.mark.processes

SHORT = ["--hang-seconds", "1", "--end-seconds", "1"]
PROGRAM = str(Path(__file__).with_name("hanging.py"))


@pytest.mark.parametrize("how", ["stop", pytest.param("loop", marks=pytest.mark.all)])
def test_a_rank_that_does_not_go_on_is_named(tmp_path, how):
    words = ["--num_gpus", "3", *SHORT, "--log-dir", "logs"]
    started = Launcher([*words, PROGRAM, how], tmp_path)
    assert started.end() == HANG_CODE, started.text
    assert all_end(tmp_path)
    # first and last: the rank that is behind
    first, last = re.findall(r"rank \d on localhost is behind.*", started.text)
    for text in (first, last):
        assert text.startswith("rank 1 on localhost is behind")
        assert "step 4, training, F of micro-batch 2 at stage 0" in text
    assert ("stopped" in last) == (how == "stop")
    assert started.text.rstrip().endswith(last)
    # stacks, with their ranks
    for rank in (0, 2) if how == "stop" else (0, 1, 2):
        assert re.search(rf"\[rank {rank}\]   File .*hanging.py", started.text)
    # the table, and what is kept
    assert started.text.count("waits for other ranks") == 2 * 2
    kept = (tmp_path / "logs/rank0.places").read_text().splitlines()
    assert "collective 1 (all_reduce over dp)" in kept[-1] and len(kept) == 9


def test_a_rank_that_is_only_slow_is_named_and_the_run_is_complete(tmp_path):
    words = ["--num_gpus", "2", "--hang-seconds", "1", "--end-seconds", str(HUNG)]
    words += [PROGRAM, "pause"]
    started = Launcher(words, tmp_path)
    for words, file in (
        ("rank 1 on localhost is behind", "is-named"),
        ("the ranks move again", "moves"),
    ):
        started.wait_for(words)
        (tmp_path / file).touch()
    assert started.end() == 0, started.text
    named = started.text.index("rank 1 on localhost is behind")
    assert named < started.text.index("the ranks move again")
    assert f"ends if it does not move for {HUNG} s more" in started.text


@pytest.mark.all
def test_ranks_that_are_not_watched_wait(tmp_path):
    words = ["--num_gpus", "2", "--hang-seconds", "0", PROGRAM, "loop"]
    started = Launcher(words, tmp_path)
    time.sleep(3)
    assert started.process.poll() is None
    started.process.kill()
    started.end()
    assert all_end(tmp_path)
    assert "behind" not in started.text
