"""`ManagedParameter`: a parameter with a description (`.spec`), and where its gradient goes
(`.gradient_sum`).

`ParamSpec` describes the parameter; every layer gives one. An optimizer that sums gradients up gives the
parameter a `GradientAccumulator`; without one the gradient is left to autograd, as in any module. Two passes
send gradients elsewhere for their time, by a `Detour`: the input half of a split backward, and a layer that
computes a gradient part by part.

Note: parameters of other modules are plain `nn.Parameter`, or of classes of their own. They are given the same
attributes by `describe` and `accumulate`, and `spec_of` and `accumulator_of` read those of any parameter.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from ..errors import LayoutError
from .param_spec import ParamSpec

Finish = Callable[[], torch.Tensor | None]
Begin = Callable[[], Finish]
# The attribute of a parameter whose optimizer sums gradients up.
SUM = "gradient_sum"
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


@dataclass(frozen=True, slots=True)
class Detour:
    """Where gradients go for a time.

    queue  in the input half of a split backward: computations for its weight half
    sums   while a layer computes gradients part by part; they come before the queue
    """

    queue: Queue | None = None
    sums: PartialSums | None = None


class ManagedParameter(nn.Parameter):
    """A parameter with a description.

    spec          of the whole parameter, of which this is a rank's shard
    gradient_sum  of its gradients, where an optimizer keeps one; else absent
    detour        absent at most times

    This class is for annotations. Objects are of the class `nn.Parameter` itself: torch's optimizers take their fast
    ways for it alone, and `nn.Parameter(p)` refuses other classes.
    """

    spec: ParamSpec
    gradient_sum: GradientAccumulator
    detour: Detour


def described(data: torch.Tensor, spec: ParamSpec) -> ManagedParameter:
    """Return a parameter with a description."""
    parameter = cast(ManagedParameter, nn.Parameter(data))
    parameter.spec = spec
    return parameter


def no_accumulator() -> None:
    """Stand for an accumulator in a copy: a copied parameter does not belong to the optimizer of the original."""


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


def accumulate(parameter: torch.Tensor, accumulator: GradientAccumulator) -> None:
    """Let an accumulator sum up the gradient of a parameter."""
    parameter.__dict__[SUM] = accumulator


def accumulator_of(parameter: torch.Tensor) -> GradientAccumulator | None:
    """Return what sums up the gradient of a parameter; None: autograd."""
    return getattr(parameter, SUM, None)


def detour_of(parameter: torch.Tensor) -> Detour | None:
    """Return where the gradient of a parameter goes for a time, if it goes elsewhere now."""
    return getattr(parameter, "detour", None)


@contextmanager
def detours(detour_by: Mapping[torch.Tensor, Detour]) -> Iterator[None]:
    """Inside, the gradients of these parameters take the detours."""
    before = {p: detour_of(p) for p in detour_by}
    for p, detour in detour_by.items():
        p.__dict__["detour"] = detour
    try:
        yield
    finally:
        for p, earlier in before.items():
            if earlier is None:
                del p.__dict__["detour"]
            else:
                p.__dict__["detour"] = earlier


class TensorAccumulator:
    """A `GradientAccumulator` that adds to a tensor, and calls a function after each contribution."""

    def __init__(
        self, total: torch.Tensor, completed: Callable[[], object] = lambda: None
    ):
        self.total = total
        self.completed = completed

    def __reduce__(self) -> tuple:
        return no_accumulator, ()

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
