"""`KeptTokens`: the tokens that blocks keep where some of them process a part of each sequence."""

from dataclasses import dataclass
from typing import Protocol


class Difficulty(Protocol):
    """An integer as a function of the step, which never falls."""

    @property
    def maximum(self) -> int:
        """The last and largest one."""

    def at(self, step: int) -> int:
        """Return the value of a step. The schedule defines whether steps count from 0 or from 1."""


@dataclass(frozen=True)
class KeptTokens:
    """The blocks that drop tokens, of `num_blocks` in all, and the tokens of a sequence that they keep.

    Steps count from 0 here, as DeepSpeed's do: the first step of a run uses `kept_at(0)`, which is
    `Progress.step`.

    title: of the number in the log line of a step, and with underscores its tag in TensorBoard
    """

    blocks: tuple[int, ...]
    num_blocks: int
    kept: Difficulty
    title: str = "kept tokens"

    def kept_at(self, step: int, length: int | None = None) -> int:
        """Return the tokens of a sequence that the blocks keep. length: of the sequence, if it is shortened."""
        kept = self.kept.at(step)
        return kept if length is None else min(kept, length)

    def layer_tokens(self, step: int, length: int) -> int:
        """Return the tokens of one sequence, summed over the blocks that process them."""
        return (
            len(self.blocks) * self.kept_at(step, length)
            + (self.num_blocks - len(self.blocks)) * length
        )
