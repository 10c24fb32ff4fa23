"""Model parallel units: the coordinates of ranks on the grid and their groups.

Names load their module on first use, so the pure parts (`mpu.grid`, `mpu.param_spec`) do not import torch.
Getters with Megatron's names (`mpu.get_data_parallel_rank`) are those of compat/deepspeed/getters.py.
"""

from importlib import import_module

from .. import foreign_name

_NAMES = {
    "grid": ("Grid",),
    "group": ("Group", "coordinates_of", "solo"),
    "mesh": (
        "Mesh",
        "destroy_model_parallel",
        "get_mesh",
        "initialize_model_parallel",
        "model_parallel_is_initialized",
        "set_mesh",
    ),
    "param_spec": ("Box", "Init", "ParamSpec", "Split"),
    "channels": ("Channels",),
    "launch": ("Launch", "read_launch", "start", "stop"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        return foreign_name(__name__, name)
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
