"""Ranks of one job with different options, data or versions: all end soon, with exit code 2."""

import contextlib

import numpy as np
import pytest

from megatron_ds.data.text.indexed import IndexedWriter
from tests.harness import pretraining
from tests.harness.pretraining import MOCK, TINY
from tests.harness.processes import run_processes
from tools.free_port import free_port

pytestmark = pytest.mark.processes


def _rank(rank, world, port, commands, spoil):
    return pretraining._rank(rank, world, port, commands[rank], spoil)


def run_ranks_with(commands, spoil=None):
    """How each rank ended. commands: of each rank."""
    return run_processes(
        len(commands),
        _rank,
        free_port(),
        [list(map(str, c)) for c in commands],
        spoil,
        joined=False,
    )


def assert_all_end(results, folder, *words):
    assert [ended.code for ended in results] == [2] * len(results), results
    for word in words:
        assert word in results[0].err
    assert not list(folder.glob("**/iter_*"))


@pytest.mark.parametrize(
    "one, other, words",
    [
        (
            ["--lr", "1e-3"],
            ["--lr", "1e-2"],
            ("--lr is 0.001 on rank 0", "0.01 on rank 1"),
        ),
        (
            ["--tensor-model-parallel-size", "1"],
            ["--tensor-model-parallel-size", "2"],
            ("--tensor-model-parallel-size is 1", "2 on rank 1"),
        ),
        (["--bf16"], [], ("--bf16 is true", "false on rank 1")),
        (
            ["--num-layers", "2"],
            ["--num-layers", "3"],
            ("--num-layers is 2", "3 on rank 1"),
        ),
        (
            ["--save-interval", "2"],
            ["--save-interval", "3"],
            ("--save-interval is 2", "3 on rank 1"),
        ),
    ],
)
def test_two_ranks_with_different_options(tmp_path, one, other, words):
    base = [*MOCK, "--save", tmp_path]
    assert_all_end(run_ranks_with([[*base, *one], [*base, *other]]), tmp_path, *words)


@contextlib.contextmanager
def older_package(rank):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("megatron_ds.config.compared_values.__version__", "0.0.1")
        yield


@pytest.mark.quick
def test_two_versions_of_the_package_on_three_ranks(tmp_path):
    results = run_ranks_with(
        [[*MOCK, "--global-batch-size", "3", "--save", tmp_path]] * 3, older_package
    )
    assert_all_end(
        results, tmp_path, "the version of megatron_ds is", "0.0.1 on rank 1"
    )


def test_a_machine_with_an_old_copy_of_the_corpus(tmp_path):
    for name, documents in (("node1", 60), ("node2", 59)):
        (tmp_path / name).mkdir()
        with IndexedWriter(tmp_path / name / "text", np.uint16) as corpus:
            for at in range(documents):
                corpus.add_document([at % 60] * 20)
    base = [*TINY, "--train-iters", "3", "--save", tmp_path / "run", "--data-path"]
    commands = [[*base, tmp_path / name / "text"] for name in ("node1", "node2")]
    assert_all_end(
        run_ranks_with(commands),
        tmp_path,
        "different data",
        "60 documents",
        "59 documents",
        str(tmp_path / "node2"),
    )
