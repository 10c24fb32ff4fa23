"""The optional C++ parts of the package, which `pip install` leaves out where there is no compiler."""

import importlib
import logging
from types import ModuleType
from typing import Any


def load_compiled(name: str, what: str, instead: str, logger: logging.Logger) -> ModuleType | Any:
    """Module `name` of the package; None, said by `logger`, where it was not compiled.

    what: is not compiled.  instead: what happens now
    """
    try:
        return importlib.import_module(f"megatron_ds.{name}")
    except ImportError as reason:
        logger.warning("%s is not compiled (%s): %s. Reinstall megatron_ds with a C++17 compiler to have "
                       "it.", what, reason,
                       instead)
        return None
