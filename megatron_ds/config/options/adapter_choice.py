"""`Adapters`: what the core asks of the section of the configuration that adds trained weights to a frozen model.

The class here is the section of a package without extensions/lora: no options, and no effect. The section of that
wing is derived from it.
"""

from dataclasses import dataclass
from typing import Any

# Numbers of a frozen weight that have a scale together, where it is kept in few bits.
FROZEN_BLOCK = 64


@dataclass(frozen=True)
class Adapters:
    """Which linear layers have adapters."""

    @property
    def is_on(self) -> bool:
        """Whether there are adapters; then they alone are trained, and saved."""
        return False

    @property
    def base_bits(self) -> int | None:
        """Bits in which the frozen weights of linear layers are kept: 8, 4, or None for those of their dtype."""
        return None

    @property
    def dropout(self) -> float:
        """Probability with which an element of the input of an adapter is set to 0 in training."""
        return 0.0

    def identity(self) -> dict[str, Any]:
        """What a checkpoint of adapters must have in common with a run that loads it."""
        return {}
