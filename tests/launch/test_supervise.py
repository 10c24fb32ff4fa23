"""What the launcher passes on of its processes' output and of the signals that it receives."""

import signal

import pytest

from megatron_ds.extensions.launch.failures import Failure
from megatron_ds.extensions.launch.rank_places import NodeReport
from megatron_ds.extensions.launch.supervise import Requests, _of_ranks

pytestmark = pytest.mark.plan

FAILURE = Failure(1, 0, "n1", 1, 5.0, "a mistake")


class Sent(list):
    """The signals that processes are asked to get."""

    request = list.append


@pytest.mark.parametrize("report", [NodeReport("n1", is_last=True), FAILURE])
@pytest.mark.parametrize("written", ["", "a last line without an end", "50 %"])
@pytest.mark.parametrize("label", ["", "n1: "])
def test_what_a_rank_wrote_before_a_report_is_passed_on(report, written, label):
    line = report.line(*[4.0] * (report is FAILURE))
    whole = f"{label}{written}{line}\n"
    assert _of_ranks(whole.encode(), report).decode() == written
    assert _of_ranks(b"n1: a line\n", None) == b"n1: a line\n"


def test_signals_that_come_before_a_start_are_passed_on_once():
    """Signals come without processes while hosts are asked before a restart."""
    requests = Requests()
    first, second = Sent(), Sent()
    requests.go_to(first)
    requests._handle(signal.SIGUSR1, None)
    requests.go_to(None)
    requests._handle(signal.SIGINT, None)
    requests.go_to(second)
    requests._handle(signal.SIGTERM, None)
    assert first == [signal.SIGUSR1]
    assert second == [signal.SIGINT, signal.SIGTERM]
    assert not requests.pause(0)
