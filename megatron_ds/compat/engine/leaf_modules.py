"""Leaf modules: those that ZeRO stage 3 gathers as a whole, under DeepSpeed's names.

Ranks gather layers together, so all must call the same layers. Where each rank chooses among inner modules
(experts in a `ModuleList`), the module around them is marked as a leaf, before `initialize`:

    megatron_ds.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])

or by the JSON, whose entries are names of classes, with or without their module, and names of modules:

    "zero_optimization": {"leaf_module": {"classes": [...], "names": [...], "name_suffixes": [...]}}

All parameters inside are then gathered when the leaf is called and when its backward begins, and the
gradients of those that this rank has not used are zeros. At other stages the mark has no effect.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from .module_specs import LEAF

Kinds = Sequence[type[nn.Module] | str]
# Blocks of transformers with experts, which DeepSpeed 0.19.8 marks unless the JSON lists others.
DEFAULT_CLASSES = tuple(
    f"transformers.models.{family}.modeling_{family}.{name}SparseMoeBlock"
    for family, name in (
        ("mixtral", "Mixtral"),
        ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"),
    )
)
KEY = "zero_optimization.leaf_module"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Kinds, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes with these names; returns them."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Kinds, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes; returns them."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Set the marks of the modules of these names; returns (modules, names that no module has)."""
    return _mark_names(
        model, module_names, flag, raise_if_not_found, lambda name, given: name == given
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Set the marks of the modules whose names end so; returns (modules, endings that no name has)."""
    return _mark_names(
        model, module_name_suffixes, flag, raise_if_not_found, str.endswith
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or remove the mark of one module. Raises ConfigError where an engine trains it already."""
    if any(hasattr(p, "engine") for p in model.parameters()):
        raise ConfigError(
            f"an engine trains this {type(model).__name__} already: which modules stage 3 "
            "gathers as a whole is fixed in initialize. Set leaf modules before initialize."
        )
    setattr(model, LEAF, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules in `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked."""
    return bool(getattr(model, LEAF, False))


def mark_leaves_of(block: Mapping[str, Any], model: nn.Module) -> None:
    """Set the marks that a JSON asks for. Raises ConfigError where an entry fits no module."""
    zero = block.get("zero_optimization")
    given = zero.get("leaf_module") if isinstance(zero, Mapping) else None
    if not isinstance(given, Mapping | None):
        raise ConfigError(
            f'"{KEY}" is {given!r}, not a block with "classes", "names" or "name_suffixes".'
        )
    lists = {
        key: [value] if isinstance(value, str) else value
        for key, value in (given or {}).items()
    }
    for key, value in lists.items():
        if key not in ("classes", "names", "name_suffixes"):
            raise ConfigError(
                f'"{KEY}.{key}" is unknown. Its keys are "classes", "names", "name_suffixes".'
            )
        if not isinstance(value, list) or not all(
            isinstance(entry, str) for entry in value
        ):
            raise ConfigError(f'"{KEY}.{key}" is {value!r}, not a list of names.')
    for name in lists.get("classes", ()):
        set_z3_leaf_modules(model, [name])
    if "classes" not in lists:
        set_z3_leaf_modules(model, DEFAULT_CLASSES, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, lists.get("names", ()))
    set_z3_leaf_modules_by_suffix(model, lists.get("name_suffixes", ()))


def with_gradient(output: Any, parameters: Iterable[nn.Parameter]) -> Any:
    """Return the output of a leaf; one that depends on no parameter becomes part of the graph.

    A rank whose leaf uses none of its parameters has a backward of it, too, in which it takes part in the
    collectives of the others. Only a tensor, or a tensor in a tuple, list or dict, can be changed.
    """
    anchor = next((p for p in parameters if p.requires_grad), None)
    if anchor is None or not torch.is_grad_enabled():
        return output
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        return _Connected.apply(
            output, torch.zeros((), device=output.device, requires_grad=True)
        )
    if type(output) is dict:
        return {key: with_gradient(value, [anchor]) for key, value in output.items()}
    if type(output) in (tuple, list):
        return type(output)(with_gradient(value, [anchor]) for value in output)
    return output


class _Connected(torch.autograd.Function):
    """A copy of a tensor that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def _mark_classes(
    model: nn.Module, kinds: Kinds, flag: bool, must_exist: bool
) -> list[nn.Module]:
    wrong = [kind for kind in kinds if not isinstance(kind, type | str)]
    if isinstance(kinds, str) or wrong:
        raise ConfigError(
            f"the classes of leaf modules are {kinds!r}: give a list of classes, or of their "
            "names."
        )
    found = [
        module
        for module in model.modules()
        if any(_is_a(module, kind) for kind in kinds)
    ]
    if must_exist and not found:
        names = ", ".join(
            kind if isinstance(kind, str) else kind.__qualname__ for kind in kinds
        )
        here = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"no module of the class {names} is in the model. It has modules of the classes "
            f"{', '.join(here[:20])}."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    return kind in (
        type(module).__name__,
        f"{type(module).__module__}.{type(module).__qualname__}",
    )


def _mark_names(
    model: nn.Module,
    wanted: Iterable[str],
    flag: bool,
    must_exist: bool,
    fits: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = []
    missing = []
    for given in wanted:
        modules = [module for name, module in named.items() if fits(name, given)]
        found += modules
        missing += [] if modules else [given]
    if must_exist and missing:
        raise ConfigError(
            f"no module is called {', '.join(missing)}, or ends so, in the model; "
            "named_modules() lists the names."
        )
    found = list(dict.fromkeys(found))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
