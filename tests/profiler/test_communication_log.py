"""The communication log: bytes and times of rows, bandwidths, and that nothing is recorded without it."""

from dataclasses import dataclass

import pytest
import torch

from megatron_ds.extensions.profiler import communication_log
from megatron_ds.extensions.profiler.comms_log import (
    make_log,
    seconds_of_groups,
    table_text,
)
from megatron_ds.extensions.profiler.communication_log import (
    CommunicationLog,
    HostClock,
    LoggedMessage,
    Spent,
    algorithmic_bandwidth,
    bus_bandwidth,
)
from megatron_ds.extensions.profiler.options import COMMUNICATION
from megatron_ds.mpu import collectives
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.fake_group import fake_group
from megatron_ds.mpu.group import DONE, RING_FACTOR, Group, Traffic
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

RANKS = 4
DELAY = 0.3


def every_operation(group):
    """Each operation, with bytes that are known: 4 bytes an element."""
    whole = torch.zeros(8 * RANKS)
    piece = torch.zeros(8)
    for _ in range(3):
        collectives.all_reduce_(whole, group)
    collectives.all_reduce_(piece, group, async_op=True).wait()
    collectives.all_gather_into_(whole, piece, group)
    collectives.reduce_scatter_into_(piece, whole, group)
    collectives.all_to_all_(torch.empty(8 * RANKS), whole, group)
    rows = [2] * RANKS
    moved = torch.zeros(2 * RANKS, 3)
    collectives.all_to_all_(torch.empty_like(moved), moved, group, (rows, rows))
    collectives.broadcast_(piece, group)
    after = (group.rank + 1) % RANKS
    before = (group.rank - 1) % RANKS
    both = [(piece, after), (piece.clone(), before)]
    into = [(torch.empty(8), before), (torch.empty(8), after)]
    collectives.exchange(both, into, group)


def rows_of(operations=None, is_on=True):
    def main(rank, world):
        group = world.group("tp", range(RANKS), rank)
        log = CommunicationLog(operations)
        group.traffic.log = log if is_on else None
        every_operation(group)
        return {
            (key.operation, key.num_bytes): spent.calls
            for key, spent in log.rows.items()
        }, dict(group.traffic.bytes)

    return run_ranks(RANKS, main)


def test_calls_and_bytes_are_those_of_the_closed_form_and_of_the_traffic():
    whole = 4 * 8 * RANKS
    expected = {
        ("all_reduce", whole): 3,
        ("all_reduce", 32): 1,
        ("all_gather", whole): 1,
        ("reduce_scatter", whole): 1,
        ("all_to_all", whole): 1,
        ("all_to_all_v", 4 * 2 * 3 * (RANKS - 1)): 1,
        ("broadcast", 32): 1,
        ("send", 64): 1,
    }
    for rows, traffic in rows_of():
        assert rows == expected
        for operation in {operation for operation, _ in expected}:
            found = sum(n * calls for (op, n), calls in rows.items() if op == operation)
            assert found == traffic[operation, "tp", RANKS]


def test_only_the_chosen_operations_are_recorded_and_none_without_a_log():
    for rows, _ in rows_of(operations=("broadcast",)):
        assert rows == {("broadcast", 32): 1}
    for rows, traffic in rows_of(is_on=False):
        assert rows == {} and traffic


def test_messages_of_a_pipeline_are_recorded_when_they_have_been_sent():
    def main(rank, world):
        group = world.group("pp", range(2), rank)
        group.traffic.log = log = CommunicationLog()
        channels = Channels(group)
        channels.announce([(2, 3)], torch.float32)  # not payload, and not in the log
        if rank == 0:
            channels.send("act", 1, torch.ones(2, 3))
        else:
            channels.recv("act", 0, (2, 3), torch.float32).wait()
        channels.drain()
        return {key: spent.calls for key, spent in log.rows.items()}

    sender, receiver = run_ranks(2, main)
    assert sender == {LoggedMessage("send", "pp", 2, 0, 24): 1} and receiver == {}


# ------------------------------------------------------------------ times
class Late:
    """A Work for which the first wait takes DELAY by a clock that nothing else moves."""

    def __init__(self):
        self.now = 0.0
        self.is_there = False

    def wait(self):
        if not self.is_there:
            self.now += DELAY
        self.is_there = True

    def is_completed(self):
        return self.is_there


class SlowTransport:
    """Reductions take DELAY in their wait, broadcasts when they start."""

    def __init__(self):
        self.work = Late()

    def all_reduce(self, tensor, op):
        return self.work

    def broadcast(self, tensor, source):
        self.work.wait()
        return DONE


def slow_group(log):
    return Group("dp", (0, 1), 0, SlowTransport(), Traffic(log=log))


@pytest.mark.parametrize(
    "operation, is_async",
    [
        (collectives.all_reduce_, False),
        (collectives.all_reduce_, True),
        (collectives.broadcast_, False),
    ],
)
def test_a_time_is_that_of_start_and_wait(operation, is_async):
    log = CommunicationLog(clock=HostClock(lambda: group.transport.work.now))
    group = slow_group(log)
    work = operation(torch.zeros(1000), group, async_op=is_async)
    work.wait()
    group.transport.work.now += 1.0
    work.wait()  # again, which is not recorded
    assert work.is_completed()
    assert list(log.rows.values()) == [Spent(1, DELAY)]


