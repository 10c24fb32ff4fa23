"""The fake GPU and its happens-before checker: each kind of race is found, each kind of order is accepted."""

import threading

import pytest
import torch

from tests.harness.fake_cuda import DEFAULT, FakeGpu, fake_cuda
from tests.harness.hardware_queue import blocked_queues
from tests.harness.stream_order import StreamOrder

pytestmark = pytest.mark.plan


@pytest.fixture
def gpu():
    with fake_cuda(), FakeGpu() as gpu:
        yield gpu


def beside(work, before=lambda stream: None):
    """`work` on another stream; `before` orders that stream."""
    stream = torch.cuda.Stream()
    before(stream)
    with torch.cuda.stream(stream):
        return stream, work()


def test_a_kernel_on_another_stream_needs_an_event(gpu):
    x = torch.zeros(8, device="cuda")
    beside(lambda: x.add_(1))
    assert len(gpu.order.problems) == 1 and "add_" in gpu.order.problems[0]


@pytest.mark.parametrize(
    "order",
    [
        lambda stream: stream.wait_stream(torch.cuda.current_stream()),
        lambda stream: stream.wait_event(torch.cuda.current_stream().record_event()),
        lambda stream: torch.cuda.synchronize(),
    ],
)
def test_an_event_orders_two_streams(gpu, order):
    x = torch.zeros(8, device="cuda")
    stream, _ = beside(lambda: x.add_(1), order)
    torch.cuda.current_stream().wait_stream(stream)
    assert x.sum().item() == 8
    assert not gpu.order.problems


def test_the_way_back_needs_an_event_too(gpu):
    x = torch.zeros(8, device="cuda")
    beside(
        lambda: x.add_(1),
        lambda stream: stream.wait_stream(torch.cuda.current_stream()),
    )
    x.mul_(2)
    assert "mul_" in gpu.order.problems[0]


def test_parts_of_a_tensor_that_do_not_overlap_need_none(gpu):
    x = torch.zeros(8, device="cuda")
    beside(
        lambda: x[:4].add_(1),
        lambda stream: stream.wait_stream(torch.cuda.current_stream()),
    )
    x[4:].add_(1)
    assert not gpu.order.problems
    x[3:].add_(1)
    assert gpu.order.problems


def test_two_reads_need_none(gpu):
    x = torch.zeros(8, device="cuda")
    beside(
        lambda: x + 1, lambda stream: stream.wait_stream(torch.cuda.current_stream())
    )
    y = x + 2
    assert not gpu.order.problems and y.is_cuda


def test_freed_memory_must_not_be_in_use_on_another_stream(gpu):
    x = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x + 1
    del x
    assert "freed" in gpu.order.problems[0]


def test_record_stream_lets_the_allocator_wait(gpu):
    x = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x + 1
    x.record_stream(stream)
    del x
    assert not gpu.order.problems


def test_a_storage_that_shrinks_is_freed(gpu):
    x = torch.zeros(8, device="cuda")
    beside(
        lambda: x + 1, lambda stream: stream.wait_stream(torch.cuda.current_stream())
    )
    x.untyped_storage().resize_(0)
    assert "freed" in gpu.order.problems[0]


def test_the_host_reads_page_locked_memory_after_the_copy(gpu):
    x, there = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    there.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert not gpu.order.waits
    done.synchronize()
    assert there.sum() == 8 and not gpu.order.problems and len(gpu.order.waits) == 1


def test_the_host_must_not_touch_it_before(gpu):
    x, there = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    there.copy_(x, non_blocking=True)
    there.zero_()
    assert "zero_ on host" in gpu.order.problems[0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.empty(8).copy_(x),
        lambda x: torch.empty(8).copy_(x, non_blocking=True),
        lambda x: bool((x > 1).any()),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.ones(3).to("cuda", non_blocking=True),
        lambda x: torch.unique(x),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_what_makes_the_host_wait_is_counted(gpu, wait):
    x = torch.ones(8, device="cuda")
    assert not gpu.order.waits
    wait(x)
    assert gpu.order.waits


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.full((), 3.0, device="cuda"),
        lambda x: x.sum(),
        lambda x: torch.where(x > 1, x, 0),
        lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
        lambda x: x.requires_grad_().square().sum().backward(),
    ],
)
def test_what_does_not_is_not(gpu, work):
    work(torch.ones(8, device="cuda"))
    assert not gpu.order.waits and not gpu.order.problems


