"""The fake GPU and its happens-before checker: each kind of race is found, each kind of order is accepted."""

import pytest
import torch

from tests.harness.fake_cuda import FakeGpu, fake_cuda

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
