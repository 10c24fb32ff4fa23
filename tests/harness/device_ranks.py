"""Ranks as threads of one process that share one real GPU: collectives on streams of their own, delivered late.

    merged = train_on_one_gpu("tp=2,pp=2", seed=3)     # collectives are delayed on the device
    merged = train_on_one_gpu("tp=2,pp=2", seed=None)  # the host waits for the device at each collective

A collective begins after what is queued on the current stream, sleeps on the device for a drawn time and then
copies; `wait` makes the current stream wait for it, as NCCL does. A part of the code that reads a result
before it waits, or overwrites a buffer that is still being sent, computes other numbers than the run in which
the host waits each time. The numbers of both must be equal to the bit.

Each rank has a stream of its own in place of the default one. Backward runs on the rank's own thread: torch
has one backward thread a device, and a rank that waits in it for another rank would never be answered.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack

import torch

from megatron_ds.config import parse
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.ops import kernel_table
from tests.harness.layout_comparison import (
    merge,
    parse_layout,
    random_samples,
    train_layout,
)
from tests.harness.threads import ThreadTransport, run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB, tiny_job

STEPS, LAYERS, BATCH = 3, 4, 4
LONGEST_DELAY = 400_000  # cycles of a GPU's clock: about 0.2 ms
GPU = torch.device("cuda", 0)
LANE_NAMES = ("activations", "gradients")


class DeviceWork:
    """A collective on a stream. It keeps its tensors until it is waited for."""

    def __init__(self, event: torch.cuda.Event, tensors: tuple[torch.Tensor, ...]):
        self._event = event
        self._tensors = tensors

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()

    def is_completed(self) -> bool:
        return self._event.query()


class ArrivingWork:
    """A receive: its message is taken, and copied on the stream of its lane, when it is waited for."""

    def __init__(self, receive: Callable[[], DeviceWork]):
        self._receive = receive

    def wait(self) -> None:
        """Make the current stream wait for the message."""
        self._receive().wait()


class DeviceTransport(ThreadTransport):
    """A transport among threads whose tensors are on one GPU.

    delay: returns the cycles by which the next collective is late; None if the host waits for the device at
    each collective
    """

    def __init__(
        self, transport: ThreadTransport, axes: str, delay: Callable[[], int] | None
    ):
        self.__dict__.update(transport.__dict__)
        self.axes = axes
        self._delay = delay
        self._streams: dict[str, torch.cuda.Stream] = {}

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream()
        return self._streams[name]

    def _queue(self, name: str, do: Callable[[], object], *tensors) -> DeviceWork:
        """Run `do` on a stream, after what the current stream has queued and a delay."""
        stream = self._stream(name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if self._delay is not None:
                torch.cuda._sleep(self._delay())
            do()
            event = stream.record_event()
        if self._delay is None:
            torch.cuda.synchronize()
        return DeviceWork(event, tensors)

    def _exchange(self, thing) -> list:
        """The object of every rank; the current stream waits for the tensors in it."""
        mine = (thing, _recorded_event(thing))
        return [_arrived(*message) for message in super()._exchange(mine)]

    def all_reduce(self, tensor, op):
        do = lambda: ThreadTransport.all_reduce(self, tensor, op)
        return self._queue("collectives", do, tensor)

    def all_gather(self, out, tensor):
        do = lambda: ThreadTransport.all_gather(self, out, tensor)
        return self._queue("collectives", do, out, tensor)

    def reduce_scatter(self, out, tensor, op):
        do = lambda: ThreadTransport.reduce_scatter(self, out, tensor, op)
        return self._queue("collectives", do, out, tensor)

    def all_to_all(self, out, tensor, sent=None, received=None):
        do = lambda: ThreadTransport.all_to_all(self, out, tensor, sent, received)
        return self._queue("collectives", do, out, tensor)

    def broadcast(self, tensor, source):
        do = lambda: ThreadTransport.broadcast(self, tensor, source)
        return self._queue("collectives", do, tensor)

    def isend(self, tensor, destination, tag):
        mailbox = self.room.mailbox(self.rank, destination, tag)

        def do():
            message = tensor.detach().clone()
            mailbox.put((message, _recorded_event(message)))

        return self._queue(f"to {destination}, {_lane(tag)}", do, tensor)

    def irecv(self, tensor, source, tag):
        mailbox = self.room.mailbox(source, self.rank, tag)

        def do():
            message = _arrived(*self.room.take(mailbox))
            assert message.shape == tensor.shape
            tensor.detach().copy_(message)

        name = f"from {source}, {_lane(tag)}"
        return ArrivingWork(lambda: self._queue(name, do, tensor))

    def exchange(self, sends, receives):
        for tensor, destination in sends:
            self.isend(tensor, destination, "exchanged")
        received = [self.irecv(t, source, "exchanged") for t, source in receives]
        return _All(received)

    def share_memory(self):
        return None


class _All:
    def __init__(self, works):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _lane(tag) -> str:
    return LANE_NAMES[tag % 2] if isinstance(tag, int) else str(tag)


def _tensors(thing) -> list[torch.Tensor]:
    things = thing if isinstance(thing, list | tuple) else [thing]
    return [t for t in things if isinstance(t, torch.Tensor) and t.is_cuda]


def _recorded_event(thing) -> torch.cuda.Event | None:
    """What a reader of the tensors waits for; None without tensors of a GPU."""
    return torch.cuda.current_stream().record_event() if _tensors(thing) else None


def _arrived(thing, event: torch.cuda.Event | None):
    """The thing, when the current stream has been made to wait for it."""
    if event is None:
        return thing
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in _tensors(thing):
        tensor.record_stream(stream)
    return thing


def train_on_one_gpu(
    layout: str,
    seed: int | None,
    dtype: str = "fp32",
    more: tuple[str, ...] = (),
    device: torch.device = GPU,
) -> tuple:
    """(trace, weights) of all ranks of a layout, which are threads on one GPU.

    seed: of the delays; None makes the host wait for the device at each collective
    """
    request = parse_layout(layout, mbs="1")
    job = tiny_job("gpt2", dtype, False, 0.0, LAYERS, BATCH, STEPS)
    config = parse([*job, *request.flags, *more], world_size=request.world_size)
    samples = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1)

    def main(rank, world):
        draw = random.Random(None if seed is None else 1000 * seed + rank)
        delay = None if seed is None else lambda: draw.randrange(LONGEST_DELAY)

        def connect(axes, groups, rank):
            transport = world.connect(axes, groups, rank)
            return transport and DeviceTransport(transport, axes, delay)

        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            grid = config.grid(request.world_size)
            mesh = Mesh(grid, rank, connect, device)
            return train_layout(config, mesh, STEPS, samples)

    with kernel_table.selected("auto"):
        return merge(run_ranks(request.world_size, main))
