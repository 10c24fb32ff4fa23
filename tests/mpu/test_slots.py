"""Collectives through the memory of one host: the results of messages for every size, ranks whose collectives
differ, and the memory that they take."""

import gc
import os
import random
import weakref
from unittest import mock

import pytest
import torch

from megatron_ds.mpu import slots
from megatron_ds.mpu.slots import Slots, open_slots
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

SLOT = 1 << 12


def slots_of(group) -> Slots:
    transport = group.transport
    return open_slots(
        group.rank,
        group.ranks,
        transport.share_memory(),
        transport.share_signals(),
        transport.failure,
        transport.all_gather_object,
    )


def given(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).to(
        dtype
    )


def start(moves, kind: str, mine: torch.Tensor, ranks: int, rank: int, op: str):
    """(the work, its result) of a collective of slots or of a transport."""
    if kind == "all-reduce":
        return moves.all_reduce(mine, op), mine
    if kind == "reduce-scatter":
        out = torch.empty_like(mine[: len(mine) // ranks])
        return moves.reduce_scatter(out, mine, op), out
    if kind == "reduce-scatter in place":
        out = mine.chunk(ranks)[rank]
        return moves.reduce_scatter(out, mine, op), out
    if kind == "all-gather in place":
        out = mine.repeat(ranks)
        return moves.all_gather(out, out.chunk(ranks)[rank]), out
    out = (
        torch.empty_like(mine)
        if kind == "all-to-all"
        else mine.new_empty(ranks * len(mine))
    )
    return (moves.all_to_all if kind == "all-to-all" else moves.all_gather)(
        out, mine
    ), out


KINDS = (
    "all-reduce",
    "reduce-scatter",
    "reduce-scatter in place",
    "all-gather",
    "all-gather in place",
    "all-to-all",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@pytest.mark.parametrize("ranks, seed", [(2, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_results_have_the_bits_of_messages(ranks, seed):
    draw = random.Random(seed)
    jobs = [
        (
            kind,
            draw.choice([1, 3, 64, SLOT // 4, SLOT, 5 * SLOT + 7]),
            draw.choice(["sum", "sum", "max", "min"]),
            draw.choice(DTYPES),
            draw.random() < 0.5,
        )
        for kind in KINDS
        for _ in range(6)
    ]
    jobs += [
        ("all-reduce", 0, "sum", torch.float32, False),
        ("all-reduce", 5 * SLOT + ranks - 1, "sum", torch.bfloat16, True),
    ]
    draw.shuffle(jobs)

    def main(rank, world, through_slots):
        group = world.group("tp", tuple(range(ranks)), rank)
        moves, results, waits = (
            slots_of(group) if through_slots else group.transport,
            [],
            [],
        )
        for i, (kind, numel, op, dtype, waits_at_once) in enumerate(jobs):
            whole = numel if kind in ("all-reduce", "all-gather") else ranks * numel
            mine = given(rank + 10 * i, whole, dtype)
            work, result = start(moves, kind, mine, ranks, rank, op)
            results.append(result)
            waits.append(work)
            if waits_at_once:
                for work in waits:
                    work.wait()
                    work.wait()
        for work in waits:
            work.wait()
            assert work.is_completed()
        return results

    with (
        mock.patch.object(slots, "SLOT_BYTES", SLOT),
        mock.patch.object(slots, "WHOLE_BYTES", 512),
    ):
        through = run_ranks(ranks, lambda *here: main(*here, True), shares_memory=True)
    for mine, expected in zip(
        through, run_ranks(ranks, lambda *here: main(*here, False))
    ):
        for job, a, b in zip(jobs, mine, expected, strict=True):
            assert torch.equal(a, b), job


@pytest.mark.parametrize(
    "ranks, numel, rounds", [(2, 100, 1), (2, 5000, 5), (3, 100, 1), (3, 5000, 5 + 2)]
)
def test_the_memory_is_the_same_for_any_size(ranks, numel, rounds):
    def main(rank, world):
        group = world.group("tp", tuple(range(ranks)), rank)
        memory = group.transport.share_memory()
        with mock.patch.object(group.transport, "share_memory", lambda: memory):
            moves = slots_of(group)
        end, before = memory._end, moves.rounds
        tensor = torch.full((numel,), float(rank))
        moves.all_reduce(tensor, "sum").wait()
        assert torch.equal(
            tensor.unique(), torch.tensor([sum(range(ranks))], dtype=torch.float32)
        )
        return memory._end - end, end, moves.rounds - before

    with (
        mock.patch.object(slots, "SLOT_BYTES", SLOT),
        mock.patch.object(slots, "WHOLE_BYTES", 512),
    ):
        for grown, end, started in run_ranks(ranks, main, shares_memory=True):
            assert (grown, end, started) == (0, 2 * SLOT, rounds)


ALL_REDUCE = "all-reduce (sum) of float32 in round 1"


@pytest.mark.parametrize(
    "kind, numel, dtype, op, theirs",
    [
        (
            "all-to-all",
            100,
            torch.float32,
            "",
            "200 bytes for all-to-all of float32 in round 1",
        ),
        (
            "reduce-scatter",
            200,
            torch.float32,
            "sum",
            "400 bytes for reduce-scatter (sum) of float32 in round 1",
        ),
        ("all-reduce", 50, torch.float32, "sum", "200 bytes for " + ALL_REDUCE),
        (
            "all-reduce",
            200,
            torch.float16,
            "sum",
            "400 bytes for all-reduce (sum) of float16 in round 1",
        ),
        (
            "all-reduce",
            100,
            torch.float32,
            "max",
            "400 bytes for all-reduce (max) of float32 in round 1",
        ),
    ],
)
def test_ranks_with_different_collectives_are_an_error_with_their_global_numbers(
    kind, numel, dtype, op, theirs
):
    def main(rank, world):
        if rank == 0:
            return None
        moves = slots_of(world.group("tp", (1, 2), rank))
        if rank == 1:
            work = moves.all_reduce(torch.ones(100), "sum")
        else:
            work, _ = start(moves, kind, torch.ones(numel, dtype=dtype), 2, 1, op)
        with pytest.raises(ValueError) as raised:
            work.wait()
        return str(raised.value)

    _, first, second = run_ranks(3, main, shares_memory=True)
    assert first == (
        f"rank 2 has {theirs}, where rank 1 expects 400 for {ALL_REDUCE}: the ranks took "
        "different paths"
    )
    assert second.startswith("rank 1 has 400 bytes for " + ALL_REDUCE)


@pytest.mark.parametrize("order", ["as started", "reversed"])
def test_ranks_may_wait_at_once_or_later_and_in_any_order(order):
    """All-reduces of two phases: the second must have the same round on all ranks."""

    def main(rank, world):
        moves = slots_of(world.group("tp", (0, 1, 2), rank))
        tensors = [torch.full((5000,), rank + i, dtype=torch.float32) for i in range(2)]
        if rank == 0:
            for tensor in tensors:
                moves.all_reduce(tensor, "sum").wait()
        else:
            works = [moves.all_reduce(tensor, "sum") for tensor in tensors]
            for work in works if order == "as started" else works[::-1]:
                work.wait()
        return [tensor.unique().tolist() for tensor in tensors]

    assert run_ranks(3, main, shares_memory=True) == [[[3.0], [6.0]]] * 3


def test_without_room_on_one_rank_all_send_messages(monkeypatch, caplog):
    truncate, calls = os.ftruncate, []

    def full(file, nbytes):
        calls.append(nbytes)
        if len(calls) == 2:  # of one rank, or the second of the first
            raise OSError(28, "No space left on device")
        truncate(file, nbytes)

    monkeypatch.setattr(os, "ftruncate", full)
    main = lambda rank, world: rank and slots_of(world.group("tp", (1, 2), rank))
    assert run_ranks(3, main, shares_memory=True) == [0, None, None]
    (line,) = caplog.messages
    assert (
        "send tensors as messages" in line
        and "rank 1: [Errno 28] No space left on device" in line
    )


@pytest.mark.parametrize("waits", [True, False])
def test_slots_are_released_with_their_last_reference(waits):
    def main(rank, world):
        group = world.group("tp", (0, 1, 2), rank)
        memory, signals = (
            group.transport.share_memory(),
            group.transport.share_signals(),
        )
        moves = open_slots(
            rank,
            group.ranks,
            memory,
            signals,
            group.transport.failure,
            group.transport.all_gather_object,
        )
        gone = weakref.ref(moves), weakref.ref(memory), weakref.ref(signals)
        work = moves.all_reduce(torch.ones(5000), "sum")
        if waits:
            work.wait()
            del moves, memory, signals  # a completed work keeps nothing
        else:
            del moves, memory, signals, work  # as after an error of another rank
        return [ref() is None for ref in gone]

    gc.disable()
    try:
        assert run_ranks(3, main, shares_memory=True) == [[True] * 3] * 3
    finally:
        gc.enable()


def test_a_completed_collective_keeps_no_tensor():
    def main(rank, world):
        moves = slots_of(world.group("tp", (0, 1), rank))
        tensor = torch.ones(10)
        gone = weakref.ref(tensor)
        moves.all_reduce(tensor, "sum").wait()
        del tensor
        return gone() is None

    assert run_ranks(2, main, shares_memory=True) == [True, True]
