"""--comms-logger of a run: the table at its end."""

import pytest

from tests.harness.pretraining import MOCK, train

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
    assert found["all_reduce", "tp-cp-dp-pp", "of", "2"] == "3"
