"""What an engine adds to a user's module, besides its parameters: hooks on calls and on reads of parameters.

A copy of the module (copy.deepcopy) has none of it, and `remove` takes it away.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError


class WatchedParameters(dict):
    """A module's `_parameters`, which calls `fetch` with each parameter that is read by name."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        fetch: Callable[[nn.Parameter], None],
    ):
        super().__init__(parameters)
        self._fetch = fetch

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            _between_graphs(self._fetch, parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        hidden = [name for name, p in self.items() if p is not None and is_hidden(p)]
        if hidden:
            raise ConfigError(
                f"copy.deepcopy of a module that ZeRO stage 3 shards: {hidden[0]} has no "
                "values here. Copy it inside of `with engine.gathered_parameters():`."
            )
        return {name: copy.deepcopy(p, memo) for name, p in self.items()}


class Hook:
    """A hook of an engine. A copy of the module has none that acts."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return _between_graphs(self._function, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_effect


def _between_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which torch.compile of the module calls and does not trace."""
    if torch.compiler.is_compiling():
        from ...tensor_parallel.outside_graphs import call_outside_graphs

        return call_outside_graphs(function, *arguments)
    return function(*arguments)


def no_effect(*arguments: Any) -> None:
    """The hook of a copied module."""


def is_hidden(p: nn.Parameter) -> bool:
    """Return whether a parameter shows one expanded NaN; see "Note: hidden parameters"."""
    return (
        p.numel() > 1 and not any(p.stride()) and bool(p.detach().view(-1)[0].isnan())
    )


@torch.no_grad()
def remove(module: nn.Module) -> None:
    """Remove what an engine has added to the module."""
    for owner in module.modules():
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                owner._forward_hooks_always_called.pop(key, None)
        if isinstance(owner._parameters, WatchedParameters):
            owner._parameters = dict(owner._parameters.items())
