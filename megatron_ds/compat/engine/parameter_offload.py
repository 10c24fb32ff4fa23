"""`ParameterOffload`: what programs take of DeepSpeed's optimizer at stage 3 to run the module without its hooks:

    with deepspeed.zero.GatheredParameters(engine.parameters()):
        remove_hooks(engine)      reads optimizer.parameter_offload: its module, its lists of hooks
        …generate…
        add_hooks(engine)         _register_deepspeed_module(module)

An engine's hooks may stay: inside of the context all parameters are whole, and the hooks gather nothing. The
lists are therefore empty.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


class ParameterOffload:
    """DeepSpeed's names for the hooks of stage 3."""

    def __init__(self, module: nn.Module):
        self.module = _Walked(module)
        self.forward_hooks: list = []
        self.backward_hooks: list = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Hooks were never removed."""


class _Walked:
    """The module, with DeepSpeed's method that lists foreign parameters. Other attributes are the module's."""

    def __init__(self, module: nn.Module):
        self._module = module

    def ds_external_parameters(self) -> Iterator:
        """(name, parameter) of other modules that this one reads; the engine finds these by itself."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._module, name)
