"""The maths of a layer, without parallelism: a plain reference beside each fast implementation.

Each file names its implementations and the devices and dtypes that they are used for.
"""

from typing import Any

from .. import foreign_name


def __getattr__(name: str) -> Any:
    return foreign_name(__name__, name)
