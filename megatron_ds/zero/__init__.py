"""Data parallelism and optimizer state: gradients in buckets, ZeRO sharding, norm, clipping, loss scaling.

`zero.Init`, `zero.GatheredParameters` and `zero.register_external_parameter` are for programs that were
written for DeepSpeed. They belong to the engine (compat/engine/zero_init.py) and are loaded when first used.
"""

from importlib import import_module

from .. import foreign_name

_OF_THE_ENGINE = (
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
)


def __getattr__(name: str):
    if name in _OF_THE_ENGINE:
        return getattr(import_module("megatron_ds.compat.engine.zero_init"), name)
    return foreign_name(__name__, name)
