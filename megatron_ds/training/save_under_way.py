"""`SaveUnderWay`: what a training step needs of a checkpoint that is written in the background."""

from typing import Protocol


class SaveUnderWay(Protocol):
    """is_ready: this rank has done its part of the save, if there is one. `saves.Saves` is one."""

    is_ready: bool

    def before_update(self) -> None:
        """Called before weights and optimizer state change."""
