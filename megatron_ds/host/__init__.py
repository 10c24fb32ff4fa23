"""What one machine offers: memory that processes share, large pages, the memory allocator, files as memory,
scratch files, asynchronous I/O, and C++ modules that were compiled at installation.
"""

import importlib
import logging
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Modules of setup.py, and what they compute. Asynchronous I/O and BPE's cutter have messages of their own.
COMPILED = {
    "_cpu_adam": "Adam",
    "_product": "products",
    "_attention": "attention",
    "_norms": "norms",
    "_gelu": "GELU",
    "_gated": "SwiGLU",
    "_rotary": "rotary positions",
    "_cross_entropy": "cross entropy",
    "_accumulate": "sums of gradients",
    "_quantize": "quantization",
    "_index_builder": "index maps",
    "_crc32": "checksums",
}


def load_compiled(
    name: str, what: str, instead: str, logger: logging.Logger
) -> ModuleType | Any:
    """Return the compiled module `name`; None, with a warning, if `pip install` found no compiler. One warning stands
    for all modules if none is compiled.

    what: the module in the warning. instead: the consequence, for the warning
    """
    try:
        return importlib.import_module(f"megatron_ds.{name}")
    except ImportError as reason:
        if any(find_spec(f"megatron_ds.{module}") for module in COMPILED):
            logger.warning(
                "%s is not compiled (%s): %s. Reinstall megatron_ds with a C++17 compiler to have "
                "it.",
                what,
                reason,
                instead,
            )
        else:
            _warn_of_all()
        return None


@cache
def _warn_of_all() -> None:
    logging.getLogger(__name__).warning(
        "no C++ module of this package is compiled: %s run by torch, numpy or Python, slower on CPUs. "
        "Reinstall megatron_ds with a C++17 compiler to have them.",
        ", ".join(COMPILED.values()),
    )
