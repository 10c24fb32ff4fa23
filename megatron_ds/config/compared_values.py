"""Values that all ranks of a job must share: options, versions, variables of the environment.

Every option is compared, except those that are declared with `per_host=True`: paths of one machine, and
settings that change neither numbers nor communication. Contents behind such paths are compared elsewhere
(training/data_facts.py).
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from ..features import origins
from ..version import __version__
from .options.option import Option
from .run import RunConfig, all_options

PACKAGES = ("torch", "numpy")  # results depend on their versions: kernels, shuffles
# Variables that change the precision or the order of operations. CUBLAS_WORKSPACE_CONFIG is not among them:
# the package sets it where it is missing.
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MEGATRON_DS_HIP_KERNELS",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def compared_values(
    config: RunConfig,
    name_of: Callable[[Option], str] = lambda option: option.flag,
    env: Mapping[str, str] = os.environ,
) -> dict[str, tuple[Any, str]]:
    """Return the mapping name → (value, source) of everything that ranks compare before they build anything.

    name_of: the name of an option in messages
    """
    options = {
        name_of(option): (config.get(path), config.source(path))
        for path, option in all_options().items()
        if not option.per_host
    }
    size = {"the world size": (config.world_size, "")}
    variables = {
        name: (env.get(name, "not set"), "the environment") for name in ENVIRONMENT
    }
    return {**size, **options, **_versions(), **variables}


def _versions() -> dict[str, tuple[Any, str]]:
    """Return the versions of this package and of those that compute; a package of the same version may be edited."""
    package = Path(__file__).parents[1]
    found: dict[str, tuple[Any, str]] = {
        "the version of megatron_ds": (__version__, ""),
        "the hash of megatron_ds's source files": (_hash_of_source(package), ""),
        "the compiled modules of megatron_ds": (_compiled_modules(package), ""),
        "the hash of the script": (_hash_of_script(), ""),
        "the features of other packages": (_features(), ""),
    }
    for name in PACKAGES:
        try:
            found[f"the version of {name}"] = (version_of(name), "")
        except PackageNotFoundError:
            found[f"the version of {name}"] = ("unknown", "")
    return found


def _features() -> list[str]:
    """Return the modules with features, with the hash of the file of each."""
    found = []
    for origin in origins():
        file = getattr(sys.modules.get(origin.module), "__file__", None)
        content = Path(file).read_bytes() if file else b""
        digest = hashlib.sha256(content).hexdigest()[:16]
        found.append(f"{origin.module} {origin.distribution} {digest}")
    return found


@cache
def _hash_of_source(package: Path) -> str:
    """Return a hash of names and contents of all Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _compiled_modules(package: Path) -> list[str]:
    """Return the modules that a compiler made. In place of a missing one, torch's operations run, which round
    differently."""
    return sorted(path.name.partition(".")[0] for path in package.rglob("*.so"))


def _hash_of_script() -> str:
    """Return a hash of the program that this process runs, which may register models and losses of its own.

    Programs of the installation differ in their first line, and call this package only.
    """
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    installed = Path(sys.prefix).resolve()
    if not path.is_file() or path.resolve().is_relative_to(installed):
        return "none"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
