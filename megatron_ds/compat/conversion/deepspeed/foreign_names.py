"""Pickles that name classes of DeepSpeed, written where DeepSpeed is not installed."""

import os
import pickle
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

# Attributes of DeepSpeed's DynamicLossScaler, and its defaults.
SCALER = {
    "cur_scale": 65536.0,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": torch.half,
}


class ForeignClass:
    """A class by its name; calls make a `ForeignInstance`."""

    def __init__(self, module: str, name: str):
        self.module = module
        self.name = name

    def __call__(self, **state: Any) -> "ForeignInstance":
        return ForeignInstance(self, state)


class ForeignInstance:
    """An object of a `ForeignClass` with these attributes, made without calling its constructor."""

    def __init__(self, kind: ForeignClass, state: Mapping[str, Any]):
        self.kind = kind
        self.state = dict(state)


class _Pickler(pickle._Pickler):
    """Writes names without importing them."""

    # Members of the class in Python that typeshed does not declare.
    write: Callable[[bytes], object]

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, ForeignClass):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, ForeignInstance):
            self.save(obj.kind)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]


def save_with_names(content: Any, path: str | os.PathLike) -> None:
    """torch.save, also of a `ForeignInstance` in `content`."""
    module = ModuleType("pickle_with_names")
    vars(module)["Pickler"] = _Pickler
    torch.save(content, path, pickle_module=module)


def scaler_object(numbers: Mapping[str, float]) -> ForeignInstance:
    """DeepSpeed's dynamic loss scaler with the numbers of ours ("loss_scale", …)."""
    return ForeignClass("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")(
        **{
            **SCALER,
            "cur_scale": numbers["loss_scale"],
            "cur_iter": int(numbers.get("loss_scale_iteration", 0)),
            "last_overflow_iter": int(numbers.get("loss_scale_last_overflow", -1)),
            "cur_hysteresis": int(numbers.get("loss_scale_lives", 2)),
        }
    )
