"""Rotary frequencies of models that read longer sequences than those they were first trained with.

A scaling is a value, called with the frequencies fp32 [r/2] of `rotary_tables`, in radians a token; it
returns those to use. Another way of scaling is another class here, and a line in `rotary_scalings` of
models/attention.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Scaling = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LinearScaling:
    """All positions lie closer together by `factor`. Chen et al. 2023 (arXiv:2306.15595), equation 4."""

    factor: float

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divides all frequencies."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: only waves that are long compared with the sequences of the first training are stretched.

    With n turns in `original` tokens a frequency is unchanged for n > high, divided by `factor` for n < low,
    and in between the mean of both, weighted linearly in n. Peng et al. 2023 (arXiv:2309.00071), section 3.2,
    is the same with other bounds.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divides low frequencies."""
        turns = frequencies * (self.original / (2 * math.pi))
        unchanged = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(frequencies / self.factor, frequencies, unchanged)
