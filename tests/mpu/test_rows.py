"""Rows of unequal numbers between ranks: values and gradients of a plain concatenation, in any numbers,
zeros included."""

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.mpu.rows import (
    Waiting,
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
)
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

WIDTH = 3
# TABLES[name][i][j]: rows that rank i sends rank j.
TABLES = {
    "even": [[2, 2], [2, 2]],
    "uneven": [[1, 4, 0], [0, 0, 3], [2, 5, 1]],
    "a rank sends nothing": [[0, 0, 0], [3, 1, 2], [1, 0, 4]],
    "a rank receives nothing": [[1, 0, 2], [3, 0, 2], [1, 0, 4]],
    "nothing at all": [[0, 0], [0, 0]],
    "only to itself": [[3, 0], [0, 2]],
}
COUNTS = [(2, 2), (3, 0, 1), (0, 5), (0, 0), (4, 1, 2, 0)]


def rows_of(rank, count, dtype=torch.float64):
    return torch.randn(
        count, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=dtype
    )


def on_ranks(size, function):
    return run_ranks(
        size,
        lambda rank, world: function(rank, world.group("ep", tuple(range(size)), rank)),
    )


def differentiated(move, x, seed):
    """(result, gradient of x), for a gradient of the result that depends on `seed`."""
    x = x.clone().requires_grad_()
    y = move(x)
    (gradient,) = torch.autograd.grad(y, x, rows_of(seed, len(y), y.dtype))
    return y.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_an_all_to_all_delivers_every_row_and_its_gradient(name, waits, dtype):
    table = TABLES[name]
    n = len(table)

    def main(rank, group):
        def move(x):
            waiting = Waiting() if waits else None
            y = all_to_all_rows(
                x, table[rank], [row[rank] for row in table], group, waiting
            )
            for _ in range(2 if waits else 0):
                waiting.wait()
            return y

        return differentiated(
            move, rows_of(rank, sum(table[rank]), dtype), seed=100 + rank
        )

    results = on_ranks(n, main)
    sent = [rows_of(i, sum(table[i]), dtype).split(table[i]) for i in range(n)]
    arriving = [[row[j] for row in table] for j in range(n)]
    back = [
        rows_of(100 + j, sum(arriving[j]), dtype).split(arriving[j]) for j in range(n)
    ]
    for rank, (y, gradient) in enumerate(results):
        assert torch.equal(y, torch.cat([sent[i][rank] for i in range(n)]))
        assert torch.equal(gradient, torch.cat([back[j][rank] for j in range(n)]))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_gather_concatenates_and_sums_the_gradients(counts):
    n, total = len(counts), sum(counts)
    results = on_ranks(
        n,
        lambda rank, group: differentiated(
            lambda x: all_gather_rows(x, counts, group),
            rows_of(rank, counts[rank]),
            seed=100 + rank,
        ),
    )
    whole = torch.cat([rows_of(i, counts[i]) for i in range(n)])
    summed = sum(rows_of(100 + i, total) for i in range(n)).split(list(counts))
    for rank, (y, gradient) in enumerate(results):
        assert torch.equal(y, whole) and y.shape == (total, WIDTH)
        torch.testing.assert_close(gradient, summed[rank], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_reduce_scatter_sums_and_gathers_the_gradients(counts):
    n, total = len(counts), sum(counts)
    results = on_ranks(
        n,
        lambda rank, group: differentiated(
            lambda x: reduce_scatter_rows(x, counts, group),
            rows_of(rank, total),
            seed=100 + rank,
        ),
    )
    summed = sum(rows_of(i, total) for i in range(n)).split(list(counts))
    whole = torch.cat([rows_of(100 + i, counts[i]) for i in range(n)])
    for rank, (y, gradient) in enumerate(results):
        torch.testing.assert_close(y, summed[rank], rtol=1e-14, atol=1e-14)
        assert torch.equal(gradient, whole)


def test_sums_are_added_in_the_order_of_the_ranks():
    """1 is lost when it is added to 1e20 first, and only then."""
    values = torch.tensor([1e20, 1.0, -1e20], dtype=torch.float32)
    results = on_ranks(
        3,
        lambda rank, group: reduce_scatter_rows(
            values[rank].expand(3, 1).contiguous(), (1, 1, 1), group
        ),
    )
    assert [y.item() for y in results] == [0.0] * 3
    values = torch.tensor([1e20, -1e20, 1.0], dtype=torch.float32)
    results = on_ranks(
        3,
        lambda rank, group: reduce_scatter_rows(
            values[rank].expand(3, 1).contiguous(), (1, 1, 1), group
        ),
    )
    assert [y.item() for y in results] == [1.0] * 3


def test_a_gather_is_the_adjoint_of_a_reduce_scatter_and_a_group_of_one_moves_nothing():
    counts = (3, 0, 1)

    def main(rank, group):
        x, y = rows_of(rank, counts[rank]), rows_of(50 + rank, sum(counts))
        gathered, scattered = (
            all_gather_rows(x, counts, group),
            reduce_scatter_rows(y, counts, group),
        )
        return (gathered * y).sum(), (x * scattered).sum()

    left, right = (torch.stack(sums).sum() for sums in zip(*on_ranks(3, main)))
    torch.testing.assert_close(left, right, rtol=1e-13, atol=0)

    def alone(rank, group):
        x = rows_of(0, 4)
        waiting = Waiting()
        moved = (
            all_to_all_rows(x, [4], [4], group, waiting),
            all_gather_rows(x, [4], group),
            reduce_scatter_rows(x, [4], group),
        )
        waiting.wait()
        return all(y is x for y in moved) and not group.traffic.bytes

    assert on_ranks(1, alone) == [True]


def test_numbers_that_do_not_add_up_are_an_error():
    def main(rank, group):
        with pytest.raises(
            LayoutError, match="splits \\[1, 1\\] of the 3 rows to be sent"
        ):
            all_to_all_rows(rows_of(rank, 3), [1, 1], [1, 1], group)
        return True

    assert on_ranks(2, main) == [True, True]


def test_the_bytes_counted_are_those_of_the_rows_that_leave_a_rank():
    table, counts = TABLES["uneven"], (3, 0, 1)

    def main(rank, group):
        x = rows_of(rank, sum(table[rank])).requires_grad_()
        y = all_to_all_rows(x, table[rank], [row[rank] for row in table], group)
        forward = group.traffic.bytes["all_to_all_v", "ep", 3]
        y.sum().backward()
        group.traffic.clear()
        all_gather_rows(rows_of(rank, counts[rank]), counts, group)
        gathered = sum(group.traffic.bytes.values())
        group.traffic.clear()
        reduce_scatter_rows(rows_of(rank, sum(counts)), counts, group)
        return forward, gathered, sum(group.traffic.bytes.values())

    row = WIDTH * 8
    for rank, (forward, gathered, scattered) in enumerate(on_ranks(3, main)):
        assert forward == row * (sum(table[rank]) - table[rank][rank])
        assert gathered == row * counts[rank] * 2
        assert scattered == row * (sum(counts) - counts[rank])
