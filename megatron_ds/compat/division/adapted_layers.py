"""The plan of a model with adapters of peft: that of the model without them, and of the factors of each adapted layer.

    y = W x + s B A x        W [outputs, inputs], A [r, inputs], B [outputs, r]

    style of the layer      W           A                        B
    colwise                 outputs     whole                    outputs, after "enter" (split_layers.py)
    rowwise                 inputs      inputs, then the sum     whole

So A x, r numbers of a token, is whole on every rank. Hu et al. 2021 (arXiv:2106.09685), section 4.1. A module of
`modules_to_save` is divided as the one of which it is a copy.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import ConfigError
from .split_layers import layers_in
from .split_plan import (
    BASE,
    COLUMN,
    GATHERED,
    Division,
    adapted_base,
    is_linear,
    plan_of,
)

KEY = "tensor_parallel.partition_config"
# Attributes in which peft's wrapper keeps the original of a module, and its trained copies.
ORIGINAL = "original_module"
COPIES = "modules_to_save"
ADVICE = "Divide the model without it, or give a tensor-parallel size of 1."


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has changed the model."""
    return bool(getattr(model, "peft_config", None))


def division_of_adapted(model: nn.Module, given: Any, ranks: int) -> Division:
    """Return the plan of a model with adapters. Raises ConfigError for adapters other than LoRA.

    given  the value of "partition_config", which must be None
    """
    _check(model, given)
    # The names of the model without adapters, and where it is.
    own = getattr(model, "get_base_model", lambda: model)()
    at = next(name for name, module in model.named_modules() if module is own)
    prefix = f"{at}." if at else ""
    modules = dict(own.named_modules())
    plan = {}
    packed = {}
    for name, style in plan_of(own, None, ranks).items():
        parts = layers_in(name)
        for part, of_part in _parts(name, modules.get(name), style):
            plan[f"{prefix}{part}"] = of_part
            if parts > 1:
                packed[f"{prefix}{part}"] = parts
    return Division(plan, packed)


def _parts(
    name: str, module: nn.Module | None, style: str
) -> Iterator[tuple[str, str]]:
    """Yield (name, style) of the layers that take the place of one of the plan. Raises ConfigError."""
    if module is None:
        yield name, style
        return
    base = adapted_base(module)
    if ORIGINAL in module._modules:
        yield f"{name}.{ORIGINAL}", style
        for copy in _inside(module, COPIES):
            yield f"{name}.{COPIES}.{copy}", style
    elif base is None:
        yield name, style
    elif is_linear(base):
        yield f"{name}.{BASE}", style
        factor = "lora_B" if style in (COLUMN, GATHERED) else "lora_A"
        for adapter in _inside(module, factor):
            yield f"{name}.{factor}.{adapter}", style
    else:
        raise ConfigError(
            f"{name} is {type(base).__name__} with an adapter, not a linear layer, so tensor parallelism cannot divide "
            f"the adapter. {ADVICE}"
        )


def _inside(module: nn.Module, name: str) -> list[str]:
    return list(module.get_submodule(name)._modules)


def _check(model: nn.Module, given: Any) -> None:
    kind = type(model).__name__
    for name, config in dict(model.peft_config).items():  # type: ignore[arg-type]  # has_adapters
        peft_type = getattr(config, "peft_type", None)
        if peft_type != "LORA":
            raise ConfigError(
                f"{kind} has the adapter {name!r} of peft's kind {peft_type}; tensor parallelism divides LoRA alone. "
                f"{ADVICE}"
            )
    for name, module in model.named_modules():
        if variants := getattr(module, "lora_variant", None):
            found = ", ".join(type(variant).__name__ for variant in variants.values())
            raise ConfigError(
                f"{name} has a variant of LoRA ({found}), such as DoRA, whose adapter tensor parallelism cannot "
                f"divide. {ADVICE}"
            )
    if given is not None:
        raise ConfigError(
            f'"{KEY}" has names of layers, of which {kind} has others by its adapters. Leave it out.'
        )
