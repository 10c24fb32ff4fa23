"""DeepSpeed's import paths, and earlier ones of this package, whose modules are files of it elsewhere.

import megatron_ds.comm                     is megatron_ds.compat.deepspeed.comm, the same module object
from megatron_ds.engine import Engine       is megatron_ds.compat.engine's
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "megatron_ds"

# path → module, both below megatron_ds.
ALIASES = {
    "accelerator": "compat.deepspeed.accelerator",
    "checkpointing": "compat.deepspeed.checkpointing",
    "comm": "compat.deepspeed.comm",
    "engine": "compat.engine",
    "moe.layer": "compat.deepspeed.moe_layer",
    "ops.kernel_check": "extensions.kernels.gpu.kernel_check",
    "pipeline.picture": "extensions.report.picture",
    "utils": "compat.deepspeed.utils",
    "utils.tensor_fragment": "compat.deepspeed.tensor_fragment",
    "utils.zero_to_fp32": "compat.deepspeed.zero_to_fp32",
}


def target_of(name: str) -> str | None:
    """Return the module that `megatron_ds.NAME` is an alias of; None if it is none."""
    package, _, inner = name.partition(".")
    if package != PACKAGE:
        return None
    if inner in ALIASES:
        return f"{PACKAGE}.{ALIASES[inner]}"
    # Only a package has modules below it.
    if inner.startswith("engine."):
        return f"{PACKAGE}.{ALIASES['engine']}.{inner.removeprefix('engine.')}"
    return None


class AliasFinder:
    """Finds a module under its alias."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of an alias, for the import system (`importlib.abc.MetaPathFinder`)."""
        target_name = target_of(name)
        if target_name is None:
            return None
        if AliasFinder not in sys.meta_path:
            # The alias of a package has the package's folder as its path: without this finder at the front,
            # the import system would load the files of the folder a second time, under their old names.
            sys.meta_path.insert(0, AliasFinder)
        return alias_spec(name, target_name)


def alias_spec(name: str, target: str) -> ModuleSpec:
    """Return a spec by which the module `target` itself is imported under another name."""
    return ModuleSpec(name, _AliasLoader(target), origin=__file__, is_package=True)


class _AliasLoader(Loader):
    """Puts a module under another name. The import system returns what sys.modules has after `exec_module`."""

    def __init__(self, target: str):
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._target)
