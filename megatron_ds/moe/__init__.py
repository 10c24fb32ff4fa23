"""Mixture of experts: router, losses, capacity, dispatch over expert-parallel ranks, experts; and DeepSpeed's
layer `MoE` for any module (compat/deepspeed/moe_layer.py), which is loaded on first use.
"""

from importlib import import_module

from .. import foreign_name

__all__ = ["MoE", "layer"]


def __getattr__(name: str):
    if name not in __all__:
        return foreign_name(__name__, name)
    module = import_module("megatron_ds.moe.layer")
    return module if name == "layer" else getattr(module, name)
