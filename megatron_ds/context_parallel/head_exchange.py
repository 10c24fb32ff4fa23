"""Ulysses: each rank has all tokens of some of the heads during attention (Jacobs et al. 2023,
arXiv:2309.14509).

    q, k, v   [s/c, b, n, d]  ── all-to-all ──  [s, b, n/c, d] ── attention ── [s, b, n/c, d] ── all-to-all ──
    out       [s/c, b, n, d]

With fewer key-value heads than ranks, each rank receives the one head that its query heads read, so several
ranks receive the same one and their gradients of it are summed by its owners: max(g, c) heads are sent.

The output in the order of heads is not kept where attention can take D = rowsum(dO ∘ O) in its place
(`ToTokens.of_rows`): ranks compute D of their tokens, and exchange it for that of their heads with dO.

Letters: s positions, b samples, n query heads, g key-value heads, d channels, c ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from ..mpu.collectives import all_to_all_
from ..mpu.group import Group
from ..ops.attention_kernel import row_dots
from ..ops.widened_products import WORKSPACE


def to_heads(
    tensors: tuple[torch.Tensor, ...], group: Group, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Tensors [s/c, b, heads, d] of the rank's tokens → [s, b, heads/c, d] of its heads.

    heads must be a multiple of the ranks. order: positions of the tokens in the order of the ranks, None if
    ascending. One all-to-all of each tensor, and one in backward.
    """
    return _ToHeads.apply(group, order, *tensors)


def to_tokens(
    out: torch.Tensor, group: Group, order: torch.Tensor | None = None
) -> torch.Tensor:
    """[s, b, heads/c, d] of the rank's heads → [s/c, b, heads, d] of its tokens, as before `to_heads`."""
    return _ToTokens.apply(group, order, out)


@dataclass(frozen=True)
class ToTokens:
    """`to_tokens` as an `ops.core_attention.OutputExchange`."""

    group: Group
    order: torch.Tensor | None = None

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        """[s, b, heads/c, d] → [s/c, b, heads, d]."""
        return to_tokens(out, self.group, self.order)

    def of_rows(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Return the same; the gradient of lse, fp32 [b, heads/c, s], is D = rowsum(dO ∘ O). Collective."""
        return _KeptByToken.apply(self.group, self.order, out, lse)


def spread_groups(t: torch.Tensor, ranks: int) -> torch.Tensor:
    """[s, b, g, d] → [s, b, max(g, ranks), d]: each rank has a head to receive. g divides ranks or is a
    multiple of it."""
    groups = t.shape[2]
    return t if groups >= ranks else t.repeat_interleave(ranks // groups, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order, *tensors):
        ctx.group = group
        ctx.order = order
        return _divide_heads(tensors, group, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, *_divide_tokens(gradients, ctx.group, ctx.order)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, order, out):
        ctx.group = group
        ctx.order = order
        return _divide_tokens((out,), group, order)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, None, _divide_heads((gradient,), ctx.group, ctx.order)[0]


class _KeptByToken(torch.autograd.Function):
    # Ends before the backward of attention begins: its output and that gradient are freed then.

    @staticmethod
    def forward(ctx, group, order, out, lse):
        ctx.group = group
        ctx.order = order
        (result,) = _divide_tokens((out,), group, order)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        by_token = (
            row_dots(gradient, out).permute(2, 0, 1).unsqueeze(-1)
        )  # [s/c, b, heads, 1]
        (dout,), (dots,) = (
            _divide_heads((t,), ctx.group, ctx.order) for t in (gradient, by_token)
        )
        return None, None, dout, dots.squeeze(-1).permute(1, 2, 0)


# Note: memory. Tensors are exchanged one by one, through a buffer for one of them, which is in the workspace
# on a CPU: a heap that keeps freed memory would have holes where buffers were, between tensors that backward
# keeps. Results are one allocation.


def _divide_heads(
    tensors: Sequence[torch.Tensor], group: Group, order: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """[s/c, b, heads, d] → [s, b, heads/c, d]. One copy to pack each, one more if an order is given."""
    shapes = [
        (group.size * s, b, heads // group.size, d)
        for s, b, heads, d in (t.shape for t in tensors)
    ]
    results = _together(tensors[0], shapes)
    for t, result in zip(tensors, results, strict=True):
        parts = t.unflatten(2, (group.size, -1)).permute(
            2, 0, 1, 3, 4
        )  # [c, s/c, b, h/c, d]
        packed = _buffer(t, parts.shape).copy_(parts)
        received = result if order is None else torch.empty_like(result)
        all_to_all_(received.view(-1), packed.view(-1), group)
        if order is not None:
            torch.index_select(received, 0, order.argsort(), out=result)
    return results


def _divide_tokens(
    tensors: Sequence[torch.Tensor], group: Group, order: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """[s, b, heads/c, d] → [s/c, b, heads, d]: the inverse of `_divide_heads`."""
    shapes = [
        (s // group.size, b, group.size * heads, d)
        for s, b, heads, d in (t.shape for t in tensors)
    ]
    results = _together(tensors[0], shapes)
    for t, result in zip(tensors, results, strict=True):
        packed = t.contiguous() if order is None else t.index_select(0, order)
        received = _buffer(packed, packed.shape)
        all_to_all_(received.view(-1), packed.view(-1), group)
        parts = received.unflatten(0, (group.size, -1)).permute(
            1, 2, 0, 3, 4
        )  # [s/c, b, c, h/c, d]
        result.unflatten(2, (group.size, -1)).copy_(parts)
    return results


def _together(
    like: torch.Tensor, shapes: Sequence[tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors of these shapes in one allocation, each contiguous."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = like.new_empty(sum(sizes)).split(sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _buffer(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialised, until the next one is asked for."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    numel = math.prod(shape)
    memory = WORKSPACE.take("exchange of heads", -(-numel * like.element_size() // 4))
    return memory.view(like.dtype)[:numel].view(shape)
