"""Packages that only some uses need: the extras of this distribution, such as `megatron_ds[report]`.

Every message about a missing package is written here, so that all of them give one command in one spelling.
"""

from importlib import import_module
from typing import Any

from ..errors import ConfigError


def install_command(name: str) -> str:
    """Return the command that installs a package, or an extra of this one.

    Double quotes have the same meaning in sh, zsh, fish, PowerShell and cmd; without them, zsh takes the brackets of
    an extra as a pattern of file names.
    """
    return f'python -m pip install "{name}"'


def extra_command(extra: str) -> str:
    """Return the command that installs an extra of this distribution."""
    return install_command(f"megatron_ds[{extra}]")


def missing_package(
    what: str, package: str, extra: str, reason: object, instead: str = ""
) -> ConfigError:
    """Return the error for a package of an extra that cannot be imported.

    what     what needs it: a flag, a file or a command
    reason   the ImportError, or another reason
    instead  a sentence about what can be done without it
    """
    text = f"{what} needs the package {package} ({reason}). Install it with: {extra_command(extra)}"
    return ConfigError(f"{text}. {instead}" if instead else text)


def import_extra(what: str, module: str, extra: str, instead: str = "") -> Any:
    """Import a module of an extra. Arguments are those of `missing_package`. Raises ConfigError without it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing_package(what, module, extra, error, instead) from None
