"""`ManagedParameter`: a parameter with a description (`.spec`), and where its gradient goes (`.grads`).

`ParamSpec` says what the parameter is; every layer gives one. `ParameterGradient` says where the contributions
to its gradient go. An optimizer puts a `GradientAccumulator` there. Two passes put something before it for
their time: the input half of a split backward a queue, and a layer that computes a gradient part by part the
sums of the parts. A parameter without any of them leaves its gradient to autograd, as in any module.

Note: parameters of other modules are plain `nn.Parameter`, or of classes of their own. They are given the same
two attributes, and are read by the same two functions, `spec_of` and `grads_of`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..errors import LayoutError
from .param_spec import ParamSpec

Finish = Callable[[], torch.Tensor | None]
Begin = Callable[[], Finish]
# Gradients that wait for the weight half of a backward.
Queue = list[tuple[torch.Tensor, Begin]]


class GradientAccumulator(Protocol):
    """Sums up the contributions to the gradient of one parameter.

    A function that adds to the sum in place is called as add(sum, *arguments, overwrites). With overwrites the
    sum has undefined contents, and the function writes the first values.
    """

    def add(self, gradient: torch.Tensor) -> None:
        """Add one contribution."""

    def contribute(self, add: Callable[..., object], *arguments: object) -> None:
        """Add one contribution by a function."""

    def write(self, add: Callable[..., object], *arguments: object) -> None:
        """Add a part of a contribution by a function. `ready` ends the contribution."""

    def ready(self) -> None:
        """Count a contribution, of which all parts are written."""

    def view(self) -> torch.Tensor:
        """Return the sum, in the shape of the parameter."""


class PartialSums(Protocol):
    """Sums up gradients of several parameters, each of which is delivered as one contribution in the end."""

    def add_product(
        self, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor
    ) -> None:
        """Add dyᵀ x to the sum of a weight."""

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add a part of a gradient, if there is one."""


@dataclass(slots=True, eq=False)
class ParameterGradient:
    """Where the gradient of a parameter goes. The last of these that is there receives it.

    accumulator  the optimizer's
    queue        in the input half of a split backward: computations for its weight half
    sums         while a layer computes the gradient part by part
    """

    accumulator: GradientAccumulator | None = None
    queue: Queue | None = None
    sums: PartialSums | None = None

    def __reduce__(self) -> tuple:
        # A copy of a parameter does not belong to the optimizer of the original.
        return ParameterGradient, ()


class ManagedParameter(nn.Parameter):
    """A parameter with a description.

    spec   of the whole parameter, of which this is a rank's shard
    grads  where its gradient goes; absent until something asks for it
    """

    spec: ParamSpec
    grads: ParameterGradient


def spec_of(parameter: torch.Tensor) -> ParamSpec:
    """Return the description of a parameter. Raises LayoutError where it has none."""
    spec = getattr(parameter, "spec", None)
    if spec is None:
        raise LayoutError(
            f"a parameter of shape {list(parameter.shape)} has no `.spec`, from which its name, its shards and "
            "its gradient's ranks follow. Make it with megatron_ds.mpu.context.new_parameter, or set `.spec`."
        )
    return spec


def describe(parameter: torch.Tensor, spec: ParamSpec) -> None:
    """Give a parameter its description."""
    parameter.__dict__["spec"] = spec


def grads_of(parameter: torch.Tensor) -> ParameterGradient | None:
    """Return where the gradient of a parameter goes; None: to autograd."""
    return getattr(parameter, "grads", None)


def made_grads(parameter: torch.Tensor) -> ParameterGradient:
    """Return where the gradient of a parameter goes, which is made at the first call."""
    grads = grads_of(parameter)
    if grads is None:
        grads = ParameterGradient()
        parameter.__dict__["grads"] = grads
    return grads


def is_accumulated(parameter: torch.Tensor) -> bool:
    """Return whether an optimizer sums up the gradient of a parameter, so that autograd need not follow it."""
    grads: ParameterGradient | None = getattr(parameter, "grads", None)
    return grads is not None and grads.accumulator is not None


class TensorAccumulator:
    """A `GradientAccumulator` that adds to a tensor, and calls a function after each contribution."""

    def __init__(
        self, total: torch.Tensor, completed: Callable[[], object] = lambda: None
    ):
        self.total = total
        self.completed = completed

    def add(self, gradient: torch.Tensor) -> None:
        self.total.add_(gradient)
        self.ready()

    def contribute(self, add: Callable[..., object], *arguments: object) -> None:
        self.write(add, *arguments)
        self.ready()

    def write(self, add: Callable[..., object], *arguments: object) -> None:
        add(self.total, *arguments, False)

    def ready(self) -> None:
        self.completed()

    def view(self) -> torch.Tensor:
        return self.total