# ------------------------------------------------------------------------- host and device in one operation
HOST = torch.arange(8.0)
MIXED = {
    "sum": lambda x: x + HOST,
    "product": lambda x: x.view(2, 4) @ HOST.view(4, 2),
    "written on the host": lambda x: torch.zeros(8).add_(x),
    "number written on the host": lambda x: torch.zeros(()).add_(x.sum()),
    "indices on the device": lambda x: HOST[x.long()],
    "rows of the host": lambda x: x.index_select(0, torch.tensor([1])),
    "out": lambda x: torch.add(x, 1, out=torch.empty(8)),
    "a list": lambda x: torch.cat([x, HOST]),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_an_operation_that_mixes_host_and_device_is_refused(gpu, mix):
    x = torch.zeros(8, device="cuda")
    with pytest.raises(RuntimeError, match=r"same device.*cuda:0 and cpu: \w+ of aten"):
        mix(x)


def test_numbers_of_the_host_are_arguments_of_kernels_and_indices_are_copied(gpu):
    x = torch.arange(8.0).to("cuda")
    waits = len(gpu.order.waits)
    y = (x * torch.tensor(2.0)).masked_fill(x > 6, torch.tensor(0.0))
    assert len(gpu.order.waits) == waits
    assert y[torch.tensor([1, 7])].tolist() == [2.0, 0.0]
    assert "indices" in gpu.order.waits[waits]


# ----------------------------------------------------------------------------------------------- backward
class Noting(torch.autograd.Function):
    """Notes the thread and the stream of its forward and of its backward."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append((threading.get_ident(), torch.cuda.current_stream().name))
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        here = threading.get_ident(), torch.cuda.current_stream().name
        ctx.notes.append(here)
        return dy * torch.ones(8, device="cuda"), None


def test_a_backward_runs_in_a_thread_of_autograd_on_the_default_stream(gpu):
    notes = []
    x = torch.zeros(8, device="cuda").requires_grad_()
    y = Noting.apply(x, notes).sum()
    with torch.cuda.stream(torch.cuda.Stream()):
        y.backward()
    (thread, stream), (of_backward, its_stream) = notes
    assert thread != of_backward and stream == its_stream == DEFAULT
    assert x.grad.tolist() == [1.0] * 8


def test_an_error_of_a_backward_is_raised_where_it_was_called(gpu):
    x = torch.zeros(8, device="cuda").requires_grad_()
    with pytest.raises(AttributeError):
        Noting.apply(x, None).backward(torch.ones(8, device="cuda"))


# ------------------------------------------------------------------------------------- one hardware queue
def launched(order, *entries):
    """An order with these in its queue: (stream, names of a message's parts, streams it waits for)."""
    for stream, parts, awaited in entries:
        for other in awaited:
            order.wait(stream, order.event(other))
        order.run(stream, "kernel", [], [], meets=tuple((name, 2) for name in parts))
    return order


def test_a_receive_in_front_of_the_send_it_depends_on_blocks_a_single_queue():
    """Rank 1 sends its answer when it has the second message; rank 0 posts a second receive first."""
    first, second = ("to 1", ["a0"], []), ("to 1", ["a1"], [])
    receive, next_receive = ("from 1", ["g0"], []), ("from 1", ["g1"], [])
    peer = [
        ("from 0", ["a0"], []),
        ("from 0", ["a1"], []),
        ("to 0", ["g0"], ["from 0"]),
        ("to 0", ["g1"], []),
    ]
    good, bad = (
        [
            launched(StreamOrder(), *queue),
            launched(StreamOrder(), *peer),
        ]
        for queue in (
            [first, receive, second, next_receive],
            [first, receive, next_receive, second],
        )
    )
    assert not blocked_queues(good)
    assert len(blocked_queues(bad)) == 2 and "from 1" in blocked_queues(bad)[0]
