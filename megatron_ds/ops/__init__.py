"""The maths of a layer, without parallelism: a plain reference beside each fast implementation.

Each file names its implementations and the devices and dtypes that they are used for. Importing the package
imports gpu/, whose self-check must be registered before any operation runs on a GPU.
"""

from typing import Any

from .. import foreign_name
from ..extensions.kernels import gpu as gpu


def __getattr__(name: str) -> Any:
    return foreign_name(__name__, name)
