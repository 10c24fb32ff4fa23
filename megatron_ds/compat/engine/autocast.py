"""Run the forward of an engine's module in torch.autocast, as "torch_autocast" of the JSON asks.

Parameters, gradients and the optimizer's state stay in fp32; torch chooses the operations that run in bf16.
"""

import torch
from torch import nn

from .watched import Hook


def run_in_autocast(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> None:
    """Make each call of the module enter autocast, also where its forward raises. Modifies its hooks.

    Autocast's cache of converted weights is off: it would keep weights that stage 3 has freed.
    """
    entered: list[torch.autocast] = []

    def enter(module: nn.Module, args: tuple) -> None:
        context = torch.autocast(device.type, dtype, cache_enabled=False)
        context.__enter__()
        entered.append(context)

    def leave(module: nn.Module, args: tuple, output: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(Hook(enter), prepend=True)
    module.register_forward_hook(Hook(leave), always_call=True)
