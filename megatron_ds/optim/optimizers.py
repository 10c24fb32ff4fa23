"""The registry of optimizers: functions from parameter groups and `OptimizerConfig` to a torch optimizer.

An entry receives groups {"params": [fp32 tensors], "decay": bool, "lr_factor": float}; "lr" and
"weight_decay" of each group are set before every step. Its state tensors have as many elements as the
parameter, apart from a count named "step".

By default an entry must treat elements one by one: its tensors are flat and may be parts of parameters. An
entry that needs whole matrices has the attribute `needs_whole_tensors = True`; one that needs norms of whole
parameters has `needs_norms = True`; one that chooses its parameter groups has `param_groups`
(param_groups.py).
"""

import logging
from collections.abc import Callable

import torch

from ..config import OptimizerConfig
from ..ops.adam import extension
from ..registry import Registry
from .cpu_adam import CpuAdamW

logger = logging.getLogger(__name__)

OPTIMIZERS: Registry[Callable[..., torch.optim.Optimizer]] = Registry("optimizer")


@OPTIMIZERS.register("adam", "adamw")
def adam(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), as
    Megatron's "adam".

    fp32 masters on the CPU are updated by the kernel of this package if it was compiled.
    """
    options = dict(lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32
                 for group in groups for p in group["params"])
    if on_cpu and extension():
        return CpuAdamW(groups, **options)
    return _fused(torch.optim.AdamW, groups, **options)


@OPTIMIZERS.register("sgd")
def sgd(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Momentum 0.9 unless `settings.sgd_momentum` gives another; weight decay is added to the gradient."""
    return _fused(torch.optim.SGD, groups, lr=0.0, momentum=getattr(settings, "sgd_momentum", 0.9))


def _fused(kind: type, groups: list[dict], **options) -> torch.optim.Optimizer:
    """One kernel over all tensors; torch's multi-tensor implementation if the device has no fused one."""
    try:
        return kind(groups, fused=True, **options)
    except RuntimeError as reason:
        logger.warning("%s runs unfused: %s", kind.__name__, reason)
        return kind(groups, foreach=True, **options)
