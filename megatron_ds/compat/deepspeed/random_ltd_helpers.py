"""`convert_to_random_ltd` and `save_without_random_ltd`, of DeepSpeed's
`runtime.data_pipeline.data_routing.helper`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError

WRAPPER = ".random_ltd_layer"  # of DeepSpeed's names of parameters


def convert_to_random_ltd(
    model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]
) -> Any:
    """Let layers of an engine drop tokens, by the schedule of its JSON; returns the engine.

    model         what `initialize` returned
    convert_type  the class of the layers
    Raises ConfigError for a module without an engine, and where the JSON has no random-LTD.
    """
    if not hasattr(model, "random_ltd_initialize"):
        raise ConfigError(
            f"convert_to_random_ltd({type(model).__name__}): give the engine that initialize returned, whose config "
            "has the layers and the schedule."
        )
    layers = [
        module for module in model.module.modules() if isinstance(module, convert_type)
    ]
    model.random_ltd_initialize(layers)
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of an engine's module, or of a module, under the names that it has without random-LTD.

    At stage 3 call it inside of `engine.gathered_parameters()`.
    """
    module = getattr(model, "module", model)
    return remove_random_ltd_state_dict(module.state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that DeepSpeed's converted module has, under the names before the conversion."""
    return {name.replace(WRAPPER, ""): value for name, value in state_dict.items()}
