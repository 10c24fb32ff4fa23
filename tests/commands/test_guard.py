"""Who tells an error, and what torchrun is told. Environments are given; nobody waits."""

import json
import time

import pytest

from megatron_ds import cli as guard
from megatron_ds.cli import main_guard
from megatron_ds.errors import CommunicationError, ConfigError, DataError

pytestmark = pytest.mark.plan

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8"}
SRUN = {"SLURM_NTASKS": "8"}


@pytest.fixture
def told_by(monkeypatch, capsys, tmp_path):
    """told_by(error, environment): (stderr, seconds waited, torchrun's error file) of the process that raises
    it."""
    waited = []
    monkeypatch.setattr(guard.time, "sleep", waited.append)

    def run(error, **environment):
        waited.clear()
        file = tmp_path / "error.json"
        file.unlink(missing_ok=True)
        with monkeypatch.context() as m:
            for name in (
                "RANK",
                "LOCAL_RANK",
                "SLURM_PROCID",
                "OMPI_COMM_WORLD_RANK",
                "TORCHELASTIC_RUN_ID",
            ):
                m.delenv(name, raising=False)
            for name, value in environment.items():
                m.setenv(name, value)
            if "TORCHELASTIC_RUN_ID" in environment:
                m.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            assert main_guard(lambda: (_ for _ in ()).throw(error)) == 2
        return (
            capsys.readouterr().err,
            sum(waited),
            json.loads(file.read_text())["message"] if file.exists() else None,
        )

    return run


def test_rank_0_tells_a_shared_error_at_once(told_by):
    said, waited, note = told_by(
        ConfigError("no"), **TORCHRUN, RANK="0", LOCAL_RANK="0"
    )
    assert (said, waited) == ("error: no\n", 0)
    assert note["message"] == "error: no", (
        "torchrun's summary, the last lines on the screen, ends with the error"
    )


@pytest.mark.parametrize(
    "launcher, rank, said",
    [
        # torchrun would have ended it if rank 0 had failed
        ({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "3"}, 3, True),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3, True),
        # srun might not end the others: one rank of a machine prints the error
        ({**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, 3, False),
        ({**SRUN, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}, 4, True),
        # torchrun started by srun
        (
            {**SRUN, "SLURM_PROCID": "1", "RANK": "9", "LOCAL_RANK": "1", **TORCHRUN},
            9,
            True,
        ),
    ],
)
def test_other_ranks_wait_to_be_ended_before_they_speak(told_by, launcher, rank, said):
    text, waited, _ = told_by(ConfigError("no"), **launcher)
    assert (
        text == (f"error on rank {rank}: no\n" if said else "")
        and waited >= guard.WAIT_SECONDS
    )


@pytest.mark.parametrize(
    "local_rank, said", [("0", "error on rank 5: no\n"), ("1", "")]
)
def test_without_a_launcher_nobody_waits(told_by, local_rank, said):
    assert told_by(ConfigError("no"), RANK="5", WORLD_SIZE="8", LOCAL_RANK=local_rank)[
        :2
    ] == (said, 0)


def test_an_error_of_one_rank_is_told_by_it_at_once(told_by):
    said, waited, note = told_by(
        DataError("my own"), **TORCHRUN, RANK="2", LOCAL_RANK="2"
    )
    assert (said, waited) == (
        "error on rank 2: my own\n",
        0,
    ) and "error on rank 2:" in note["message"]


def test_in_torchruns_summary_a_lost_peer_comes_after_what_made_it_go(told_by):
    cause = told_by(DataError("cause"), **TORCHRUN, RANK="2")[2]
    consequence = told_by(CommunicationError("peer gone"), **TORCHRUN, RANK="0")[2]
    assert int(consequence["extraInfo"]["timestamp"]) > int(
        cause["extraInfo"]["timestamp"]
    )


def test_what_nobody_raised_on_purpose_keeps_its_traceback_in_torchruns_summary(
    monkeypatch, tmp_path
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ZeroDivisionError):
        main_guard(lambda: 1 // 0)
    details = json.loads(file.read_text())["message"]["extraInfo"]
    assert (
        "ZeroDivisionError" in details["py_callstack"]
        and abs(int(details["timestamp"]) - time.time()) < 60
    )


def test_torch_reads_the_note_as_it_reads_its_own(told_by, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    told_by(ConfigError("no"), **TORCHRUN, RANK="0")
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json")
    )
    assert (
        failure.message["message"] == "error: no"
        and abs(failure.timestamp - time.time()) < 60
    )
