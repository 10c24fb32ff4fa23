"""A busy machine makes a test slow, not wrong: random cases have no deadlines of their own, only pytest's
time limit."""

import gc
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_ds.ops import kernel_table
from tests.harness.samples import ALL, left_for_rest
from tests.harness.split import in_shard, shard_of

# `make test-all` tries other examples each time.
settings.register_profile("busy machine", deadline=None, derandomize=not ALL)
settings.load_profile("busy machine")


def pytest_addoption(parser):
    parser.addoption(
        "--shard",
        metavar="I/N",
        type=shard_of,
        default=None,
        help="only part I of N of the tests; all parts together are all tests",
    )


@pytest.fixture(autouse=True)
def _root_logger_as_before():
    """A run that a test starts in this process configures the root logger; the next test finds it as it
    was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _no_process_group_left():
    """An engine that a test makes without an mpu starts torch.distributed for the tests' own process."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _kernels_as_before():
    """A run with --kernels torch that a test starts in this process leaves the choice of the others alone."""
    with kernel_table.selected("auto"):
        yield


def _place(item) -> tuple[bool, bool]:
    has_processes = item.get_closest_marker("processes") is not None
    return not has_processes, item.path.parent == Path(__file__).parent


def _test_and_number(item) -> tuple[str, int]:
    """The test, or the file, that a case belongs to, and of how many of its cases `make test` runs one."""
    marker = item.get_closest_marker("one_in")
    if marker is None:
        return item.nodeid, 1
    whole = "::" if marker.kwargs.get("together") else "["
    return item.nodeid.partition(whole)[0], marker.args[0]


def _is_of_rest(item) -> bool:
    """Real processes take seconds each: `make test` has those that are marked as quick."""
    if item.get_closest_marker("rest") is not None:
        return True
    if item.get_closest_marker("quick") is not None:
        return False
    return item.get_closest_marker("processes") is not None


def _divide(config, items) -> None:
    """Mark the cases of `make test-rest` with `rest`, and deselect those of `make test-all` alone."""
    if not ALL:
        alone = {item for item in items if item.get_closest_marker("all") is not None}
        config.hook.pytest_deselected(items=[*alone])
        items[:] = [item for item in items if item not in alone]
    others = [item for item in items if not _is_of_rest(item)]
    left = set(left_for_rest([_test_and_number(item) for item in others]))
    kept = {item for i, item in enumerate(others) if i not in left}
    for item in items:
        if item not in kept:
            item.add_marker("rest")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(config, items):
    """Tests with processes, the longest, come first, so that the workers of pytest-xdist end together. Tests of
    the sources, which keep the parsed text of all files, come last.

    Names of cases are equal in every process: the text of a set of strings depends on the process's hash
    seed, and pytest-xdist stops when its workers collect different names.

    Raises:
        pytest.UsageError: the name of a case holds the text of a set of two or more members.
    """
    _divide(config, items)
    if shard := config.getoption("--shard"):
        others = [item for item in items if not in_shard(item.nodeid, shard)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if in_shard(item.nodeid, shard)]
    items.sort(key=_place)
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(
            isinstance(v, (set, frozenset)) and len(v) > 1 and str(v) in item.nodeid
            for v in values
        ):
            raise pytest.UsageError(
                f"{item.nodeid} is named by a set, whose order differs between "
                "processes; use a tuple"
            )


def pytest_collection_finish():
    """Thousands of tests are there until the end: collections of garbage leave them out."""
    gc.collect()
    gc.freeze()
