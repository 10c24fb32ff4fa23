"""`zero.TiledLinear` computes what one linear layer computes, and its tiles hold that layer's weight."""

import pytest
import torch
from torch import nn

from megatron_ds.errors import ConfigError
from megatron_ds.zero import (
    TiledLinear,
    TiledLinearReturnBias,
    split_tensor_along_last_dim,
)

pytestmark = pytest.mark.plan


class SkipBias(nn.Linear):
    """Returns the bias instead of adding it."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


def pair(bias=True, **options):
    """(a linear layer in float64, tiles with its values)"""
    whole = nn.Linear(7, 5, bias=bias).double()
    tiles = TiledLinear(7, 5, bias, init_linear=whole, dtype=torch.float64, **options)
    return whole, tiles


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (7, 5)])
def test_outputs_and_gradients_are_those_of_one_layer(splits, bias):
    whole, tiles = pair(bias, in_splits=splits[0], out_splits=splits[1])
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    # Sums of a row have another order of addition.
    torch.testing.assert_close(tiles(x), whole(other), rtol=1e-12, atol=1e-12)
    tiles(x).square().sum().backward()
    whole(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-12)
    grad = torch.cat(
        [torch.cat([t.weight.grad for t in row], 1) for row in tiles.linears]
    )
    torch.testing.assert_close(grad, whole.weight.grad, rtol=1e-12, atol=1e-12)


def test_only_the_last_tile_of_a_row_has_a_bias_and_parts_come_and_go_in_lists():
    whole, tiles = pair(
        in_splits=2, out_splits=3, input_is_already_split=True, combine_out_splits=False
    )
    assert [[t.bias is not None for t in row] for row in tiles.linears] == [
        [False, True]
    ] * 3
    assert tiles.in_parts == [0, 4, 7] and tiles.out_parts == [0, 2, 4, 5]
    x = torch.randn(4, 7, dtype=torch.float64)
    parts = tiles(split_tensor_along_last_dim(x, tiles.in_parts))
    assert [part.shape[-1] for part in parts] == [2, 2, 1]
    torch.testing.assert_close(torch.cat(parts, -1), whole(x), rtol=1e-12, atol=1e-12)


def test_layers_that_return_their_bias():
    whole = nn.Linear(6, 4)
    tiles = TiledLinearReturnBias(
        6, 4, in_splits=2, out_splits=2, linear_cls=SkipBias, init_linear=whole
    )
    x = torch.randn(3, 6)
    y, bias = tiles(x)
    assert torch.equal(bias, whole.bias)
    torch.testing.assert_close(y + bias, whole(x))


@pytest.mark.parametrize("splits", [0, 8])
def test_more_parts_than_elements_are_an_error(splits):
    with pytest.raises(
        ConfigError, match=f"in_splits={splits}: in_features=7"
    ) as found:
        TiledLinear(7, 5, in_splits=splits)
    assert isinstance(found.value, RuntimeError)