def test_a_work_is_recorded_once_when_it_is_found_complete():
    now = iter([10.0, 12.5])
    log = CommunicationLog(clock=HostClock(lambda: next(now)))
    work = collectives.all_reduce_(torch.zeros(4), slow_group(log), async_op=True)
    assert not work.is_completed() and not log.rows
    work._work.is_there = True
    assert work.is_completed() and work.is_completed()
    assert list(log.rows.values()) == [Spent(1, 2.5)]


def test_bandwidths_have_the_factors_of_rings():
    spent = Spent(calls=10, seconds=2.0)
    factors = {
        "all_reduce": 1.5,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.75),
        **dict.fromkeys(("all_to_all_v", "broadcast", "reduce", "send"), 1.0),
    }
    assert set(factors) == set(RING_FACTOR) == set(COMMUNICATION)
    for operation, factor in factors.items():
        message = LoggedMessage(operation, "dp", 4, 0, 8_000_000)
        assert algorithmic_bandwidth(message, spent) == 4e7
        assert bus_bandwidth(message, spent) == factor * 4e7


# ------------------------------------------------------------------ the table
def test_the_table_has_sums_means_bandwidths_and_the_time_waited_for_others():
    def main(rank, world):
        group = world.group("dp", (0, 1) if rank < 2 else (2, 3), rank)
        log = CommunicationLog()
        message = LoggedMessage("all_reduce", "dp", 2, group.ranks[0], 8_000_000)
        log.rows[message] = Spent(10, [2.0, 0.5, 0.1, 0.2][rank])
        all_ranks = world.group("world", range(RANKS), rank)
        small = LoggedMessage("all_reduce", "tp-cp-dp-pp", RANKS, 0, 4)
        log.rows[small] = Spent(1, 0.25)
        return table_text(log, rank, seconds_of_groups(log, all_ranks))

    first, second, *_, last = run_ranks(RANKS, main)
    head, names, row, of_world, in_all = first.splitlines()
    assert head == "communication of rank 0" and names.split()[-1] == "waited"
    assert row.split() == (
        "all_reduce dp of 2 8 MB 10 80 MB 2000.00 ms 200.00 ms 40 MB/s 40 MB/s 1500.00 ms "
        "0.00 ms".split()
    )
    # all ranks have a name, and slow links no exponents
    assert of_world.split()[1:4] == ["world", "of", str(RANKS)]
    assert of_world.split()[-8:-4] == ["16", "B/s", "24", "B/s"]
    assert in_all.split() == ("in all 11 80 MB 2250.00 ms 1500.00 ms 0.00 ms".split())
    # a rank that comes last waits for no other one, and the other one for it
    assert second.splitlines()[2].split()[-4:] == ["0.00", "ms", "1500.00", "ms"]
    # the other group has a fastest rank of its own
    assert last.splitlines()[3].split()[-4:] == ["100.00", "ms", "0.00", "ms"]


def test_a_rank_that_sent_nothing_has_no_table():
    assert table_text(CommunicationLog(), 3) == "communication of rank 3: none"


# ------------------------------------------------------------------ events of a GPU
class StandInEvent:
    """An event of a stream, which reaches it when `reached` grows."""

    reached = made = waits = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        StandInEvent.made += 1
        self.number = StandInEvent.made

    def query(self):
        return self.number <= StandInEvent.reached

    def reach(self):
        StandInEvent.waits += 1
        StandInEvent.reached = max(StandInEvent.reached, self.number)

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return 1000.0 * 2**end.number  # in ms


def test_times_of_a_stream_are_read_later_without_a_wait(monkeypatch):
    for name in ("reached", "made", "waits"):
        monkeypatch.setattr(StandInEvent, name, 0)
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    wait = lambda is_reached: is_reached.__self__.reach()
    monkeypatch.setattr(communication_log, "wait_until", wait)
    log = make_log(Wish(), 0, torch.device("cuda"))
    group = fake_group("tp", 4)
    group.traffic.log = log
    for _ in range(2):
        collectives.all_reduce_(torch.zeros(4), group)
    assert not log.rows
    StandInEvent.reached = 2  # the end of the first call
    collectives.all_reduce_(torch.zeros(4), group)
    assert [*log.rows.values()] == [Spent(1, 2.0**2)] and not StandInEvent.waits
    assert "all_reduce" in table_text(log, 0) and not StandInEvent.waits
    log.complete_rows()
    assert [*log.rows.values()] == [Spent(3, 2.0**2 + 2.0**4 + 2.0**6)]
    assert StandInEvent.waits == 2


@dataclass
class Wish:
    comms_logger: bool = True
    comms_logger_verbose: bool = False
    comms_logger_ops: tuple[str, ...] | None = None


def test_single_calls_are_logged_if_verbose(caplog):
    caplog.set_level("INFO")
    for is_verbose in (False, True):
        group = fake_group("tp", 4)
        group.traffic.log = CommunicationLog(is_verbose=is_verbose)
        collectives.all_reduce_(torch.zeros(1000), group)
    assert caplog.text.count("all_reduce over tp of 4 ranks: 4000 bytes") == 1
