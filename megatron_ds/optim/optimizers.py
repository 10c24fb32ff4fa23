"""The table of inner optimizers: from parameter groups and the optimizer's section of the config to a torch optimizer.

`ZeroOptimizer` calls an entry with groups {"params": [1-D fp32 tensors], "decay": bool} and sets "lr" and "weight_decay" of
each group before every step. An entry must treat elements one by one (a tensor may be a part of a parameter) and keep state
tensors as long as the parameter, plus at most a count named "step". One that needs whole tensors (a matrix at a time) says so
by an attribute, `needs_whole_tensors = True`, and is then refused from ZeRO stage 1 on.
"""

import logging
from collections.abc import Callable

import torch

from ..ops.adam import extension
from ..registry import Registry
from .cpu_adam import CpuAdamW

logger = logging.getLogger(__name__)

OPTIMIZERS: Registry[Callable[..., torch.optim.Optimizer]] = Registry("optimizer")


@OPTIMIZERS.register("adam", "adamw")
def adam(groups: list[dict], settings) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), as Megatron's "adam".

    fp32 masters on the CPU go to our own kernel, if it was compiled.
    """
    options = dict(lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for group in groups for p in group["params"])
    return CpuAdamW(groups, **options) if on_cpu and extension() else _fused(torch.optim.AdamW, groups, **options)


@OPTIMIZERS.register("sgd")
def sgd(groups: list[dict], settings) -> torch.optim.Optimizer:
    """Momentum 0.9 unless `settings.sgd_momentum` says otherwise; weight decay is added to the gradient."""
    return _fused(torch.optim.SGD, groups, lr=0.0, momentum=getattr(settings, "sgd_momentum", 0.9))


def _fused(kind: type, groups: list[dict], **options) -> torch.optim.Optimizer:
    """One kernel over all tensors that reads and writes memory once; torch's multi-tensor path where the device has none."""
    try:
        return kind(groups, fused=True, **options)
    except RuntimeError as reason:
        logger.warning("%s runs unfused: %s", kind.__name__, reason)
        return kind(groups, foreach=True, **options)
