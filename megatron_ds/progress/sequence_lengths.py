"""`SequenceLengths`: the lengths of the sequences of a run that does not train on whole samples from the start."""

from typing import Protocol


class SequenceLengths(Protocol):
    """Functions of the step, counted from 1."""

    def at(self, step: int) -> int:
        """The length in a step. It may be above that of a sample, which is whole then."""

    def is_settled(self, step: int) -> bool:
        """Whether later steps are known to have the length of this one."""

    def rows(self, whole: int, length: int) -> int:
        """Sequences of `length` tokens that a sample of `whole` tokens becomes."""
