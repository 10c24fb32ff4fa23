"""A function of single tokens, applied to a long sequence tile by tile.

    forward    each tile of x [s(/t), b, h]: y = f(x), without a graph
    backward   each tile: f again, with a graph; dx, and the tile's share of the parameters' gradients

What f keeps for backward, such as the 4 h numbers of a feed-forward, exists for one tile at a time; x alone
waits. The price is a second forward of f (Bekman et al. 2025, arXiv:2506.13996, section 3.1.1).

Inside a recomputed block nothing is computed a third time: recomputation ends with the last tensor that the
graph kept, which is x (`_Keep`), before the tiles run forward.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from ..pipeline.backward import Root
from ..tensor_parallel.weight_grad import gradient_sums

OfTokens = Callable[[torch.Tensor], torch.Tensor]


def number_of_tiles(asked: int, tokens: int, hidden: int) -> int:
    """Tiles of a sequence: as many as asked for, at most one a token; 0 asks for tiles of `hidden` tokens."""
    return max(1, min(asked or -(-tokens // hidden), tokens))


def in_tiles(
    function: OfTokens, x: torch.Tensor, parameters: Sequence[torch.Tensor], tiles: int
) -> torch.Tensor:
    """function(x), x [s(/t), b, h] → the same shape, in at most `tiles` parts of the first dim.

    parameters: those that the function reads. Each receives one gradient, the sum over the tiles. Collectives
    of the function run once for each tile, forward and backward; all ranks must have equal lengths.
    """
    if tiles == 1:
        return function(x)
    if torch.compiler.is_compiling():
        from ..tensor_parallel.outside_graphs import call_outside_graphs

        return call_outside_graphs(_in_tiles, function, x, parameters, tiles)
    return _in_tiles(function, x, parameters, tiles)


def _in_tiles(
    function: OfTokens, x: torch.Tensor, parameters: Sequence[torch.Tensor], tiles: int
) -> torch.Tensor:
    if (
        not x.requires_grad
    ):  # frozen layers before this one; without gradients nothing is kept at all
        return _Tiles.apply(x, None, function, tiles, *parameters)
    x = _Keep.apply(x)
    return _Tiles.apply(x, x.grad_fn, function, tiles, *parameters)


class _Keep(torch.autograd.Function):
    # Keeps x for the backward of `_Tiles`, from before its forward on.

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keeper, function, tiles, *parameters):
        ctx.keeper = keeper
        ctx.function = function
        ctx.tiles = tiles
        ctx.parameters = parameters
        if keeper is None:
            ctx.save_for_backward(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in _rows(len(x), tiles):
            y[rows] = function(x[rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        [x] = (ctx.keeper or ctx).saved_tensors
        needs_dx = ctx.needs_input_grad[0]
        wanted = ctx.needs_input_grad[4:]
        dx = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if needs_dx
            else None
        )
        trained = [p for p, is_wanted in zip(ctx.parameters, wanted) if is_wanted]
        # Each tile runs forward again, and adds its part to the gradients.
        with gradient_sums(trained) as sums:
            for rows in _rows(len(x), ctx.tiles):
                part = x[rows].detach().requires_grad_(needs_dx)
                inputs = [part, *trained] if needs_dx else trained
                found = _gradients(ctx.function, part, inputs, dy[rows])
                if needs_dx:
                    dx[rows] = found.pop(0)
                for p, gradient in zip(trained, found):
                    sums.add(p, gradient)
        delivered = iter(sums.deliver())
        return (
            dx,
            None,
            None,
            None,
            *(next(delivered) if is_wanted else None for is_wanted in wanted),
        )


def _gradients(
    function: OfTokens,
    x: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    dy: torch.Tensor,
) -> list[torch.Tensor | None]:
    with torch.enable_grad():
        root = Root(function(x))
    root.give(dy)
    return list(torch.autograd.grad(root.edge, inputs, allow_unused=True))


def _rows(length: int, tiles: int) -> Iterator[slice]:
    each = -(-length // tiles)
    return (slice(start, start + each) for start in range(0, length, each))
