"""The parts of gradients, fp32 weights and optimizer states that this rank keeps, of an engine's parameters.

A part is a flat tensor: the elements of the parameter that this rank updates, in their order. Ranks may have
parts of different sizes, also empty ones. None stands for a frozen parameter.
"""

from collections.abc import Iterable

import torch
from torch import nn

from ...errors import ConfigError, MegatronDSError
from ...mpu.managed_parameter import spec_of
from .gradients import WEIGHT, Part
from .parts import EngineParts


def local_gradient(engine: EngineParts, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the part in fp32; None before a backward, too."""
    return _joined(engine.gradients.kept(parameter))


def set_local_gradient(
    engine: EngineParts, parameter: nn.Parameter, value: torch.Tensor
) -> None:
    """Replace the part of the gradient that the next step applies. Raises MegatronDSError if there is none."""
    parts = engine.gradients.kept(parameter)
    if parts is None:
        raise MegatronDSError(
            "there is no gradient to set: it exists between engine.backward(loss) and "
            "engine.step(), for parameters that are trained."
        )
    _fill(parts, value)


def local_state(
    engine: EngineParts, parameter: nn.Parameter, kind: str = WEIGHT
) -> torch.Tensor | None:
    """Return a copy of the part of a master ("weight") or of a state of the optimizer ("exp_avg", …)."""
    return _joined(_states(engine, parameter, kind))


@torch.no_grad()
def set_local_state(
    engine: EngineParts,
    parameter: nn.Parameter,
    value: torch.Tensor,
    kind: str = WEIGHT,
) -> None:
    """Replace the part of a master or state. Collective: ranks gather the weights again."""
    parts = _states(engine, parameter, kind)
    if parts is None:
        raise ConfigError(f"{spec_of(parameter).name} is frozen: it has no {kind}.")
    engine.zero.before_change()
    _fill(parts, value)
    engine.zero.after_load()


def _states(
    engine: EngineParts, parameter: nn.Parameter, kind: str
) -> list[Part] | None:
    if not engine.gradients.is_trained(parameter):
        return None
    try:
        return list(engine.gradients.states(parameter, kind))
    except KeyError:
        raise ConfigError(f"{spec_of(parameter).name} has no state {kind!r}.") from None


def _joined(parts: Iterable[Part] | None) -> torch.Tensor | None:
    if parts is None:
        return None
    tensors = [tensor.detach().float() for _, tensor in parts]
    return torch.cat(tensors) if tensors else torch.empty(0)


def _fill(parts: list[Part], value: torch.Tensor) -> None:
    size = sum(tensor.numel() for _, tensor in parts)
    if value.numel() != size:
        raise ConfigError(
            f"a value of {value.numel()} elements for a part of {size}. Give the rank's part as "
            "the function that reads it returns it."
        )
    flat = value.detach().reshape(-1)
    for _, tensor in parts:
        tensor.copy_(flat[: tensor.numel()])
        flat = flat[tensor.numel() :]
