"""The optimizer "sgd": torch's stochastic gradient descent with momentum."""

import torch

from ..config import OptimizerConfig
from .optimizers import OPTIMIZERS, fused


@OPTIMIZERS.register("sgd")
def sgd(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """b ← μ b + g, p ← p - lr b (Sutskever et al. 2013, without their Nesterov form), torch's fused kernel.

    Weight decay is added to the gradient. μ: `settings.sgd_momentum`; without it there is no state.
    """
    return fused(torch.optim.SGD, groups, lr=0.0, momentum=settings.sgd_momentum)
