"""Collectives through the memory of one host: the results of messages for every size, ranks whose collectives
differ, and the memory that they take."""

import random
from unittest import mock

import pytest
import torch

from megatron_ds.mpu import slots
from megatron_ds.mpu.slots import Slots
from tests.harness.threads import run_ranks

SLOT = 1 << 12


def slots_of(group) -> Slots:
    transport = group.transport
    return Slots(group.rank, group.size, transport.share_memory(), transport.share_signals(),
                 transport.failure)


def given(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(numel, generator=torch.Generator().manual_seed(rank))).to(dtype)


def start(moves, kind: str, mine: torch.Tensor, ranks: int, rank: int, op: str):
    """(the work, its result) of a collective of slots or of a transport."""
    if kind == "all-reduce":
        return moves.all_reduce(mine, op), mine
    if kind == "reduce-scatter":
        out = torch.empty_like(mine[:len(mine) // ranks])
        return moves.reduce_scatter(out, mine, op), out
    if kind == "reduce-scatter in place":
        out = mine.chunk(ranks)[rank]
        return moves.reduce_scatter(out, mine, op), out
    if kind == "all-gather in place":
        out = mine.repeat(ranks)
        return moves.all_gather(out, out.chunk(ranks)[rank]), out
    out = torch.empty_like(mine) if kind == "all-to-all" else mine.new_empty(ranks * len(mine))
    return (moves.all_to_all if kind == "all-to-all" else moves.all_gather)(out, mine), out


KINDS = ("all-reduce", "reduce-scatter", "reduce-scatter in place", "all-gather", "all-gather in place",
         "all-to-all")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@pytest.mark.parametrize("ranks, seed", [(2, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
def test_results_have_the_bits_of_messages(ranks, seed):
    draw = random.Random(seed)
    jobs = [(kind, draw.choice([1, 3, 64, SLOT // 4, SLOT, 5 * SLOT + 7]),
             draw.choice(["sum", "sum", "max", "min"]), draw.choice(DTYPES), draw.random() < 0.5)
            for kind in KINDS for _ in range(6)]
    jobs += [("all-reduce", 0, "sum", torch.float32, False), ("all-reduce", 5 * SLOT + ranks - 1, "sum",
                                                              torch.bfloat16, True)]
    draw.shuffle(jobs)

    def main(rank, world, through_slots):
        group = world.group("tp", tuple(range(ranks)), rank)
        moves, results, waits = slots_of(group) if through_slots else group.transport, [], []
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

    with mock.patch.object(slots, "SLOT_BYTES", SLOT), mock.patch.object(slots, "WHOLE_BYTES", 512):
        through = run_ranks(ranks, lambda *here: main(*here, True), shares_memory=True)
    for mine, expected in zip(through, run_ranks(ranks, lambda *here: main(*here, False))):
        for job, a, b in zip(jobs, mine, expected, strict=True):
            assert torch.equal(a, b), job


@pytest.mark.parametrize("ranks, numel, rounds", [(2, 100, 1), (2, 5000, 5), (3, 100, 1), (3, 5000, 5 + 2)])
def test_the_memory_is_the_same_for_any_size(ranks, numel, rounds):
    def main(rank, world):
        group = world.group("tp", tuple(range(ranks)), rank)
        memory = group.transport.share_memory()
        with mock.patch.object(group.transport, "share_memory", lambda: memory):
            moves = slots_of(group)
        end, before = memory._end, moves.rounds
        tensor = torch.full((numel,), float(rank))
        moves.all_reduce(tensor, "sum").wait()
        assert torch.equal(tensor.unique(), torch.tensor([sum(range(ranks))], dtype=torch.float32))
        return memory._end - end, end, moves.rounds - before

    with mock.patch.object(slots, "SLOT_BYTES", SLOT), mock.patch.object(slots, "WHOLE_BYTES", 512):
        for grown, end, started in run_ranks(ranks, main, shares_memory=True):
            assert (grown, end, started) == (0, 2 * SLOT, rounds)


@pytest.mark.parametrize("kind, numel, message", [
    ("all-to-all", 100, "has 200 bytes for an all-to-all (round 2) where rank 0 expects 400 for an all-"),
    ("all-reduce", 50, "has 200 bytes for an all-reduce (round 2) where rank 0 expects 400 for an all-")])
def test_ranks_with_different_collectives_are_an_error(kind, numel, message):
    def main(rank, world):
        moves = slots_of(world.group("tp", (0, 1), rank))
        mine = torch.ones(100 if rank == 0 else numel)
        work, _ = start(moves, "all-reduce" if rank == 0 else kind, mine, 2, rank, "sum")
        with pytest.raises(ValueError) as raised:
            work.wait()
        return str(raised.value)

    first, _ = run_ranks(2, main, shares_memory=True)
    assert message in first and "the ranks took different paths" in first


def test_a_completed_collective_keeps_no_tensor():
    import weakref

    def main(rank, world):
        moves = slots_of(world.group("tp", (0, 1), rank))
        tensor = torch.ones(10)
        gone = weakref.ref(tensor)
        moves.all_reduce(tensor, "sum").wait()
        del tensor
        return gone() is None

    assert run_ranks(2, main, shares_memory=True) == [True, True]
