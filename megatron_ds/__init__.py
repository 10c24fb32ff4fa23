"""megatron_ds: pretraining with tensor, pipeline and data parallelism and ZeRO that composes, plans and
resumes at any layout.

    engine, *_ = megatron_ds.initialize(model=module, config="ds_config.json")

An engine trains any module: docs/use/engine.md.

Importing the package imports no submodule: `megatron_ds.mpu`, `megatron_ds.config`, … load when they are
first used.

DeepSpeed's names that are no names of this package (`megatron_ds.runtime.utils.see_memory_usage`) are
those of compat/deepspeed/names.py; `install_as_deepspeed()` gives all of them the name `deepspeed`,
too. Its modules that are files elsewhere (`megatron_ds.comm`) are
those of compat/deepspeed/aliases.py.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any

from .version import __version__

__all__ = [
    "RepeatingLoader",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
]

_SUBMODULES = (
    "accelerator",
    "checkpoint",
    "checkpointing",
    "cli",
    "comm",
    "config",
    "data",
    "engine",
    "errors",
    "models",
    "moe",
    "mpu",
    "ops",
    "optim",
    "pipeline",
    "registry",
    "tensor_parallel",
    "training",
    "utils",
    "zero",
)

# Functions under DeepSpeed's names: for many programs `import megatron_ds as deepspeed` is the whole
# migration.
_OF_THE_ENGINE = ("RepeatingLoader", "add_config_arguments", "initialize")


_OF_VERSION = ("__version_major__", "__version_minor__", "__version_patch__")
_OF_GIT = {"__git_hash__": "git_hash", "__git_branch__": "git_branch"}


def __getattr__(name: str):
    if name in _OF_VERSION:
        return int(__version__.split(".")[_OF_VERSION.index(name)])
    if name in _OF_GIT:
        return getattr(foreign_name(__name__, "git_version_info"), _OF_GIT[name])
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name == "init_distributed":
        return import_module(".compat.deepspeed.comm", __name__).init_distributed
    if name in _OF_THE_ENGINE:
        return getattr(import_module(".compat.engine", __name__), name)
    return foreign_name(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, *_OF_THE_ENGINE, "init_distributed"])


def install_as_deepspeed() -> None:
    """Give this package the name `deepspeed` in this process, for libraries that import it by that name.

    Call it before they are imported. Raises ConfigError if DeepSpeed itself has been imported.
    """
    import_module(".compat.deepspeed.installation", __name__).install()


def foreign_name(module: str, name: str) -> Any:
    """Return the object that DeepSpeed has under `name` in this module, for its `__getattr__`. Raises
    AttributeError."""
    # `from package import module` asks for the attribute first.
    package = sys.modules.get(module)
    folders = () if package is None else vars(package).get("__path__")
    if folders and PathFinder.find_spec(f"{module}.{name}", folders) is not None:
        return import_module(f"{module}.{name}")
    if name == "__path__":
        # A file here may be a package in DeepSpeed, whose modules `_ForeignModules` finds.
        return []
    find = None
    if not name.startswith("__"):
        find = import_module(".features", __name__).find_provided("foreign names")
    if find is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return find(module, name)


class _ForeignModules:
    """A finder of modules of DeepSpeed that are no files of this package. Python asks it last, for modules that
    are missing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        wings = (f"{__name__}.compat", f"{__name__}.extensions")
        if not name.startswith(f"{__name__}.") or name.startswith(wings):
            return None
        features = import_module(".features", __name__)
        finder = features.find_provided("foreign modules")
        return None if finder is None else finder.find_spec(name)


sys.meta_path.append(_ForeignModules)
