"""Collectives on threads against what one process would compute, and what they count."""

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.mpu import collectives
from megatron_ds.mpu.group import solo
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

RANKS = 3


def pieces(shape, count=RANKS):
    """One tensor per rank, of small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(-9, 9, shape, generator=generator).float() for _ in range(count)
    ]


def on_ranks(function, count=RANKS):
    return run_ranks(
        count, lambda rank, world: function(rank, world.group("tp", range(count), rank))
    )


@pytest.mark.parametrize(
    "op, reduce", [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)]
)
def test_all_reduce_is_the_reduction_of_the_stack(op, reduce):
    given = pieces((5, 2))
    mine = [t.clone() for t in given]
    on_ranks(lambda rank, group: collectives.all_reduce_(mine[rank], group, op))
    for t in mine:
        assert torch.equal(t, reduce(torch.stack(given), dim=0))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_all_gather_concatenates_along_any_dim(dim):
    given = pieces((2, 5, 3))
    for got in on_ranks(
        lambda rank, group: collectives.all_gather(given[rank], group, dim)
    ):
        assert torch.equal(got, torch.cat(given, dim))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_reduce_scatter_is_the_piece_of_the_sum(dim):
    given = pieces((6, 9, 3))
    pieces_of_sum = torch.stack(given).sum(0).chunk(RANKS, dim)
    for got, piece in zip(
        on_ranks(
            lambda rank, group: collectives.reduce_scatter(given[rank], group, dim)
        ),
        pieces_of_sum,
    ):
        assert torch.equal(got, piece)


def test_reduce_scatter_takes_tensors_that_are_not_contiguous():
    given = [t.t() for t in pieces((4, 6))]
    pieces_of_sum = torch.stack(given).sum(0).chunk(RANKS)
    for got, piece in zip(
        on_ranks(lambda rank, group: collectives.reduce_scatter(given[rank], group)),
        pieces_of_sum,
    ):
        assert torch.equal(got, piece)


def test_all_gather_works_in_place_on_a_slice_of_its_result():
    given = pieces((4,))
    out = [torch.zeros(12) for _ in range(RANKS)]

    def gather(rank, group):
        mine = out[rank][4 * rank : 4 * rank + 4]
        mine.copy_(given[rank])
        collectives.all_gather_into_(out[rank], mine, group)

    on_ranks(gather)
    assert all(torch.equal(t, torch.cat(given)) for t in out)


def test_all_to_all_transposes_ranks_and_pieces():
    given = pieces((6,))
    out = [torch.empty(6) for _ in range(RANKS)]
    on_ranks(lambda rank, group: collectives.all_to_all_(out[rank], given[rank], group))
    for rank in range(RANKS):
        assert torch.equal(out[rank], torch.cat([t.chunk(RANKS)[rank] for t in given]))


ROWS = [[0, 3, 1], [2, 0, 5], [0, 0, 4]]  # ROWS[i][j]: sent by rank i to rank j


@pytest.mark.parametrize("shape", [(), (2,)])
def test_all_to_all_with_splits_sends_any_number_of_rows_and_counts_those_to_other_ranks(
    shape,
):
    given = [
        torch.arange(20.0)
        .view(10, 2)[: sum(rows), 0 if not shape else slice(None)]
        .add(100 * rank)
        .contiguous()
        for rank, rows in enumerate(ROWS)
    ]

    def swap(rank, group):
        received = [rows[rank] for rows in ROWS]
        out = given[rank].new_empty(sum(received), *shape)
        collectives.all_to_all_(out, given[rank], group, (ROWS[rank], received))
        return out, dict(group.traffic.bytes)

    for rank, (out, counted) in enumerate(on_ranks(swap)):
        assert torch.equal(
            out, torch.cat([t.split(rows)[rank] for t, rows in zip(given, ROWS)])
        )
        elsewhere = sum(ROWS[rank]) - ROWS[rank][rank]
        assert counted == {
            ("all_to_all_v", "tp", 3): 4 * elsewhere * (2 if shape else 1)
        }


@pytest.mark.parametrize(
    "splits",
    [
        ([1, 2], [3, 0, 0]),
        ([1, 1, 2], [3, 0, 0]),
        ([1, 1, 1], [3, 0, 1]),
        ([4, -1, 0], [1, 1, 1]),
    ],
)
def test_splits_that_do_not_add_up_are_refused(splits):
    with pytest.raises(LayoutError, match="add up to the rows"):
        on_ranks(
            lambda rank, group: collectives.all_to_all_(
                torch.empty(3), torch.ones(3), group, splits
            )
        )


def test_a_ring_passes_each_tensor_to_the_next_rank_and_counts_it():
    given = pieces((4, 2))

    def turn(rank, group):
        following, previous = (rank + 1) % RANKS, (rank - 1) % RANKS
        held, seen = given[rank].t(), [given[rank].t()]  # not contiguous
        for _ in range(RANKS - 1):
            got = torch.empty(2, 4)
            collectives.exchange(
                [(held, following)], [(got, previous)], group, async_op=True
            ).wait()
            held = got
            seen.append(got)
        return seen, dict(group.traffic.bytes), dict(group.traffic.calls)

    for rank, (seen, counted, calls) in enumerate(on_ranks(turn)):
        assert all(
            torch.equal(t, given[(rank - i) % RANKS].t()) for i, t in enumerate(seen)
        )
        assert counted == {("send", "tp", 3): 64} and calls == {("send", "tp", 3): 2}


def test_an_exchange_may_have_other_numbers_of_sends_and_receives_on_each_rank():
    def scatter(rank, group):
        got = torch.empty(2)
        sends = (
            [(torch.full((2,), 10.0 * peer), peer) for peer in (1, 2)]
            if rank == 0
            else []
        )
        collectives.exchange(sends, [] if rank == 0 else [(got, 0)], group)
        return None if rank == 0 else got.tolist()

    assert on_ranks(scatter) == [None, [10.0, 10.0], [20.0, 20.0]]


def test_an_exchange_with_oneself_is_a_copy_in_a_group_of_one_and_refused_in_others():
    out = torch.zeros(3)
    collectives.exchange([(torch.ones(3), 0)], [(out, 0)], solo())
    assert out.tolist() == [1.0] * 3
    with pytest.raises(LayoutError, match="with itself"):
        on_ranks(lambda rank, group: collectives.exchange([(out, rank)], [], group))


def test_broadcast_copies_the_position_in_the_group_not_the_global_rank():
    tensors = pieces((3,), 4)
    expected = tensors[2].clone()

    def copy(rank, world):
        if rank > 0:
            collectives.broadcast_(
                tensors[rank], world.group("tp", (1, 2, 3), rank), source=1
            )

    run_ranks(4, copy)
    assert all(torch.equal(t, expected) for t in tensors[1:])


def test_objects_come_in_group_order():
    for got in on_ranks(
        lambda rank, group: collectives.all_gather_object({"rank": rank}, group)
    ):
        assert got == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_a_dimension_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(LayoutError, match=r"dimension 1 .* \[3, 7\] .* size 3"):
        on_ranks(lambda rank, group: collectives.shard(torch.zeros(3, 7), group, dim=1))


def test_a_group_of_one_returns_its_input():
    x, group = torch.ones(7, 2), solo()
    assert collectives.all_gather(x, group) is x
    assert collectives.reduce_scatter(x, group) is x
    assert collectives.shard(x, group) is x
    collectives.all_reduce_(x, group).wait()
    collectives.broadcast_(x, group)
    collectives.barrier(group)
    out = torch.zeros(14)
    collectives.reduce_scatter_into_(out, x.view(-1), group)
    assert torch.equal(x, torch.ones(7, 2)) and torch.equal(out, torch.ones(14))
    assert not group.traffic.calls


def test_traffic_counts_payload_bytes_and_what_a_ring_sends():
    def talk(rank, world):
        group = world.group("dp-cp", range(4), rank)
        collectives.all_reduce_(torch.zeros(10), group)
        collectives.all_reduce_(torch.zeros(6), group)
        collectives.all_gather(torch.zeros(5, dtype=torch.bfloat16), group)
        collectives.reduce_scatter(torch.zeros(8), group)
        return group.traffic

    for traffic in run_ranks(4, talk):
        assert traffic.bytes == {
            ("all_reduce", "dp-cp", 4): 64,
            ("all_gather", "dp-cp", 4): 40,
            ("reduce_scatter", "dp-cp", 4): 32,
        }
        assert traffic.calls["all_reduce", "dp-cp", 4] == 2
        assert traffic.wire_bytes()["all_reduce", "dp-cp", 4] == 64 * 1.5
        assert traffic.wire_bytes()["all_gather", "dp-cp", 4] == 40 * 0.75
