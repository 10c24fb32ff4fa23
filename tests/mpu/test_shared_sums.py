"""Reductions in memory that ranks of one host share: the bits of messages, without messages; who may write
when."""

import random
import threading

import pytest
import torch

from megatron_ds.mpu.collectives import (
    all_reduce_,
    barrier,
    is_read,
    reduce_scatter_into_,
    settle,
    share_memory,
)
from megatron_ds.mpu.shared_sums import SharedSums
from tests.harness.limits import HUNG
from tests.harness.threads import ThreadTransport, run_ranks
from tests.zero.test_shared_parts import resident, train

pytestmark = pytest.mark.threads


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def refuse(*args):
    raise AssertionError("a message was sent")


@pytest.mark.parametrize(
    "ranks, dtype, seed",
    [
        (2, torch.float32, 0),
        (3, torch.bfloat16, 1),
        (4, torch.float32, 2),
        (3, torch.float32, 3),
    ],
)
def test_sums_in_any_place_of_memory_have_the_bits_of_messages_and_send_none(
    ranks, dtype, seed, monkeypatch
):
    draw = random.Random(seed)
    jobs = [
        (
            draw.choice(["scatter", "scatter in place", "all"]),
            ranks * draw.choice([1, 7, 5000]),
        )
        for _ in range(6)
    ]

    def main(rank, world, shares):
        group = world.group("dp", tuple(range(ranks)), rank)
        if shares:
            group = share_memory(group)
            group.memory.allocate(
                rank * 5000 + 1
            )  # tensors have other places on each rank
        tensors, outs, works = [], [], []
        for i, (kind, numel) in enumerate(jobs):
            given = numbers(rank + 10 * i, numel, dtype)
            tensor = group.memory.zeros(numel, dtype).copy_(given) if shares else given
            piece = tensor.chunk(ranks)[rank]
            out = torch.empty_like(piece)
            if kind == "all":
                out = tensor
            elif "in place" in kind:
                out = piece
            works.append(
                all_reduce_(tensor, group, async_op=True)
                if kind == "all"
                else reduce_scatter_into_(out, tensor, group, async_op=True)
            )
            tensors.append(tensor)
            outs.append(out)
        for work in works:
            work.wait()
            work.wait()
        return (
            [out.clone() for out in outs],
            dict(group.traffic.bytes),
            group.sums and group.sums.rounds,
        )

    expected = run_ranks(ranks, lambda *here: main(*here, False))
    for operation in ("all_reduce", "reduce_scatter"):
        monkeypatch.setattr(ThreadTransport, operation, refuse)
    rounds = sum(1 + (kind == "all") for kind, _ in jobs)
    for (sums, sent, count), (others, other_sent, _) in zip(
        run_ranks(ranks, lambda *here: main(*here, True), shares_memory=True), expected
    ):
        assert all(torch.equal(a, b) for a, b in zip(sums, others, strict=True))
        assert sent == other_sent and count == rounds


def test_a_tensor_may_be_overwritten_when_no_other_rank_reads_it_any_more():
    has_looked = threading.Event()

    def main(rank, world):
        group = share_memory(world.group("dp", (0, 1), rank))
        tensor, out = (
            group.memory.zeros(2000, torch.float32).fill_(rank + 1.0),
            torch.empty(1000),
        )
        work = reduce_scatter_into_(out, tensor, group, async_op=True)
        if rank == 0:  # late: it reads when the other one has looked
            world.baton.held.release()
            has_looked.wait(HUNG)
            world.baton.held.acquire()
        work.wait()
        read = is_read(tensor, group)
        if rank == 1:
            has_looked.set()
        settle(group)
        assert is_read(tensor, group) and (rank == 0 or not read)
        tensor.fill_(50.0)
        return out.unique().tolist()

    assert run_ranks(2, main, shares_memory=True) == [[3.0], [3.0]]


def test_ranks_that_reduce_different_tensors_are_an_error():
    def main(rank, world):
        if rank == 0:
            return
        group = share_memory(world.group("dp", (1, 2), rank))
        tensor = group.memory.zeros(3000 - 1000 * rank, torch.float32)
        work = reduce_scatter_into_(
            torch.empty(tensor.numel() // 2), tensor, group, async_op=True
        )
        theirs = 4000 if rank == 1 else 8000
        with pytest.raises(
            ValueError,
            match=f"rank {3 - rank} adds {theirs} bytes where rank {rank} adds",
        ):
            work.wait()

    run_ranks(3, main, shares_memory=True)


def test_pages_of_other_ranks_are_released_after_they_were_read():
    numel = 4 << 20

    def main(rank, world):
        group = share_memory(world.group("dp", (0, 1), rank))
        tensor = group.memory.zeros(numel, torch.float32).fill_(rank + 1.0)
        barrier(group)
        before = resident()
        all_reduce_(tensor, group)
        barrier(group)
        grown = resident() - before
        barrier(group)
        return grown, tensor.unique().tolist()

    for grown, values in run_ranks(2, main, shares_memory=True):
        assert grown < numel and values == [
            3.0
        ]  # a quarter of the tensor that each has read


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=4,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=4,zero=3,hpz=2"]
)
def test_gradients_of_a_step_are_not_sent_between_ranks_of_one_host(
    layout, monkeypatch
):
    started, sent = [], []
    start, all_reduce, scatter = (
        SharedSums._start,
        ThreadTransport.all_reduce,
        ThreadTransport.reduce_scatter,
    )
    monkeypatch.setattr(
        SharedSums, "_start", lambda *given: started.append(0) or start(*given)
    )

    monkeypatch.setattr(
        ThreadTransport,
        "all_reduce",
        lambda self, tensor, op: (
            sent.append(tensor.numel()),
            all_reduce(self, tensor, op),
        )[1],
    )
    monkeypatch.setattr(
        ThreadTransport,
        "reduce_scatter",
        lambda self, out, tensor, op: (
            sent.append(tensor.numel()),
            scatter(self, out, tensor, op),
        )[1],
    )
    shared = train(layout, "fp32", True, steps=2)
    largest = max(sent)
    assert started and (
        largest < 100 or "hpz" in layout
    )  # metrics and norms; or the hop between groups
    in_memory = len(started)
    started.clear(), sent.clear()
    alone = train(layout, "fp32", False, steps=2)
    assert not started and max(sent) > 1000 and in_memory
    for (losses, weights, *_), (expected, other_weights, *_) in zip(shared, alone):
        assert losses == expected
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
