"""A `TokenLoss` of the logits of the last layer, whether these are whole or computed in chunks."""

import torch
from torch.autograd.function import once_differentiable

from ..ops.logits import row_parts
from .logits_in_chunks import LogitsInChunks
from .token_loss import TokenLoss

Logits = torch.Tensor | LogitsInChunks


def width_of(logits: Logits) -> int:
    """Return the columns of the vocabulary on this rank."""
    if isinstance(logits, torch.Tensor):
        return logits.shape[-1]
    return len(logits.weight)


def losses_of(logits: Logits, loss: TokenLoss) -> torch.Tensor:
    """logits [s, b, V'/t], which are overwritten → what `loss` has for each token, fp32 [r, s, b]."""
    if isinstance(logits, LogitsInChunks):
        return logits.losses(loss)
    return _InParts.apply(logits, loss)


class _InParts(torch.autograd.Function):
    """A `TokenLoss` of whole logits [s, b, V'/t] → fp32 [r, s, b], some rows at a time. Backward overwrites them."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, loss: TokenLoss):
        ctx.logits = logits.detach().flatten(0, -2)
        ctx.loss = loss
        ctx.shape = logits.shape
        losses = loss.of(row_parts(ctx.logits))
        return torch.ops.aten._unsafe_view(
            losses, (*losses.shape[:-1], *logits.shape[:-1])
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses: torch.Tensor):
        logits = ctx.logits
        ctx.logits = None
        assert logits is not None, (
            "the first backward overwrote the logits: run the forward again"
        )
        for _ in ctx.loss.gradients(row_parts(logits), dlosses.flatten(1)):
            pass
        return logits.view(ctx.shape), None
