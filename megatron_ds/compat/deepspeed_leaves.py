"""`set_z3_leaf_modules`: modules that stage 3 gathers as a whole, with all modules inside of them.

For modules whose inner modules are not used in the same order, or not all, in each forward, such as a list of
experts of which the router chooses some. Call it before `initialize`.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from ..engine.module_specs import LEAF
from ..errors import ConfigError

Kinds = Sequence[type[nn.Module] | str]


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Kinds,
                        raise_if_not_found: bool = True) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes with these names; returns them."""
    found = [m for m in model.modules() if _is_one_of(m, leaf_module_classes)]
    return _mark(found, True, raise_if_not_found and f"classes {_names(leaf_module_classes)}", model)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Kinds,
                          raise_if_not_found: bool = True) -> list[nn.Module]:
    """Remove the marks of the modules of these classes."""
    found = [m for m in model.modules() if _is_one_of(m, leaf_module_classes)]
    return _mark(found, False, raise_if_not_found and f"classes {_names(leaf_module_classes)}", model)


def set_z3_leaf_modules_by_name(model: nn.Module, module_names: Iterable[str],
                                raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; returns (modules, names that no module has)."""
    named, wanted = dict(model.named_modules()), list(module_names)
    missing = [name for name in wanted if name not in named]
    if raise_if_not_found and missing:
        raise ConfigError(f"the module has no modules {missing}. named_modules() lists those that it has.")
    return _mark([named[name] for name in wanted if name in named], True, "", model), missing


def set_z3_leaf_modules_by_suffix(model: nn.Module, module_name_suffixes: Iterable[str],
                                  raise_if_not_found: bool = True) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; returns (modules, endings that no name has)."""
    endings = list(module_name_suffixes)
    found = {end: [m for name, m in model.named_modules() if name == end or name.endswith(f".{end}")]
             for end in endings}
    missing = [end for end, modules in found.items() if not modules]
    if raise_if_not_found and missing:
        raise ConfigError(f"no name of a module ends with {missing}. named_modules() lists the names.")
    return _mark([m for modules in found.values() for m in modules], True, "", model), missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or remove the mark of one module."""
    setattr(model, LEAF, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [m for m in model.modules() if z3_leaf_module(m)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked."""
    return bool(getattr(model, LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """False: parameters carry no mark."""
    return False


def _mark(found: list[nn.Module], flag: bool, needed: str | bool, model: nn.Module) -> list[nn.Module]:
    if needed and not found:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(f"no module is of the {needed}. The model has modules of the classes "
                          f"{', '.join(kinds[:20])}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_one_of(module: nn.Module, kinds: Kinds) -> bool:
    names = (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
    return any(kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in kinds)


def _names(kinds: Kinds) -> str:
    return ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
