"""`SequenceLengths`: the lengths of the sequences of a run that does not train on whole samples from the start."""

from typing import Protocol


class SequenceLengths(Protocol):
    """Functions of the step, counted from 1."""

    def at(self, step: int) -> int:
        """Return the length in a step. A sample that is shorter stays whole."""

    def is_settled(self, step: int) -> bool:
        """Return whether later steps are known to have the length of this one."""

    def rows(self, whole: int, length: int) -> int:
        """Return the number of sequences of `length` tokens into which a sample of `whole` tokens is cut."""
