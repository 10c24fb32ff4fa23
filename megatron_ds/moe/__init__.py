"""Mixture of experts: router, losses, capacity, dispatch over expert-parallel ranks, experts; and DeepSpeed's
layer `MoE` for any module, which loads its module on first use, as `megatron_ds.moe.MoE` or
`megatron_ds.moe.layer.MoE`.
"""

from importlib import import_module

__all__ = ["MoE", "layer"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".any_module", __name__)
    return module if name == "layer" else getattr(module, name)
