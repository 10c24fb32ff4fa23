"""Logits that are bounded smoothly: cap tanh(logits / cap) (Gemma Team 2024, arXiv:2408.00118, section 2).

The gradient is multiplied by 1 - tanh². The loss overwrites the logits that it gets, so `capped` keeps the
hyperbolic tangents in the memory of the logits before the cap, which nothing else needs.
"""

import torch
from torch.autograd.function import once_differentiable


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap tanh(logits / cap), a tensor of its own. Overwrites the logits."""
    return _Capped.apply(logits, cap)


def cap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Overwrite logits by cap tanh(logits / cap), without gradients. Returns them."""
    return logits.div_(cap).tanh_().mul_(cap)


def slope_of(capped_logits: torch.Tensor, cap: float) -> torch.Tensor:
    """1 - tanh², the derivative, of values that `cap_` returned."""
    return capped_logits.div(cap).square_().neg_().add_(1)


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, cap):
        tangents = logits.detach().div_(cap).tanh_()
        ctx.save_for_backward(tangents)
        return tangents * cap

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogits):
        (tangents,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(dlogits, tangents), None
