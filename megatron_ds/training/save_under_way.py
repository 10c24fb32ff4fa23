"""`SaveUnderWay`: what a training step needs of a checkpoint that is written in the background."""

from typing import Protocol


class SaveUnderWay(Protocol):
    """A save of a run, if there is one. `saves.Saves` has these members."""

    @property
    def is_ready(self) -> bool:
        """Whether this rank has done its part."""

    def before_update(self) -> None:
        """Called before weights and optimizer state change."""
