"""Eight ranks on two hosts, whose hosts all wait for their devices: the device that does not go on is named, no host is
accused by the place of a host, and the last collectives of all ranks are written before they end."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from megatron_ds.extensions.launch.job import Job, RankProgram
from megatron_ds.extensions.launch.restarts import Ended
from megatron_ds.extensions.launch.runners import (
    Means,
    Runner,
    Started,
    agent_words,
)
from megatron_ds.extensions.launch.signal_requests import Requests
from megatron_ds.extensions.launch.stalls import HANG_CODE
from megatron_ds.extensions.launch.supervise import run_all
from tests.launch.starts import ROOT, all_end
from tests.launch.stuck_device import RECORD

pytestmark = pytest.mark.processes

HOSTS = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
PROGRAM = Path(__file__).with_name("stuck_device.py")


def agents(job: Job, means: Means) -> list[Started]:
    """One agent a host, all on this machine."""
    return [Started(agent_words(job, means, host)) for host in job.hosts]


def ended(folder: Path, stuck: int) -> Ended:
    """The end of a job whose rank `stuck` has a device that does not go on."""
    record = {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "records" / "rank")}
    job = Job(
        name=f"stuck-{os.getpid()}-{time.monotonic_ns()}",
        slots=HOSTS,
        program=RankProgram((str(PROGRAM), str(stuck)), sys.executable),
        variables={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **record},
        folder=str(folder),
        master_address="127.0.0.1",
        master_port=1,
        hang_seconds=2.0,
        end_seconds=1.0,
    )
    return run_all(job, Runner(agents), Means(sys.executable), Requests())


def test_the_device_that_does_not_go_on_is_named_and_records_are_written(
    tmp_path, capfd
):
    found = ended(tmp_path, stuck=5)
    text = "".join(capfd.readouterr())
    assert (found.code, found.host) == (HANG_CODE, "b"), text
    named = re.findall(r"No host is behind; a device is: .*", text)
    assert len(named) == 2, text  # first and last
    for sentence in named:
        assert "that of rank 5 on b has not moved" in sentence
        assert "It is at F of micro-batch 1 at stage 0 (2 of 5 instr" in sentence
        assert "of step 4 are done" in sentence
    assert text.count("which is at REDUCE at stage 0 (3 of 5") == 2 * 7
    assert not re.search(r"rank \d on \w is behind", text)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "records").iterdir()}
    assert kept == {f"rank{rank}": RECORD for rank in range(8)}
    assert all_end(tmp_path)
