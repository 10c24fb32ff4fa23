"""Which module has the kernels for CPUs of an operation. Importing the module registers them."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module

import torch

MODULES: Mapping[str, str] = {
    **dict.fromkeys(("adamw", "lion", "adagrad"), "adam"),
    **dict.fromkeys(("product", "affine", "add_product_"), "product"),
    "add_narrow_": "addition",
    "attention": "attention",
    **dict.fromkeys(("probabilities_", "probability_gradient_"), "cross_entropy"),
    "gelu": "gelu",
    "swiglu": "gated",
    **dict.fromkeys(("layer_norm", "rms_norm", "residual_norm"), "norms"),
    **dict.fromkeys(("quantize", "dequantize"), "quantize"),
    **dict.fromkeys(("apply_rotary", "split_rotary"), "rotary"),
}
# Modules whose kernels take one dtype alone.
OF_DTYPE = {"norms": torch.bfloat16}


def load(operation: str, dtype: torch.dtype) -> None:
    """Register the kernels of an operation that can take a dtype."""
    name = MODULES.get(operation)
    if name is not None and OF_DTYPE.get(name, dtype) == dtype:
        _load(name)


def load_all() -> None:
    """Register all kernels for CPUs."""
    for name in MODULES.values():
        _load(name)


@cache
def _load(name: str) -> None:
    import_module(f".cpu.compiled_{name}", __package__)
