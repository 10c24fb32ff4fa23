"""Regions against the whole tensor in one process: the same function of the same input has the same
gradient."""

import pytest
import torch

from megatron_ds.errors import LayoutError
from megatron_ds.mpu import regions
from megatron_ds.mpu.group import solo
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

RANKS = 3


def drawn(*shape, seed=3):
    """Small integers: sums are exact in any order, so equality is to the last bit."""
    return torch.randint(
        -5, 6, shape, generator=torch.Generator().manual_seed(seed)
    ).double()


def on_ranks(function, count=RANKS):
    return run_ranks(
        count, lambda rank, world: function(rank, world.group("tp", range(count), rank))
    )


def leaf(x):
    return x.clone().requires_grad_()


def test_copy_region_sums_the_gradients_of_what_the_ranks_do():
    x, weights = drawn(4, 5), drawn(RANKS, 4, 5, seed=4)

    def enter(rank, group):
        mine = leaf(x)
        out = regions.copy_to_region(mine, group)
        (out * weights[rank]).sum().backward()
        return out.detach(), mine.grad

    for out, grad in on_ranks(enter):
        assert torch.equal(out, x) and torch.equal(grad, weights.sum(0))


def test_reduce_region_sums_and_passes_the_gradient_on():
    parts, weight = drawn(RANKS, 4, 5), drawn(4, 5, seed=4)

    def leave(rank, group):
        mine = leaf(parts[rank])
        out = regions.reduce_from_region(mine, group)
        (out * weight).sum().backward()
        assert torch.equal(mine.detach(), parts[rank])  # the input is not overwritten
        return out.detach(), mine.grad

    for out, grad in on_ranks(leave):
        assert torch.equal(out, parts.sum(0)) and torch.equal(grad, weight)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_then_gather_is_the_identity_in_both_directions(dim):
    x, weight = drawn(6, 9, 3), drawn(6, 9, 3, seed=4)

    def there_and_back(rank, group):
        mine = leaf(x)
        piece = regions.scatter_to_region(mine, group, dim)
        out = regions.gather_from_region(piece, group, dim)
        (out * weight).sum().backward()
        return piece.detach(), out.detach(), mine.grad

    for rank, (piece, out, grad) in enumerate(on_ranks(there_and_back)):
        assert torch.equal(piece, x.chunk(RANKS, dim)[rank])
        assert torch.equal(out, x) and torch.equal(grad, weight)


def test_column_then_row_linear_through_sequence_regions_equals_one_process():
    """The use of Korthikanti et al.: gather, column-parallel, row-parallel, reduce-scatter."""
    x, w1, w2, weight = (
        drawn(6, 2, 4),
        drawn(9, 4, seed=4),
        drawn(5, 9, seed=5),
        drawn(6, 2, 5, seed=6),
    )
    whole = [leaf(t) for t in (x, w1, w2)]
    expected = whole[0] @ whole[1].t() @ whole[2].t()
    (expected * weight).sum().backward()

    def block(rank, group):
        x_slice, w1_rows, w2_columns = (
            leaf(x.chunk(RANKS)[rank]),
            leaf(w1.chunk(RANKS)[rank]),
            leaf(w2.chunk(RANKS, 1)[rank]),
        )
        hidden = regions.gather_from_sequence_region(x_slice, group) @ w1_rows.t()
        out = regions.reduce_scatter_to_sequence_region(hidden @ w2_columns.t(), group)
        (out * weight.chunk(RANKS)[rank]).sum().backward()
        return out.detach(), x_slice.grad, w1_rows.grad, w2_columns.grad

    out, dx, dw1, dw2 = zip(*on_ranks(block))
    assert torch.equal(torch.cat(out), expected.detach())
    assert torch.equal(torch.cat(dx), whole[0].grad)
    assert torch.equal(torch.cat(dw1), whole[1].grad) and torch.equal(
        torch.cat(dw2, dim=1), whole[2].grad
    )


def test_gathering_the_sequence_for_the_same_work_on_all_ranks_splits_the_gradient():
    x, weight = drawn(6, 2, 4), drawn(6, 2, 4, seed=4)

    def same_work(rank, group):
        mine = leaf(x)
        piece = regions.scatter_to_sequence_region(mine, group)
        out = regions.gather_from_sequence_region(piece, group, grad="split")
        (out * weight).sum().backward()
        return mine.grad

    for grad in on_ranks(same_work):
        assert torch.equal(grad, weight)


def test_gradients_that_are_not_contiguous_are_summed_right():
    x = drawn(4, 5)

    def enter(rank, group):
        mine = leaf(x)
        regions.copy_to_region(mine, group).t().sum(0).sum().backward()
        return mine.grad

    for grad in on_ranks(enter):
        assert torch.equal(grad, torch.full((4, 5), float(RANKS)).double())


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(LayoutError, match=r"\[7, 2\]"):
        on_ranks(
            lambda rank, group: regions.reduce_scatter_to_sequence_region(
                drawn(7, 2), group
            )
        )


def test_a_group_of_one_passes_everything_through():
    x, group = drawn(7, 2), solo()
    for region in (
        regions.copy_to_region,
        regions.reduce_from_region,
        regions.scatter_to_region,
        regions.gather_from_region,
        regions.scatter_to_sequence_region,
        regions.gather_from_sequence_region,
        regions.reduce_scatter_to_sequence_region,
    ):
        assert region(x, group) is x
