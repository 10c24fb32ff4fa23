"""`AddedWeights`: what the core knows of weights that are trained beside a model whose own weights are frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Numbers of a frozen weight that have a scale together, where it is kept in few bits.
FROZEN_BLOCK = 64


@dataclass(frozen=True)
class AddedWeights:
    """They alone are trained, and saved.

    noun         the name of the feature, in messages and as the part of a checkpoint's identity
    identity     what a checkpoint of them must have in common with a run that loads it
    frozen_bits  bits in which the frozen weights of linear layers are kept: 8, 4, or None for those of their dtype
    dropout      probability with which an element of their input is set to 0 in training
    """

    noun: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    frozen_bits: int | None = None
    dropout: float = 0.0
