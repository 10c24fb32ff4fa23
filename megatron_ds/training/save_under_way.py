"""`SaveUnderWay`: what a training step needs of a checkpoint that is written in the background."""

from typing import Protocol


class SaveUnderWay(Protocol):
    """is_written: this rank has written its file, if there is a save. `saves.Saves` is one."""

    is_written: bool

    def before_update(self) -> None:
        """Called before weights and optimizer state change."""
