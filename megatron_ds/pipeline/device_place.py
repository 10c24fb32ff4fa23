"""`DevicePlace`: how far a GPU has come in the instructions of a step.

The host launches a whole step ahead of the device, so its own place does not show where the device waits for
another rank. An event behind each instruction does; they are asked only for a message.
"""

import torch

from .instruction import Instruction


class DevicePlace:
    """The events of one rank, which later steps record again."""

    def __init__(self):
        self._launched: list[Instruction] = []
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """A step begins."""
        self._launched = []

    def add(self, instruction: Instruction) -> None:
        """All work of the instruction is launched."""
        at = len(self._launched)
        if at == len(self._events):
            self._events.append(torch.cuda.Event())
        self._events[at].record()
        self._launched.append(instruction)

    def completed(self) -> int:
        """Number of instructions whose work the device has done."""
        states = (event.query() for event in self._events[: len(self._launched)])
        return next(
            (at for at, is_done in enumerate(states) if not is_done),
            len(self._launched),
        )

    def current(self) -> tuple[int, int, Instruction | None]:
        """(instructions done, launched, the one at which the device is; None: behind all of them)."""
        done = self.completed()
        at = self._launched[done] if done < len(self._launched) else None
        return done, len(self._launched), at
