"""The optimizer "adam": which implementation makes the updates that the configuration asks for."""

from typing import Any

import torch

from ..config import OptimizerConfig
from .optimizers import OPTIMIZERS, fused
from .row_adamw import RowAdamW, has_kernel
from .variant_adam import VariantAdam


@OPTIMIZERS.register("adam", "adamw")
def adam(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Megatron's "adam": decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    fp32 masters are updated by a kernel of this package where the device has one, else by torch's fused one.
    AMSGrad (Reddi et al. 2018, arXiv:1904.09237, algorithm 2) is torch's.
    """
    options: dict[str, Any] = dict(
        lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps
    )
    corrects = settings.adam_bias_correction
    decoupled = settings.decoupled_weight_decay
    if settings.adam_amsgrad:
        return fused(
            torch.optim.AdamW if decoupled else torch.optim.Adam,
            groups,
            amsgrad=True,
            **options,
        )
    if decoupled and has_kernel(groups):
        return RowAdamW(groups, **options, bias_correction=corrects)
    if not (corrects and decoupled):
        return VariantAdam(
            groups, **options, bias_correction=corrects, decoupled=decoupled
        )
    return fused(torch.optim.AdamW, groups, **options)
