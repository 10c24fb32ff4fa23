"""megatron_ds: pretraining with tensor, pipeline and data parallelism and ZeRO that composes, plans and
resumes at any layout.

    engine, *_ = megatron_ds.initialize(model=module, config="ds_config.json")    # any module: docs/engine.md

Importing the package imports no submodule: `megatron_ds.mpu`, `megatron_ds.config`, … load when they are
first used.
"""

from importlib import import_module

from .version import __version__

__all__ = ["RepeatingLoader", "__version__", "add_config_arguments", "init_distributed", "initialize"]

_SUBMODULES = ("accelerator", "checkpoint", "checkpointing", "cli", "comm", "config", "data", "engine",
               "errors", "models", "moe", "mpu", "ops", "optim", "pipeline", "ramps", "registry",
               "tensor_parallel", "training", "utils", "zero")

# Functions under DeepSpeed's names: for many programs `import megatron_ds as deepspeed` is the whole
# migration.
_OF_THE_ENGINE = ("RepeatingLoader", "add_config_arguments", "initialize")


def __getattr__(name: str):
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name == "init_distributed":
        return import_module(".comm", __name__).init_distributed
    if name in _OF_THE_ENGINE:
        return getattr(import_module(".engine", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBMODULES, *_OF_THE_ENGINE, "init_distributed"])
