"""The wait of the host for a GPU: it ends before NCCL's watchdog acts, with an error that names the stuck rank."""

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config import parse
from megatron_ds.errors import CommunicationError
from megatron_ds.host.side_streams import Mark
from megatron_ds.mpu import device_wait
from megatron_ds.mpu.device_wait import patience
from megatron_ds.mpu.flight_recorder import DEFAULTS, switch_on
from megatron_ds.mpu.group import Group, solo
from megatron_ds.mpu.host_reads import (
    read_number,
    read_numbers,
    to_host,
    wait_for_mark,
    wait_for_work,
)
from megatron_ds.mpu.launch_facts import Launch
from megatron_ds.mpu.process_groups import connect_torch
from megatron_ds.training import distributed
from tests.harness.fake_cuda import FakeGpu, fake_cuda
from tests.harness.limits import VAIN
from tests.harness.processes import run_processes
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import tiny_job

pytestmark = pytest.mark.one_in(2, together=True)

RANKS, STUCK = 3, 1
RECORD = b"the last collectives"


@pytest.mark.plan
@pytest.mark.parametrize("timeout", [10.0, 60.0, 600.0, 36_000.0])
def test_the_host_gives_up_before_the_watchdog_and_leaves_time_for_reports(timeout):
    assert timeout / 2 <= patience(timeout) < timeout
    assert timeout - patience(timeout) >= min(30.0, timeout / 2)
    assert patience(math.inf) == math.inf


@pytest.mark.threads
def test_numbers_of_a_device_that_works_are_read():
    def read(rank, world):
        with FakeGpu() as gpu:
            x = torch.arange(3.0, device="cuda") + rank
            numbers = read_numbers(x, world.group("dp", (0, 1), rank))
            return numbers, read_numbers(x, solo()), len(gpu.order.waits)

    with fake_cuda():
        for rank, (numbers, alone, waits) in enumerate(run_ranks(2, read)):
            assert numbers == alone == [rank, rank + 1, rank + 2] and waits == 2


def wait_for_a_mark(x, group):
    """A wait that is given no group: the timeout and the ranks are those of torch.distributed."""
    wait_for_mark(Mark(torch.cuda.current_stream().record_event()))


WAITS = {0: read_numbers, 2: wait_for_a_mark}
NAMES = {0: "dp", 2: "world"}


def read_behind_a_stuck_rank(rank, world, folder):
    """The rank STUCK comes late; the devices of all others wait for it."""
    ranks = tuple(range(RANKS))
    timeout = timedelta(seconds=VAIN)
    transport = connect_torch("dp", [ranks], rank, timeout=timeout)
    dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
    if rank == STUCK:
        while not all(Path(folder, str(other)).exists() for other in WAITS):
            time.sleep(0.05)
        return "late"
    record = patch.object(
        torch._C._distributed_c10d, "_dump_nccl_trace", lambda: RECORD, create=True
    )
    names = patch.dict(os.environ, {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/new/trace-"})
    with record, names, fake_cuda(), FakeGpu() as gpu:
        gpu.is_stuck = True
        try:
            group = Group("dp", ranks, rank, transport)
            wait = WAITS[rank]
            wait(torch.ones(2, device="cuda"), group)
        except CommunicationError as error:
            return str(error)
        finally:
            Path(folder, str(rank)).touch()
    return "read"


@pytest.mark.processes
def test_a_rank_that_the_devices_of_all_others_wait_for_is_named(tmp_path):
    stories = run_processes(RANKS, read_behind_a_stuck_rank, str(tmp_path))
    for rank, story in enumerate(stories):
        if rank == STUCK:
            assert story == "late"
            continue
        record = Path(tmp_path, "new", f"trace-{rank}")
        what = f"waiting for the device failed in the {NAMES[rank]} group of ranks"
        assert f"rank {rank}: {what}" in story
        assert f"rank {STUCK} is stuck" in story and f"{VAIN / 2:g} s" in story
        assert f"are in {record}" in story and record.read_bytes() == RECORD


@pytest.mark.threads
@pytest.mark.parametrize(
    "read",
    [
        to_host,
        lambda x, group: read_number(x.sum(), group),
        lambda x, group: wait_for_work(x.device, group),
    ],
)
def test_no_read_waits_without_end_for_a_device_that_is_stuck(read, monkeypatch):
    def fail(rank, world):
        with FakeGpu() as gpu:
            gpu.is_stuck = True
            x = torch.ones(2, device="cuda")
            with pytest.raises(TimeoutError, match="of the device timed out"):
                read(x, world.group("dp", (0, 1), rank))

    monkeypatch.setattr(device_wait, "patience", lambda timeout: 0.01)
    with fake_cuda():
        run_ranks(2, fail)


@pytest.mark.threads
@pytest.mark.parametrize(
    "read", [to_host, lambda x, group: wait_for_work(x.device, group)]
)
def test_the_event_is_of_the_device_that_has_the_values(read, monkeypatch):
    """Which is not always the current one of the process."""
    asked = []

    def rank_main(rank, world):
        with FakeGpu():
            x = torch.ones(2, device="cuda")
            read(x, world.group("dp", (0, 1), rank))
            assert asked == [x.device] * len(asked)

    with fake_cuda():
        current = torch.cuda.current_stream

        def noted(device=None):
            asked.append(device)
            return current(device)

        monkeypatch.setattr(torch.cuda, "current_stream", noted)
        run_ranks(2, rank_main)
    assert len(asked) == 2


@pytest.mark.plan
def test_the_flight_recorder_is_on_unless_the_user_decides():
    env = {}
    switch_on(env)
    assert set(env) == {names[0] for names in DEFAULTS} and "~" not in str(env)
    chosen = {names[-1]: "chosen" for names in DEFAULTS}
    switch_on(chosen)
    assert set(chosen.values()) == {"chosen"} and len(chosen) == len(DEFAULTS)


@pytest.mark.plan
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_error_is_in_the_log_before_the_groups_are_closed(
    device, monkeypatch, caplog
):
    """Groups of NCCL whose work never ends may not close."""
    seen = []
    monkeypatch.setattr(
        distributed.launching, "start", lambda *arguments: torch.device(device)
    )
    monkeypatch.setattr(distributed.launching, "stop", lambda: seen.append(caplog.text))
    monkeypatch.setattr(distributed, "set_allocator", lambda **options: None)
    job = tiny_job("gpt2", "fp32", False, 0.0, 1, 1, 1)
    config = parse([*job, "--micro-batch-size", "1"])
    with pytest.raises(CommunicationError, match="rank 5 is stuck"):
        with distributed.joined(config, Launch()):
            raise CommunicationError("rank 5 is stuck")
    assert ["rank 5 is stuck" in text for text in seen] == [device == "cuda"]
