"""Stream priorities and limits of thread blocks, as far as torch's options of a group show them."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.mpu import process_groups
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.nccl_settings import NcclSettings
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.plan

GRID = Grid(tp=2, dp=2, pp=2)
TIMEOUT = timedelta(minutes=3)


class Options:
    """The part of ProcessGroupNCCL.Options that is set."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


@pytest.fixture
def nccl(monkeypatch):
    """torch as built with NCCL. Returns the options with which groups are made."""
    made = []
    stand_in = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    monkeypatch.setattr(process_groups, "_has_nccl", lambda: True)
    monkeypatch.setattr(
        dist, "new_group", lambda *_, pg_options, **others: made.append(pg_options)
    )
    return made


def options_of(axes, high_priority=("all",), max_ctas=()):
    settings = NcclSettings.over(GRID, high_priority, max_ctas)
    return settings.options(GRID.groups(*axes.split("-")), TIMEOUT)


@pytest.mark.parametrize(
    "high_priority, expected",
    [
        (("all",), {"tp", "pp", "dp", "dp-cp"}),
        (("none",), set()),
        (("tp", "dp-cp"), {"tp", "dp", "dp-cp"}),  # dp and dp-cp have the same ranks
    ],
)
def test_streams_of_the_groups_have_a_high_priority(nccl, high_priority, expected):
    high = {
        axes
        for axes in ("tp", "pp", "dp", "dp-cp")
        if options_of(axes, high_priority).is_high_priority_stream
    }
    assert high == expected


def test_limits_are_those_of_the_group(nccl):
    limits = ("pp=2", "dp-cp=16")
    found = {axes: options_of(axes, max_ctas=limits) for axes in ("pp", "dp", "tp")}
    assert {axes: of.config.max_ctas for axes, of in found.items()} == {
        "pp": 2,
        "dp": 16,
        "tp": None,
    }
    assert {of._timeout for of in found.values()} == {TIMEOUT}


def test_groups_are_made_with_their_options(nccl, monkeypatch):
    monkeypatch.setattr(process_groups, "transport_over", lambda *_: None)
    monkeypatch.setattr(
        process_groups, "control_group", lambda timeout: None, raising=False
    )
    settings = NcclSettings.over(GRID, ("pp",), ("pp=2",))
    for axes in ("pp", "tp"):
        process_groups.connect_torch(axes, GRID.groups(axes), 0, TIMEOUT, settings)
    lanes = [(o.is_high_priority_stream, o.config.max_ctas) for o in nccl]
    assert lanes == [(True, 2)] * 5 * 4 + [(False, None)] * 4


def test_megatrons_names_of_groups_are_read():
    job = tiny_job("gpt2", "fp32", False, 0.0, 2, 4, 2)
    flags = ["--high-priority-stream-groups", "dp_cp", "ep_dp", "tp"]
    parallel = parse([*job, "--micro-batch-size", "1", *flags]).parallel
    assert parallel.high_priority_stream_groups == ("dp-cp", "edp", "tp")


@pytest.mark.parametrize("limit", ["pp", "pp=0", "row=2", "pp=two"])
def test_a_limit_that_is_none_is_refused(limit):
    job = tiny_job("gpt2", "fp32", False, 0.0, 2, 4, 2)
    with pytest.raises(ConfigError, match="--nccl-max-ctas .*is not GROUP=NUMBER"):
        parse([*job, "--micro-batch-size", "1", "--nccl-max-ctas", limit])
