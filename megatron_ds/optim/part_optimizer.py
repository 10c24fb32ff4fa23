"""`PartOptimizer`: what the optimizers of this package have in common."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


class PartOptimizer(torch.optim.Optimizer):
    """An optimizer of fp32 tensors that are parameters or parts of them.

    A subclass has the names of its state, STATE, and `make_step`. State has the shape and dtype of the
    parameter, and begins with zeros; with COUNTS_STEPS there is also the number of updates of each parameter,
    "step".

    numbers: of all groups that have no others

    takes_numbers   a number may stand in place of the tensor `grad_scale`, by which torch's fused optimizers
                    divide gradients
    reads_low_grad  it reads `parameter.low_grad`, a 16-bit tensor of the same length, in place of `grad`
    writes_low      it writes `parameter.low`, a 16-bit tensor of the same length: the new value, rounded
    num_updates     steps so far, set when a run continues; an optimizer that reads it counts them
    """

    STATE: tuple[str, ...] = ()
    COUNTS_STEPS = False
    takes_numbers = False
    reads_low_grad = False
    writes_low = False
    num_updates = 0

    def __init__(self, params: Iterable, numbers: Mapping[str, Any]):
        super().__init__(params, dict(numbers))

    def add_param_group(self, param_group: dict) -> None:
        """Torch's method without its decorator, whose first call imports the compiler: more than a second."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch overloads it for the two kinds of `closure`
        self, closure: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Update the parameters; returns the loss of `closure`. Collective if `make_step` is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.make_step()
        return loss

    @abstractmethod
    def make_step(self) -> None:
        """Update the parameters with their gradients; these are not recorded."""

    def state_of(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made when it is first asked for."""
        state = self.state[p]
        if self.COUNTS_STEPS:
            state.setdefault("step", 0)
        for name in self.STATE:
            if name not in state:
                state[name] = self.zeros(p)
        return state

    def zeros(self, p: torch.Tensor) -> torch.Tensor:
        """Return the first value of a state of `p`."""
        return torch.zeros_like(p)

    def count_step(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, whose number of updates is one larger then."""
        state = self.state_of(p)
        # A value that is loaded from torch's optimizer is a tensor.
        state["step"] = int(state["step"]) + 1
        return state


@runtime_checkable
class Restarts(Protocol):
    """A torch optimizer of any class whose state does not begin with zeros."""

    def restart(self) -> None:
        """Set the state with which the optimizer begins; before the first update."""


class HalvedOptimizer(PartOptimizer):
    """An optimizer whose step has two halves, between which norms of whole parameters are computed."""

    @abstractmethod
    def advance(self) -> None:
        """Make the first half, which moves no parameter."""

    @abstractmethod
    def measured(self) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
        """Return (lists of tensors whose norms the second half needs, the parameters to which they belong)."""

    @abstractmethod
    def finish(self, norms: torch.Tensor) -> None:
        """Make the second half. norms: [lists, parameters]."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of all groups of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters that all have one."""
    return [p.grad for p in parameters if p.grad is not None]


def gradient_of(p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient to read: `p.low_grad`, a 16-bit tensor of the same length, in place of `p.grad`, if there
    is one."""
    low_grad = getattr(p, "low_grad", None)
    return p.grad if low_grad is None else low_grad
