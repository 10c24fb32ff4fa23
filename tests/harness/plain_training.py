"""Training by torch alone, in one process: what an engine's training is compared with."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn


def train_plainly(
    module: nn.Module,
    loss_of: Callable[[nn.Module, object], torch.Tensor],
    steps: Sequence[Sequence],
    *,
    lr: float | Callable[[int], float],
    clip: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    decays=None,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """AdamW on the mean loss of each step's micro-batches, with fp32 masters; the gradient norms of all
    steps.

    A parameter without a gradient counts as one with gradient zero. The module ends in `dtype`, holding the
    rounded masters.
    """
    module.to(dtype)
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float().clone()) for _, p in trained]
    groups = [
        {
            "params": [m],
            "weight_decay": weight_decay if decays is None or decays(n, p) else 0.0,
        }
        for m, (n, p) in zip(masters, trained)
    ]
    adam, norms = torch.optim.AdamW(groups, lr=1.0, eps=eps, foreach=False), []
    for step, microbatches in enumerate(steps):
        total = [torch.zeros_like(m) for m in masters]
        for batch in microbatches:
            module.zero_grad()
            loss_of(module, batch).float().backward()
            for t, (_, p) in zip(total, trained):
                t += 0.0 if p.grad is None else p.grad.float() / len(microbatches)
        for m, t in zip(masters, total):
            m.grad = t
        norms.append(nn.utils.clip_grad_norm_(masters, clip or math.inf).item())
        for group in adam.param_groups:
            group["lr"] = lr(step) if callable(lr) else lr
        adam.step()
        with torch.no_grad():
            for m, (_, p) in zip(masters, trained):
                p.copy_(m)
    module.zero_grad()
    return norms
