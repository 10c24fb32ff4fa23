"""What one machine offers: memory that processes share, large pages, the memory allocator, files as memory,
scratch files, asynchronous I/O, and C++ modules that were compiled at installation.
"""

import importlib
import logging
from types import ModuleType
from typing import Any


def load_compiled(name: str, what: str, instead: str, logger: logging.Logger) -> ModuleType | Any:
    """The compiled module `name`; None, with a warning, if `pip install` found no compiler.

    what: the module in the warning.  instead: the consequence, for the warning
    """
    try:
        return importlib.import_module(f"megatron_ds.{name}")
    except ImportError as reason:
        logger.warning("%s is not compiled (%s): %s. Reinstall megatron_ds with a C++17 compiler to have it.",
                       what, reason, instead)
        return None
