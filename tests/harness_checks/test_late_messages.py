"""Late messages: NaN until the wait, then the values of `ThreadTransport`; each misuse is an error."""

import pytest
import torch

from megatron_ds.mpu import collectives
from megatron_ds.mpu.channels import Channels
from tests.harness.late_messages import LateNetwork
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def on_two_ranks(function, network=None):
    """The results of `function(group)`."""
    network = network or LateNetwork()
    main = lambda rank, world: function(world.group("dp", (0, 1), rank))
    results = run_ranks(2, main, transport=network.transport)
    assert not network.unfinished()
    return results


def own(group, numel=4):
    return torch.arange(1.0, 1 + numel) * 10**group.rank


COLLECTIVES = {
    "all-reduce": lambda x, group: (x, collectives.all_reduce_(x, group, "sum", True)),
    "all-gather": lambda x, group: (
        out := x.new_zeros(8),
        collectives.all_gather_into_(out, x, group, True),
    ),
    "reduce-scatter": lambda x, group: (
        out := x.new_zeros(2),
        collectives.reduce_scatter_into_(out, x, group, "max", True),
    ),
    "all-to-all": lambda x, group: (
        out := x.new_zeros(4),
        collectives.all_to_all_(out, x, group, async_op=True),
    ),
    "exchange": lambda x, group: (
        out := x.new_zeros(4),
        collectives.exchange(
            [(x, 1 - group.rank)], [(out, 1 - group.rank)], group, async_op=True
        ),
    ),
}


@pytest.mark.parametrize("start", COLLECTIVES.values(), ids=COLLECTIVES)
def test_what_a_collective_writes_is_nan_until_the_wait(start):
    def late(group):
        out, work = start(own(group), group)
        was_nan = bool(out.isnan().all())
        work.wait()
        return was_nan, out.tolist()

    def at_once(rank, world):
        group = world.group("dp", (0, 1), rank)
        out, work = start(own(group), group)
        work.wait()
        return True, out.tolist()

    assert on_two_ranks(late) == run_ranks(2, at_once)


def test_a_collective_returns_before_the_other_rank_has_called_it():
    def crossed(group):
        """Each rank begins both before it waits, in the other order than its peer."""
        x, y = own(group), own(group) + 1
        works = [collectives.all_reduce_(t, group, async_op=True) for t in (x, y)]
        for work in works[:: 1 - 2 * group.rank]:
            work.wait()
        return x.tolist(), y.tolist()

    first, second = on_two_ranks(crossed)
    assert first == second == ([11.0, 22.0, 33.0, 44.0], [13.0, 24.0, 35.0, 46.0])


@pytest.mark.parametrize("what", ["input", "output"])
def test_memory_that_is_written_before_the_wait_is_an_error(what):
    def early(group):
        x, out = own(group), torch.zeros(8)
        work = collectives.all_gather_into_(out, x, group, async_op=True)
        {"input": x, "output": out}[what].zero_()
        work.wait()

    with pytest.raises(AssertionError, match=f"its {what} changed before the wait"):
        on_two_ranks(early)


def test_a_send_that_was_freed_before_its_wait_arrives_as_nan():
    def freed(group):
        channels = Channels(group)
        if group.rank == 0:
            channels.send("act", 1, own(group))
            channels._sent.clear()
            group.transport.isend(torch.ones(1), 1, 1).wait()
            return None
        group.transport.irecv(torch.ones(1), 0, 1).wait()
        return channels.recv("act", 0, (4,), torch.float32).wait().isnan().all()

    assert on_two_ranks(freed)[1]


def test_what_nothing_waits_for_is_reported():
    network = LateNetwork()

    def left(rank, world):
        group = world.group("dp", (0, 1), rank)
        collectives.all_reduce_(own(group), group, async_op=True)

    run_ranks(2, left, transport=network.transport)
    assert network.unfinished() == ["all-reduce of a test"] * 2
