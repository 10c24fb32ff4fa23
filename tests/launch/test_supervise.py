"""What the launcher passes on of its processes' output and of the signals that it receives."""

import signal
import sys
import time
from dataclasses import replace

import pytest

from megatron_ds.extensions.launch import supervise
from megatron_ds.extensions.launch.failures import Failure
from megatron_ds.extensions.launch.rank_places import NodeReport
from megatron_ds.extensions.launch.runners import Means, Runner, Started
from megatron_ds.extensions.launch.signal_requests import Requests
from megatron_ds.extensions.launch.signals import FORWARDED
from megatron_ds.extensions.launch.stalls import Stalls
from megatron_ds.extensions.launch.supervise import _of_ranks, run_all
from tests.launch.test_job import JOB

pytestmark = pytest.mark.plan

FAILURE = Failure(1, 0, "n1", 1, 5.0, "a mistake")


@pytest.mark.parametrize("report", [NodeReport("n1", is_last=True), FAILURE])
@pytest.mark.parametrize("written", ["", "a last line without an end", "50 %"])
@pytest.mark.parametrize("label", ["", "n1: "])
def test_what_a_rank_wrote_before_a_report_is_passed_on(report, written, label):
    line = report.line(*[4.0] * (report is FAILURE))
    whole = f"{label}{written}{line}\n"
    assert _of_ranks(whole.encode(), report).decode() == written
    assert _of_ranks(b"n1: a line\n", None) == b"n1: a line\n"


def test_signals_that_come_before_a_start_are_passed_on_once(monkeypatch):
    """Signals come without processes while hosts are asked before a restart."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    requests = Requests()
    requests.install(FORWARDED)
    receive = lambda number: handlers[number](number, None)
    receive(signal.SIGUSR1)
    assert requests.new() == [signal.SIGUSR1]
    receive(signal.SIGINT)
    assert not requests.are_urgent
    receive(signal.SIGTERM)
    assert requests.new() == [signal.SIGINT, signal.SIGTERM]
    assert not requests.new() and not requests.pause(0)
    receive(signal.SIGINT)
    assert requests.are_urgent


# ------------------------------------------------------------------ which host is lost
AGENT = """
import sys, time
from megatron_ds.extensions.launch.rank_places import NodeReport
reports, seconds, code = sys.argv[2:]
for left in reversed(range(int(reports))):
    print(NodeReport(sys.argv[1], is_last=left == 0 and code == "0").line(), flush=True)
time.sleep(float(seconds))
sys.exit(int(code))
"""


def ended(monkeypatch, *agents: tuple[str, int, float, int]):
    """(the end of a job whose agents behave like this, what the launcher notes).

    agents: host, number of reports, seconds until the end, exit code. A launcher kills agents one second after it
    asked them to end; these do not listen.
    """
    monkeypatch.setattr(supervise, "CONNECTION_SECONDS", 1.0)
    notes = []
    monkeypatch.setattr(supervise, "note", notes.append)

    def start(job, means):
        words = [sys.executable, "-c", AGENT]
        return [Started([*words, *map(str, agent)]) for agent in agents]

    slots = {host: (0,) for host, *_ in agents}
    job = replace(JOB, slots=slots, grace_seconds=0.0)
    means = Means(sys.executable)
    runner = Runner(start, has_input=True)
    return run_all(job, runner, means, Requests(), quiet=True), "\n".join(notes)


def test_a_host_that_the_launcher_ended_is_not_lost(monkeypatch):
    """n2 refuses ssh, as code 255 says; n1 has just begun, and does not hear that the job ends."""
    end, notes = ended(monkeypatch, ("n1", 1, 60, 0), ("n2", 0, 0, 255))
    assert (end.code, end.host) == (255, "n2")
    assert "by the agent of n2:" in notes


def test_a_host_whose_agent_was_killed_is_lost(monkeypatch):
    end, notes = ended(monkeypatch, ("n1", 1, 0.5, 0), ("n2", 1, 0.2, 137))
    assert (end.code, end.host) == (137, "n2")


@pytest.mark.parametrize(
    "times, ended, lost",
    [
        # one process for all hosts, which ended by itself: the longest silence comes first
        ({"n1": 9.0, "n2": 8.0}, ["n1", "n2"], ["n2", "n1"]),
        ({"n1": 60.0, "n2": 8.0}, ["n1", "n2"], ["n2"]),
        ({"n1": 60.0}, ["n1", "n2"], ["n2"]),
        # the launcher killed it: only silence counts
        ({"n1": 60.0, "n2": 58.0}, [], []),
        ({"n1": 60.0, "n2": 8.0}, [], ["n2"]),
    ],
)
def test_the_host_that_fell_silent_first_is_lost(times, ended, lost, monkeypatch):
    stalls = Stalls(["n1", "n2"])
    for host, when in times.items():
        monkeypatch.setattr(time, "monotonic", lambda: when)  # noqa: B023
        stalls.add(NodeReport(host))
    assert stalls.lost(ended) == lost
