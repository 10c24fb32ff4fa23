"""DeepSpeed's modules that this package has not, as modules below `megatron_ds`; and all of them under the
name `deepspeed`.

    import megatron_ds as deepspeed
    deepspeed.runtime.utils.see_memory_usage("before")                  # by attribute
    from megatron_ds.runtime.utils import see_memory_usage              # or by import

    megatron_ds.install_as_deepspeed()
    from deepspeed.runtime.utils import see_memory_usage                # in libraries that import `deepspeed`

Their names are those of the tables (deepspeed/names.py, deepspeed/advice.py): each is an object of this
package, or a *placeholder*: a class that can be imported, subclassed and used in isinstance, and whose
instantiation or call raises ConfigError with advice. Where this package has a module of the same name
(`megatron_ds.utils`), it is used, and its `__getattr__` looks here for the names that it lacks.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ...errors import ConfigError
from .advice import ADVICE, NOT_HERE
from .aliases import AliasFinder, alias_spec, target_of
from .names import HERE, MODULES_BELOW, SAME

PACKAGE = "megatron_ds"
FOREIGN = "deepspeed"
DOCUMENT = "docs/use/engine.md lists DeepSpeed's names."


def find(module: str, name: str) -> Any:
    """Return what DeepSpeed has under `name` in `module`, "megatron_ds.utils" or "megatron_ds".

    Raises AttributeError where this package knows no such name.
    """
    path = canonical(module.partition(".")[2])
    if name == "__path__" and path and is_module(path):
        return []
    if not name.startswith("__"):
        if name in HERE.get(path, {}):
            return load(HERE[path][name])
        child = f"{MODULES_BELOW.get(path, path)}.{name}".lstrip(".")
        if (
            child in modules()
            or target_of(f"{PACKAGE}.{child}")
            or _has_file(module, name)
        ):
            return import_module(f"{PACKAGE}.{child}")
        if advice := advice_for(path, name):
            return placeholder(f"{FOREIGN}.{child}", advice)
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}, and DeepSpeed's name "
        f"{'.'.join(filter(None, (FOREIGN, path, name)))} is not known here. {DOCUMENT}"
    )


def load(target: str) -> Any:
    """Return the object of a table: "errors:ConfigError" is `megatron_ds.errors.ConfigError`, "=text" the text."""
    if target.startswith("="):
        return target[1:]
    module, _, name = target.partition(":")
    found = import_module(f"{PACKAGE}.{module}")
    return getattr(found, name) if name else found


def canonical(path: str) -> str:
    """Return the path of the module whose names are those of DeepSpeed's module `path`."""
    return SAME.get(path, path)


@cache
def modules() -> frozenset[str]:
    """All paths of the tables, with those above them."""
    found = set()
    for path in {*HERE, *SAME, *ADVICE, *NOT_HERE}:
        parts = path.split(".")
        found |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return frozenset(found) - {""}


def is_module(path: str) -> bool:
    """Return whether DeepSpeed's module exists here, by itself or in a package that is not available."""
    return path in modules() or _package_not_here(path) is not None


def _has_file(module: str, name: str) -> bool:
    """Return whether this package has a module `name` in `module`."""
    places = getattr(sys.modules.get(module), "__path__", [])
    return (
        importlib.machinery.PathFinder.find_spec(f"{module}.{name}", places) is not None
    )


def advice_for(path: str, name: str) -> str | None:
    """Return the sentence for a name that is not available; None: this package does not know it."""
    for names, sentence in ADVICE.get(path, {}).items():
        if name in names.split():
            return sentence
    package = _package_not_here(path)
    return None if package is None or name.startswith("_") else NOT_HERE[package]


def _package_not_here(path: str) -> str | None:
    parts = path.split(".")
    above = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((package for package in above if package in NOT_HERE), None)


def names_of(path: str) -> list[str]:
    """Return the names in the tables for DeepSpeed's module `path`."""
    of = canonical(path)
    advised = [name for names in ADVICE.get(of, {}) for name in names.split()]
    return sorted({*HERE.get(of, {}), *advised})


class _Placeholder(type):
    """The class of placeholders. See `placeholder`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(cls.advice)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return placeholder(f"{cls.full_name}.{name}", cls.sentence)

    def __instancecheck__(cls, instance: Any) -> bool:
        return False


@cache
def placeholder(full_name: str, advice: str) -> type:
    """Return a class in place of an object that is not available. Calling it raises ConfigError with the advice."""
    text = f"{full_name} is not available here: {advice}"
    return _Placeholder(
        full_name.rpartition(".")[2],
        (),
        {"advice": text, "sentence": advice, "full_name": full_name},
    )


# ---------------------------------------------------------------------- importing
class Finder:
    """Finds the modules of DeepSpeed below this package: aliases of its files, and tables of names."""

    @staticmethod
    def find_spec(
        name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an alias or of a module of the tables; None for other names."""
        alias = AliasFinder.find_spec(name)
        if alias is not None:
            return alias
        if not is_module(name.partition(".")[2]):
            return None
        return importlib.machinery.ModuleSpec(
            name, _Loader(), origin=__file__, is_package=True
        )


class DeepSpeedFinder:
    """Finds `deepspeed.utils`, which is the module `megatron_ds.utils`."""

    @staticmethod
    def find_spec(
        name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of `deepspeed.X` for a module X of this package; None for other names."""
        package, _, inner = name.partition(".")
        if (
            package != FOREIGN
            or not inner
            or importlib.util.find_spec(f"{PACKAGE}.{inner}") is None
        ):
            return None
        return alias_spec(name, f"{PACKAGE}.{inner}")


class _Loader(importlib.abc.Loader):
    """Makes a module whose names are those of the tables and of the module that has the same names."""

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        inner = spec.name.partition(".")[2]
        return FacadeModule(spec.name, canonical(inner))

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing is executed: names are looked up when they are used."""


class NamesFirst(ModuleType):
    """A module whose own names stay when a submodule of the same name is imported.

    `deepspeed.utils.z3_leaf_module` is a function, also after `import deepspeed.utils.z3_leaf_module`, which
    would replace it by the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and self.has_object(name):
            return
        super().__setattr__(name, value)

    def has_object(self, name: str) -> bool:
        """Return whether `name` is something else than a module."""
        return not isinstance(vars(self).get(name, self), ModuleType)


class FacadeModule(NamesFirst):
    """A module of DeepSpeed. path: of the module whose names it has."""

    def __init__(self, name: str, path: str):
        super().__init__(name, f"DeepSpeed's `{FOREIGN}.{path}`, by {PACKAGE}.")
        self._real = f"{PACKAGE}.{path}"

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self.__dir__()
        if name.startswith("__"):
            raise AttributeError(name)
        # A module below this one, not the one of the same name below the module that has the names.
        child = f"{self.__name__}.{name}"
        if child.partition(".")[2] in modules() and not self.has_object(name):
            return import_module(child)
        if self._real != self.__name__ and hasattr(
            real := import_module(self._real), name
        ):
            return getattr(real, name)
        return find(self._real, name)

    def has_object(self, name: str) -> bool:
        """Return whether `name` is an object of the tables, or one that is not available."""
        path = self._real.partition(".")[2]
        if name in HERE.get(path, {}):
            return not isinstance(load(HERE[path][name]), ModuleType)
        return advice_for(path, name) is not None

    def __dir__(self) -> Sequence[str]:
        return names_of(self._real.partition(".")[2])
