"""`RandomStates`: states of the device's generator by name, so that parts of a model draw from generators of
their own: dropout of tensor-parallel regions differs between ranks, and other dropout is the same.

    states.add("model-parallel-rng", seed)
    with states.fork():                     # draws from this state, and keeps where it ends
        x = dropout(x)
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

NAME = "model-parallel-rng"


class RandomStates:
    """The states, by name."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return the states now."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from these."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state. Raises ValueError if there is one of this name."""
        if name in self.states_:
            raise ValueError(
                f"there is a random state {name!r} already. Call reset() first, or use another "
                "name."
            )
        before = get_state()
        (torch.cuda.manual_seed if torch.cuda.is_available() else torch.manual_seed)(
            seed
        )
        self.states_[name] = get_state()
        set_state(before)

    @contextmanager
    def fork(self, name: str = NAME) -> Iterator[None]:
        """Draw from the state of this name inside. Raises ValueError if there is none."""
        if name not in self.states_:
            raise ValueError(
                f"there is no random state {name!r}. Call add({name!r}, seed) before."
            )
        before = get_state()
        set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_state()
            set_state(before)

    def at(self, states: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Go on from these states inside, and from the present ones afterwards. May be entered several times:
        each backward of a retained graph recomputes.
        """
        return _At(self, states)


class _At(AbstractContextManager):
    """The context of `RandomStates.at`: a stack of the states to restore."""

    def __init__(self, owner: RandomStates, states: dict[str, torch.Tensor]):
        self._owner = owner
        self._states = states
        self._before: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._before.append(self._owner.get_states())
        self._owner.set_states(self._states)

    def __exit__(self, *error: Any) -> None:
        self._owner.set_states(self._before.pop())


def get_state() -> torch.Tensor:
    """Return the state of the generator of the GPU; without one, of the CPU."""
    return (
        torch.cuda.get_rng_state()
        if torch.cuda.is_available()
        else torch.get_rng_state()
    )


def set_state(state: torch.Tensor) -> None:
    """Set it."""
    (torch.cuda.set_rng_state if torch.cuda.is_available() else torch.set_rng_state)(
        state
    )
