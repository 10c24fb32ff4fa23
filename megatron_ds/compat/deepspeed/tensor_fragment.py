"""`deepspeed.utils.tensor_fragment`: whole gradients, fp32 weights and optimizer states of an engine's
parameters at every ZeRO stage, read and set.

    engine.backward(loss)
    grad = safe_get_full_grad(p)                # fp32, the mean over ranks, without the loss scale
    safe_set_full_grad(p, grad / 2)             # engine.step() applies it
    momentum = safe_get_full_optimizer_state(p, "exp_avg")

All ranks call a function for the same parameters in the same order. Values that are set must be the same on
all ranks. A parameter that belongs to no engine has its own `grad` and no fp32 copy (None).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ... import foreign_name
from ...errors import CallError
from ..engine import local_parts


def __getattr__(name: str) -> Any:
    return foreign_name("megatron_ds.utils.tensor_fragment", name)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient in fp32; None where there is none yet, or the parameter is frozen.

    Where ranks hold whole gradients it is a view: between micro-batches the sum of this rank so far.
    """
    engine = _engine_of(param)
    return param.grad if engine is None else engine.gradients.full(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient that the next `engine.step()` applies."""
    engine = _engine_of(param)
    if engine is not None:
        engine.gradients.set_full(param, value)
    elif param.grad is None:
        raise CallError(
            "the parameter has no gradient to set: no backward has reached it. Call backward first."
        )
    else:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace the gradient of each trained parameter by update_func(gradient, parameter)."""
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole weight in fp32: the master of a 16-bit parameter. None of a frozen one."""
    engine = _engine_of(param)
    if engine is None or not engine.gradients.is_trained(param):
        return None
    return engine.gradients.full_state(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the weight in fp32, and with it the one that the module computes with."""
    if (engine := _engine_of(param)) is not None:
        engine.gradients.set_full_state(param, value)


def safe_get_full_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return the whole state of the optimizer under a name such as "exp_avg"; None of a frozen parameter.

    Raises ConfigError for another name.
    """
    engine = _engine_of(param)
    if engine is None or not engine.gradients.is_trained(param):
        return None
    return engine.gradients.full_state(param, optim_state_key)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replace a state of the optimizer."""
    if (engine := _engine_of(param)) is not None:
        engine.gradients.set_full_state(param, value, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the part of the gradient that this rank keeps, flat and in fp32 (engine/local_parts.py)."""
    engine = _engine_of(param)
    return None if engine is None else local_parts.local_gradient(engine, param)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient that the next `engine.step()` applies."""
    if (engine := _engine_of(param)) is not None:
        local_parts.set_local_gradient(engine, param, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the weight in fp32, flat; None of a frozen parameter."""
    engine = _engine_of(param)
    return None if engine is None else local_parts.local_state(engine, param)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the weight in fp32."""
    if (engine := _engine_of(param)) is not None:
        local_parts.set_local_state(engine, param, value)


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """This rank's part of a state of the optimizer, flat; None of a frozen parameter."""
    engine = _engine_of(param)
    if engine is None:
        return None
    return local_parts.local_state(engine, param, optim_state_key)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replace this rank's part of a state of the optimizer."""
    if (engine := _engine_of(param)) is not None:
        local_parts.set_local_state(engine, param, value, optim_state_key)


def _engine_of(param: nn.Parameter) -> Any | None:
    return getattr(param, "engine", lambda: None)()
