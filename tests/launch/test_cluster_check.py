"""`megatron-ds env --check`: bandwidths are measured, and what is wrong is named."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_ds.extensions.launch.cluster_check import ClusterMeter, rounds
from megatron_ds.extensions.launch.cluster_findings import Measured, problems, text_of
from megatron_ds.mpu.fake_group import FakeTransport
from megatron_ds.mpu.group import Group
from tests.launch.starts import launch

pytestmark = pytest.mark.one_in(2, together=True)

PROGRAM = Path(__file__).with_name("check_program.py")


@pytest.mark.plan
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_rounds_hold_each_pair_once(size):
    found = [
        (one, other)
        for met in rounds(size)
        for one, other in met.items()
        if one < other and met[other] == one
    ]
    assert sorted(found) == [(i, j) for i in range(size) for j in range(i + 1, size)]


def healthy(rank: int) -> Measured:
    links = {other: 10.0 for other in range(4) if other != rank}
    return Measured(rank, f"n{rank // 2}", 0.1, {1024: 1.0}, 9.0, links)


@pytest.mark.plan
@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"work_seconds": 0.3}, "rank 2 on n1 computes 3.0 times as long"),
        (
            {"links": {0: 1.0, 3: 2.0}},
            "rank 2 on n1 exchanges 2.00 GB/s at most, the median",
        ),
        ({"clock": -3.0}, "the clock of rank 2 on n1 is -3.0 s from that of rank 0"),
        (
            {"write_error": "No such file or directory", "unseen": [2]},
            "rank 2 on n1 cannot write into the folder: No such file or directory",
        ),
        (
            {"unseen": [0, 1]},
            "rank 2 on n1 does not see the files that ranks [0, 1] wrote",
        ),
    ],
)
def test_each_defect_is_named_with_rank_and_host(change, sentence):
    found = [healthy(rank) for rank in range(4)]
    assert problems(found) == []
    for name, value in change.items():
        setattr(found[2], name, value)
    [said] = problems(found)
    assert said.startswith(sentence)
    assert f"problem: {said}" in text_of(found, [said])


@pytest.mark.processes
def test_a_slow_rank_a_wrong_clock_and_another_folder_are_found(tmp_path):
    words = ["--num_gpus", "3", "--no_local_rank", str(PROGRAM), str(tmp_path)]
    code, text = launch(words, tmp_path, OMP_NUM_THREADS="1")
    assert code == 1
    begin = text.index("{\n")
    report, _ = json.JSONDecoder().raw_decode(text[begin:])
    said = "\n".join(report["problems"])
    assert "rank 1 on" in said and "times as long as the median" in said
    assert "exchanges 0.00 GB/s at most" in said
    assert "is +60.0 s from that of rank 0" in said
    assert "does not see the files that ranks [0, 1] wrote" in said
    for rank in report["ranks"]:
        assert {int(other) for other in rank["links"]} == {0, 1, 2} - {rank["rank"]}
        assert all(
            value > 0 and math.isfinite(value) for value in rank["links"].values()
        )
        assert rank["ring"] > 0 and rank["reduces"]["1024"] > 0
    assert not [*tmp_path.glob("**/.check-*")]
    # The launcher repeats the problems, and not the whole report.
    last = text[text.index("failed first") :]
    assert "problem: rank 1 on" in last and '"reduces"' not in last


@pytest.mark.plan
def test_a_folder_that_cannot_be_looked_into_is_a_finding(tmp_path):
    group = Group("world", (0,), 0, FakeTransport("world", 1))
    found = Measured(0, "n1")
    ClusterMeter(group, torch.device("cpu")).look_into(tmp_path / ("x" * 300), found)
    [said] = problems([found])
    assert said.endswith("cannot write into the folder: File name too long")
    # One rank has no network.
    text = text_of([found], [said])
    assert text.startswith("1 rank on 1 host\nproduct: ")


@pytest.mark.processes
def test_two_ranks_are_described(tmp_path):
    words = ["--num_gpus", "2", "--module", "megatron_ds", "env", "--check"]
    code, text = launch(words, tmp_path, OMP_NUM_THREADS="1")
    assert code in (0, 1), text
    for words in (
        "2 ranks on 1 host",
        "all-reduce of 1 KiB",
        "ring:",
        "pairs on one host:",
    ):
        assert words in text
