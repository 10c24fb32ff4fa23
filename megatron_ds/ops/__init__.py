"""The maths of a layer, without parallelism: a plain reference beside each fast implementation.

The faster ones are kernels of a wing (extensions/kernels), which the table of kernels asks for (kernel_table.py).
"""

from typing import Any

from .. import foreign_name


def __getattr__(name: str) -> Any:
    return foreign_name(__name__, name)
