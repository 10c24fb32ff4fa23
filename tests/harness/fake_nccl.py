"""NCCL on fake GPUs (fake_cuda.py): collectives among threads, on streams of their own, recorded.

As in torch: a collective begins after what is queued on the current stream, runs on a stream of its group,
keeps its tensors alive until `wait`, and `wait` makes the current stream wait, not the host.
"""

from collections import Counter

import torch

from megatron_ds.errors import CommunicationError

from .fake_cuda import DeviceTensor, gpu, inner_of
from .threads import ThreadTransport


class FakeWork:
    """A collective on a stream of its own. It keeps its tensors until it is waited for."""

    def __init__(self, stream: str, tensors, arrive=lambda: None):
        self.event, self.tensors, self._arrive = (
            gpu().order.event(stream),
            tensors,
            arrive,
        )

    def wait(self):
        """The current stream waits."""
        self._arrive()
        self._arrive = lambda: None
        gpu().order.wait(gpu().current, self.event)
        self.tensors = ()

    def is_completed(self):
        return False


class FakeNccl(ThreadTransport):
    """A transport among threads, of which each has a `FakeGpu`: collectives and exchanges run on a
    stream of the group, messages on one of each direction; they begin after what is queued on the current
    stream."""

    def __init__(self, transport: ThreadTransport, axes: str):
        self.__dict__.update(transport.__dict__)
        self.axes = axes
        self._counts: Counter = Counter()  # of collectives, and of each lane's messages

    def failure(self, what, error):
        return CommunicationError(f"{what} failed: {error}")

    def _queue(self, what, stream, reads, writes, do, lanes=None):
        """lanes: of messages; None for a collective."""
        of = gpu()
        if not any(isinstance(t, DeviceTensor) for t in (*reads, *writes)):
            return do(reads, writes)
        meets = [self._named(lane, 2) for lane in lanes or ()]
        if lanes is None:
            meets = [self._named("collective", self.size)]
        of.order.wait(stream, of.order.event(of.current))
        of.order.run(
            stream,
            what,
            [r for t in reads for r in of.range_of(t)],
            [r for t in writes for r in of.range_of(t)],
            meets=tuple(meets),
        )
        with torch.utils._python_dispatch._disable_current_modes():
            work = do(
                [inner_of(t.detach()) for t in reads],
                [inner_of(t.detach()) for t in writes],
            )
        return FakeWork(stream, (*reads, *writes), work.wait)

    def _named(self, lane, ranks: int):
        """(name of the next message in a lane, how many ranks it has)"""
        self._counts[lane] += 1
        return (id(self.room), self.axes, lane, self._counts[lane]), ranks

    def all_reduce(self, tensor, op):
        return self._queue(
            "all-reduce",
            f"nccl {self.axes}",
            [tensor],
            [tensor],
            lambda reads, _: ThreadTransport.all_reduce(self, reads[0], op),
        )

    def all_gather(self, out, tensor):
        return self._queue(
            "all-gather",
            f"nccl {self.axes}",
            [tensor],
            [out],
            lambda reads, writes: ThreadTransport.all_gather(self, writes[0], reads[0]),
        )

    def reduce_scatter(self, out, tensor, op):
        return self._queue(
            "reduce-scatter",
            f"nccl {self.axes}",
            [tensor],
            [out],
            lambda r, w: ThreadTransport.reduce_scatter(self, w[0], r[0], op),
        )

    def all_to_all(self, out, tensor, sent=None, received=None):
        return self._queue(
            "all-to-all",
            f"nccl {self.axes}",
            [tensor],
            [out],
            lambda r, w: ThreadTransport.all_to_all(self, w[0], r[0], sent, received),
        )

    def broadcast(self, tensor, source):
        return self._queue(
            "broadcast",
            f"nccl {self.axes}",
            [tensor],
            [tensor],
            lambda reads, _: ThreadTransport.broadcast(self, reads[0], source),
        )

    def isend(self, tensor, destination, tag):
        return self._queue(
            "send",
            f"nccl {self.axes} to {destination}, {_lane(tag)}",
            [tensor],
            [],
            lambda reads, _: ThreadTransport.isend(self, reads[0], destination, tag),
            [(self.rank, destination, _lane(tag))],
        )

    def irecv(self, tensor, source, tag):
        return self._queue(
            "receive",
            f"nccl {self.axes} from {source}, {_lane(tag)}",
            [],
            [tensor],
            lambda _, writes: ThreadTransport.irecv(self, writes[0], source, tag),
            [(source, self.rank, _lane(tag))],
        )

    def exchange(self, sends, receives):
        """One batch on the stream of the collectives, as in torch: it ends when all of it has ended."""

        def do(reads, writes):
            return ThreadTransport.exchange(
                self,
                [(t, to) for t, (_, to) in zip(reads, sends)],
                [(t, of) for t, (_, of) in zip(writes, receives)],
            )

        return self._queue(
            "exchange",
            f"nccl {self.axes}",
            [t for t, _ in sends],
            [t for t, _ in receives],
            do,
            [
                *((self.rank, to, "exchange") for _, to in sends),
                *((of, self.rank, "exchange") for _, of in receives),
            ],
        )


def _lane(tag) -> str:
    return ("activations", "gradients")[tag % 2] if isinstance(tag, int) else tag
