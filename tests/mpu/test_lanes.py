"""Lanes of NCCL are connected at the start, in an order in which no rank waits for ever.

torch.distributed is a stand-in that records: no GPU and no other rank is needed.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_ds.mpu import transport
from megatron_ds.mpu.transport import TorchTransport, neighbours

pytestmark = pytest.mark.plan


def make(monkeypatch, rank: int, size: int):
    """(a transport with four lanes, what it asked of torch.distributed)."""
    calls = []
    record = lambda name: (
        lambda *args, **named: (calls.append((name, *args, named)), SimpleNamespace())[
            1
        ]
    )
    stand_in = SimpleNamespace(
        get_process_group_ranks=lambda group: [10 + i for i in range(size)],
        get_rank=lambda group: rank,
        **{name: record(name) for name in ("send", "recv", "isend", "irecv")},
    )
    monkeypatch.setattr(transport, "dist", stand_in)
    return TorchTransport("group", "pp", [f"lane {i}" for i in range(4)]), calls


@pytest.mark.parametrize("size", range(2, 10))
def test_connections_of_two_ranks_meet_in_the_order_of_both(monkeypatch, size):
    """Each call blocks until its peer makes the matching one: all complete, in three rounds a lane."""
    waiting = []
    for rank in range(size):
        opened, calls = make(monkeypatch, rank, size)
        opened.open_lanes(torch.device("cpu"))
        waiting.append(
            [
                (name, frozenset((rank, peer - 10)), lane)
                for name, _, peer, lane, _ in calls
            ]
        )
    pairs, rounds = {pair for calls in waiting for _, pair, _ in calls}, 0
    while any(waiting):
        heads = {}
        for rank, calls in enumerate(waiting):
            if calls:
                heads.setdefault(calls[0][1:], []).append((rank, calls[0][0]))
        met = [
            of
            for of in heads.values()
            if sorted(name for _, name in of) == ["recv", "send"]
        ]
        assert met, f"all ranks wait: {heads}"
        for rank, _ in (one for of in met for one in of):
            waiting[rank].pop(0)
        rounds += 1
    assert pairs == {frozenset((i, (i + 1) % size)) for i in range(size)}
    assert rounds <= 3 * 4


def test_neighbours_of_two_ranks_are_one_pair():
    assert neighbours(1) == [] and neighbours(2) == [(0, 1)]


def test_each_stream_of_messages_has_its_lane(monkeypatch):
    """Activations (even tags) and gradients (odd ones), upward and downward; both ends choose the same."""
    x = torch.zeros(1)
    sender, sent = make(monkeypatch, 1, 3)
    for tag in (2, 3):
        for to in (0, 2):
            sender.isend(x, to, tag)
    lanes = [call[3] for call in sent]
    assert len(set(lanes)) == 4
    received = []
    for tag in (2, 3):
        for rank in (0, 2):
            receiver, calls = make(monkeypatch, rank, 3)
            receiver.irecv(x, 1, tag)
            received.append(calls[0][3])
    assert received == lanes
