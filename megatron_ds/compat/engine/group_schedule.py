"""`GroupSchedule`: a scheduler in DeepSpeed's way, of the JSON or made by a program from a torch optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class NumberOfStep(Protocol):
    """A learning rate or a beta, by the number of the step."""

    def at(self, index: int, /) -> float:
        """Return the value after index + 1 steps."""
        ...


class GroupSchedule:
    """Sets the learning rate, and with `betas` Adam's beta1, of each parameter group of an optimizer.

    optimizer     an object with `param_groups`
    rates, betas  one for each group; `at(i)` is the value after i + 1 steps
    last_batch_iteration  number of the last step, counted from 0; −1 before the first
    """

    def __init__(
        self,
        optimizer: Any,
        rates: Sequence[NumberOfStep],
        last_batch_iteration: int = -1,
        betas: Sequence[NumberOfStep] | None = None,
    ):
        self.optimizer = optimizer
        self._rates = list(rates)
        self._betas = betas
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the numbers for the next update, or for the one of this number."""
        next_one = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            next_one if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """Learning rates of the next update, one for each group."""
        return [rate.at(self.last_batch_iteration) for rate in self._rates]

    def get_last_lr(self) -> list[float]:
        """Return the same, under torch's name."""
        return self.get_lr()

    def get_mom(self) -> list[Any]:
        """Betas, or the momentum, of each group."""
        return [
            group.get("betas", group.get("momentum"))
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, int]:
        """Plain values (JSON), for `load_state_dict`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, int]) -> None:
        """Restore a `state_dict` and set its numbers."""
        self.step(sd["last_batch_iteration"])

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            group["lr"] = lr
        for group, beta1 in zip(self.optimizer.param_groups, self._betas or ()):
            if "betas" in group:
                group["betas"] = (
                    beta1.at(self.last_batch_iteration),
                    group["betas"][1],
                )
