"""Shards of the tests: together they are all tests, each is in one, and cases of a test stay together."""

import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from tests.harness.documents import ROOT
from tests.harness.limits import HUNG
from tests.harness.split import in_shard, shard_of

NAMES = [f"tests/x/test_{i % 7}.py::test_{i}[{j}]" for i in range(200) for j in (0, 1)]


@pytest.mark.plan
@pytest.mark.parametrize("count", [1, 3, 8])
def test_each_test_is_in_one_shard_with_all_its_cases(count):
    shards = [{n for n in NAMES if in_shard(n, (i + 1, count))} for i in range(count)]
    assert set().union(*shards) == set(NAMES)
    assert sum(map(len, shards)) == len(NAMES)
    tests = [{name.partition("[")[0] for name in shard} for shard in shards]
    assert sum(map(len, tests)) == 200
    # No shard is empty or has most of the tests.
    assert all(100 / count < len(each) < 400 / count for each in tests)


@pytest.mark.plan
@pytest.mark.parametrize("text", ["0/8", "9/8", "8", "a/b", "1/0", "-1/8", ""])
def test_another_shard_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="write 3/8"):
        shard_of(text)


def collected(*flags: str) -> list[str]:
    """The cases of a room that pytest collects in a process of its own."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, "--collect-only", *flags, "tests/launch/test_hostfile.py", __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.processes
@pytest.mark.quick
def test_pytest_runs_the_tests_of_its_shard_alone():
    whole = collected()
    parts = [collected("--shard", f"{i}/2") for i in (1, 2)]
    assert all(parts) and len(whole) > 15
    assert sorted(parts[0] + parts[1]) == sorted(whole)
