"""`Curriculum` and `TokenDropping`: what the core asks of two sections of the configuration.

The classes here are the sections of a package without extensions/data_efficiency: no options, and no effect.
The sections of that wing are derived from them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...progress.sequence_lengths import SequenceLengths
from ...progress.token_drop import TokenDrop
from .model import ModelConfig


@dataclass(frozen=True)
class Curriculum:
    """Which samples a step has, and how much of each."""

    @property
    def changes_lengths(self) -> bool:
        """Whether sequences are shorter than samples in some steps."""
        return False

    @property
    def orders_samples(self) -> bool:
        """Whether there is an order of the samples of one epoch, in place of --dataloader-type."""
        return False

    @property
    def stated_lengths(self) -> tuple[int | None, ...]:
        """Lengths that options name, which a sample must have; None: not given."""
        return ()

    def lengths(self, seq_length: int) -> SequenceLengths | None:
        """The lengths of sequences, of samples of `seq_length` tokens; None: samples are whole. Raises ConfigError."""
        return None

    def identity(self) -> dict[str, Any]:
        """Return the entries of the identity of the data, in checkpoints."""
        return {}

    def index_prefixes(self) -> Iterator[tuple[str, str]]:
        """Return (description, prefix) of the index files that the order is made from."""
        return iter(())


@dataclass(frozen=True)
class TokenDropping:
    """Which blocks process a part of each sequence."""

    @property
    def is_on(self) -> bool:
        """Whether there are such blocks."""
        return False

    @property
    def stated_lengths(self) -> tuple[int | None, ...]:
        """Numbers of tokens that options name, which a sequence must have; None: not given."""
        return ()

    def token_drop(self, model: ModelConfig) -> TokenDrop | None:
        """The tokens that blocks keep; None: all."""
        return None
