"""Small launches of every GPU kernel, for checks that need each kernel once: sanitizers, machine code.

The module `norm` here is for csrc/gpu/norm.cu. Its function `launch` calls wrappers on CPU tensors so that
each kernel of the file runs, in each way in which its threads communicate: several warps and blocks, a part
of a warp, loops with more than one turn. It compares nothing.
"""

import importlib
import pkgutil
from collections.abc import Callable


def small_launches() -> dict[str, Callable[[], None]]:
    """Source in csrc/gpu → the function that launches its kernels."""
    return {
        f"{module.name}.cu": importlib.import_module(f"{__name__}.{module.name}").launch
        for module in pkgutil.iter_modules(__path__)
    }
