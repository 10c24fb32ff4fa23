"""A training that the launcher has started again goes on from its own checkpoint, and from no other one."""

import functools
import json
from contextlib import contextmanager

import pytest

from tests.harness.pretraining import (
    MOCK,
    losses,
    run_file,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

FIRST_HALF = [*MOCK[:-1], "3"]


@contextmanager
def launched(rank: int, restarts: int, run: str, on_rank: int | None = None):
    """The variables of megatron-ds launch. on_rank: the rank that has the number of restarts; None: all."""
    with pytest.MonkeyPatch.context() as patch:
        if on_rank in (None, rank):
            patch.setenv("MEGATRON_DS_RESTARTS", str(restarts))
        patch.setenv("MEGATRON_DS_RUN", run)
        yield


def start(folder, argv, restarts: int = 0, run: str = "abc", *more: str) -> str:
    spoil = functools.partial(launched, restarts=restarts, run=run)
    [ended] = train(1, [*argv, "--save", folder, *more], spoil=spoil)
    return ended.out + ended.err


@pytest.mark.all
def test_a_restart_goes_on_to_the_same_bits(tmp_path):
    start(tmp_path / "whole", MOCK)
    cut = tmp_path / "cut"
    start(cut, MOCK, 0, "abc", "--exit-interval", "3")
    start(cut, MOCK, 1)
    assert losses(cut) == losses(tmp_path / "whole")
    assert same_bits(saved_state(cut, 6), saved_state(tmp_path / "whole", 6))
    assert run_file(cut, 6)["run_id"] == "abc"


def test_a_run_that_began_elsewhere_goes_on_in_its_own_folder(tmp_path):
    """--finetune of another run: the restart does not begin from that one again."""
    start(tmp_path / "base", FIRST_HALF, 0, "base")
    tuned = tmp_path / "tuned"
    from_base = ["--load", tmp_path / "base", "--finetune"]
    start(tuned, MOCK, 0, "abc", *from_base, "--exit-interval", "2")
    start(tuned, MOCK, 1, "abc", *from_base)
    lines = (tuned / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"train"' in line]
    assert steps == [1, 2, 3, 4, 5, 6]  # no step twice
    assert run_file(tuned, 6)["run_id"] == "abc"


def test_another_run_in_the_folder_is_not_loaded(tmp_path):
    start(tmp_path, FIRST_HALF, 0, "other")
    spoil = functools.partial(launched, restarts=1, run="abc")
    [ended] = run_pretrain(1, [*MOCK, "--save", tmp_path], spoil=spoil)
    assert ended.code == 2
    assert "other" in ended.err or "Add --load" in ended.err


@pytest.mark.quick
@pytest.mark.parametrize("on_rank", [0, 1])
def test_one_rank_that_counts_a_restart_restarts_all(tmp_path, on_rank):
    start(tmp_path, FIRST_HALF)
    again = functools.partial(launched, restarts=1, run="abc", on_rank=on_rank)
    ended = run_pretrain(2, [*MOCK, "--save", tmp_path], spoil=again)
    assert [rank.code for rank in ended] == [0, 0], ended[1].err
    assert "restart 1: continuing from iteration 3" in ended[0].out + ended[0].err
