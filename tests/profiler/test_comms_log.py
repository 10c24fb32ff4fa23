"""--comms-logger of a run: the table at its end."""

import contextlib
from unittest import mock

import pytest

from megatron_ds.errors import DataError
from tests.harness.pretraining import MOCK, run_pretrain, train

pytestmark = pytest.mark.processes


def test_a_run_ends_with_the_table_of_rank_0(tmp_path):
    flags = ["--comms-logger", "--train-iters", "3", "--save", tmp_path]
    first, second = train(2, [*MOCK, *flags])
    _, _, table = first.out.partition("communication of rank 0\n")
    head, *rows = table.splitlines()
    assert head.split()[-1] == "waited" and "communication" not in second.out
    # gradients and metrics of three steps
    found = {tuple(row.split()[:4]): row.split()[6] for row in rows if "all_" in row}
    assert found["all_reduce", "dp-cp", "of", "2"] == "3"
    assert found["all_reduce", "world", "of", "2"] == "3"


def test_a_run_that_ends_with_an_error_has_the_table_without_other_ranks_times(
    tmp_path,
):
    flags = ["--comms-logger", "--save", tmp_path]
    first, second = run_pretrain(2, [*MOCK, *flags], spoil=failing_step)
    assert first.code and second.code
    _, _, table = first.out.partition("communication of rank 0\n")
    head, *rows = table.splitlines()
    assert head.split()[-1] == "link" and any("all_reduce" in row for row in rows)


@contextlib.contextmanager
def failing_step(rank):
    """The third step fails on all ranks."""
    from megatron_ds.training import trainer

    of_package = trainer.train_step
    calls = []

    def train_step(*args, **options):
        calls.append(None)
        if len(calls) == 3:
            raise DataError("the third step fails")
        return of_package(*args, **options)

    with mock.patch.object(trainer, "train_step", train_step):
        yield
