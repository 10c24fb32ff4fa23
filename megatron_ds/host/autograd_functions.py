"""Functions of autograd at less cost for the host: a GPU that computes a small block waits for the host.

torch's `Function.apply` unwraps every argument for the transforms of torch.func, in Python; its
`once_differentiable` enters and leaves a context in every backward.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import Function, once_differentiable


class Halves(NamedTuple):
    """The forward and the backward of an operation, without autograd, for a function of autograd that joins
    several operations."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def of(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate an implementation of the operation: `halves_of` then finds this pair."""
        vars(implementation)["halves"] = self
        return implementation


def halves_of(implementation: Callable[..., Any]) -> Halves | None:
    """Return the halves of an implementation; None where it has none."""
    return getattr(implementation, "halves", None)


def direct_apply(function: type[Function]) -> Callable[..., Any]:
    """Return `function.apply` for calls outside of torch.func's transforms, inside of which torch raises
    RuntimeError."""
    return super(Function, function).apply  # type: ignore[misc]  # of a class of C, absent in torch's stubs


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, without its cost in a backward that records no graph."""
    recorded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            return recorded(ctx, *gradients)
        return backward(ctx, *gradients)

    return run
