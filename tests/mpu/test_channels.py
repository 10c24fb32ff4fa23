"""Channels on threads: order within a channel, none between channels, a rank talking to itself."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.config import RunConfig
from megatron_ds.errors import CommunicationError
from megatron_ds.mpu.channels import Channels
from megatron_ds.mpu.group import Group, solo
from megatron_ds.planning import layer_costs
from megatron_ds.planning.layer_costs import time_transfer
from tests.harness.model_runs import context_of
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads


def on_ranks(function, count):
    return run_ranks(
        count, lambda rank, world: function(rank, world.group("pp", range(count), rank))
    )


def test_each_channel_keeps_its_order_whatever_the_order_between_channels():
    def talk(rank, group):
        channels, other = Channels(group), 1 - rank
        for i in range(4):
            channels.send("act", other, torch.full((3,), 10.0 * rank + i))
            channels.send("grad", other, torch.full((2,), 100.0 + i), chunk=1)
        grads = [
            channels.recv("grad", other, (2,), torch.float32, chunk=1).wait()
            for _ in range(4)
        ]
        acts = [
            channels.recv("act", other, (3,), torch.float32).wait() for _ in range(4)
        ]
        channels.drain()
        return [t[0].item() for t in acts], [t[0].item() for t in grads]

    assert on_ranks(talk, 2) == [
        ([10.0, 11.0, 12.0, 13.0], [100.0, 101.0, 102.0, 103.0]),
        ([0.0, 1.0, 2.0, 3.0], [100.0, 101.0, 102.0, 103.0]),
    ]


def test_chunks_of_one_pair_are_channels_of_their_own():
    def talk(rank, group):
        channels = Channels(group)
        if rank == 0:
            for chunk in (0, 1, 2):
                channels.send("act", 1, torch.tensor([float(chunk)]), chunk=chunk)
            return None
        return [
            channels.recv("act", 0, (1,), torch.float32, chunk=chunk).wait().item()
            for chunk in (2, 0, 1)
        ]

    assert on_ranks(talk, 2)[1] == [2.0, 0.0, 1.0]


def test_a_message_is_what_the_tensor_was_without_its_graph():
    def talk(rank, group):
        channels = Channels(group)
        if rank == 0:
            channels.send(
                "act", 1, torch.arange(6.0, requires_grad=True).view(2, 3).t()
            )
        else:
            return channels.recv("act", 0, (3, 2), torch.float32).wait()

    got = on_ranks(talk, 2)[1]
    assert torch.equal(got, torch.arange(6.0).view(2, 3).t()) and not got.requires_grad


def test_a_rank_can_send_to_itself():
    channels = Channels(solo("pp"))
    first = channels.recv("act", 0, (1,), torch.float32)
    channels.send("act", 0, torch.tensor([1.0]))
    channels.send("act", 0, torch.tensor([2.0]))
    assert first.wait().item() == 1.0
    assert channels.recv("act", 0, (1,), torch.float32).wait().item() == 2.0
    channels.drain()


def test_traffic_counts_messages_at_the_sender():
    def talk(rank, group):
        channels = Channels(group)
        if rank == 0:
            channels.send("act", 1, torch.zeros(5, 2))
        else:
            channels.recv("act", 0, (5, 2), torch.float32).wait()
        return dict(group.traffic.bytes)

    assert on_ranks(talk, 2) == [{("send", "pp", 2): 40}, {}]


class SlowMail:
    """A transport whose sends are under way until told otherwise."""

    def __init__(self):
        self.arrived = 0
        self.sends = 0

    def isend(self, tensor, destination, tag):
        return self.Work(self, self._count())

    def irecv(self, tensor, source, tag):
        return self.Lost()

    def _count(self):
        self.sends += 1
        return self.sends

    class Work:
        def __init__(self, mail, number):
            self.mail, self.number = mail, number

        def is_completed(self):
            return self.number <= self.mail.arrived

        def wait(self):
            self.mail.arrived = max(self.mail.arrived, self.number)

    class Lost:
        def wait(self):
            raise CommunicationError("timed out")


def test_sent_tensors_are_held_until_they_have_left_and_no_longer():
    mail = SlowMail()
    channels = Channels(Group("pp", (4, 5), 0, mail))
    for _ in range(2):
        channels.send("act", 1, torch.zeros(2))
    assert channels.num_waiting == 2 and mail.arrived == 0
    mail.arrived = 2
    channels.send("act", 1, torch.zeros(2))
    assert channels.num_waiting == 1
    channels.drain()
    assert channels.num_waiting == 0 and mail.arrived == 3


def test_a_channel_holds_two_sends_and_waits_for_the_older_before_a_third():
    """On a GPU no send is known to be complete: without the wait a whole step of tensors would be held."""
    mail = SlowMail()
    channels = Channels(Group("pp", (4, 5), 0, mail))
    for number in range(5):
        channels.send("act", 1, torch.full((2,), float(number)))
        assert mail.arrived == max(0, number - 1)
    assert channels.num_waiting == 2
    assert sum(map(len, channels._sent.values())) == 2
    channels.send("grad", 1, torch.zeros(2))  # another channel has room of its own
    assert channels.num_waiting == 3 and mail.arrived == 3


class Receives:
    """A transport that notes when receives are posted and waited for."""

    def __init__(self):
        self.log = []

    def irecv(self, tensor, source, tag):
        number = sum(what == "post" for what, _ in self.log)
        self.log.append(("post", number))
        return SimpleNamespace(wait=lambda: self.log.append(("wait", number)))


def test_a_receive_is_posted_when_the_message_before_it_in_its_channel_has_arrived():
    transport = Receives()
    channels = Channels(Group("pp", (4, 5, 6), 1, transport))
    pending = [channels.recv("act", 0, (2,), torch.float32) for _ in range(3)]
    other = channels.recv("grad", 2, (2,), torch.float32)
    assert transport.log == [
        ("post", 0),
        ("wait", 0),
        ("post", 1),
        ("wait", 1),
        ("post", 2),
        ("post", 3),  # another channel
    ]
    # Each message is waited for once, and the channels keep none that has been.
    del transport.log[:]
    tensors = [weakref.ref(of.wait()) for of in (*pending, other)]
    assert transport.log == [("wait", 2), ("wait", 3)]
    del pending, other
    assert not any(tensor() is not None for tensor in tensors)


def test_a_message_that_does_not_come_names_sender_receiver_and_kind():
    channels = Channels(Group("pp", (4, 5), 1, SlowMail()))
    with pytest.raises(
        CommunicationError,
        match="rank 5 .* waiting for a gradient from rank 4 to rank 5: timed out",
    ):
        channels.recv("grad", 0, (2,), torch.float32).wait()


def test_the_time_of_a_transfer_is_that_of_one_hop_whatever_the_number_of_ranks(
    monkeypatch,
):
    send, now = Channels.send, [0.0]

    def slow(*args):
        now[0] += 5.0  # one rank after the other
        send(*args)

    monkeypatch.setattr(Channels, "send", slow)
    monkeypatch.setattr(layer_costs, "_now", lambda device: now[0])
    config = RunConfig()
    config = replace(
        config,
        model=replace(config.model, hidden_size=8, seq_length=4),
        train=replace(config.train, micro_batch_size=1),
    )
    for ranks in (2, 3):
        told = on_ranks(
            lambda rank, group: time_transfer(config, group, context_of()), ranks
        )
        assert told == [5.0] * ranks
