"""Rotary frequencies of models that read longer sequences than those they were first trained with.

A scaling is a value, called with the frequencies fp32 [r/2] of `rotary_tables`, in radians a token; it
returns those to use. Its `amplitude` multiplies queries and keys where they are rotated. Another way of
scaling is another class here, and a line in `rotary_scalings` of models/attention.py.

    LinearScaling    all waves are stretched
    ntk_base         waves are stretched the more the longer they are: another base
    Llama3Scaling    waves that are long compared with the sequences of the first training are stretched
    YarnScaling      the same with other bounds, and sharper scores
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Scaling(Protocol):
    """What `rotary_tables` takes."""

    @property
    def amplitude(self) -> float:
        """Factor of cos and sin."""

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return the frequencies to use, fp32 [r/2], in place of these."""


@dataclass(frozen=True)
class LinearScaling:
    """All positions lie closer together by `factor`. Chen et al. 2023 (arXiv:2306.15595), equation 4."""

    factor: float
    amplitude = 1.0

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
    amplitude = 1.0

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divides low frequencies."""
        turns = frequencies * (self.original / (2 * math.pi))
        unchanged = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(frequencies / self.factor, frequencies, unchanged)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies are divided by `factor`, and scores grow. Peng et al. 2023 (arXiv:2309.00071).

    Section 3.2: pairs of more than `fast` turns in `original` tokens are unchanged, those of less than `slow`
    divided by `factor`, and in between the mean of both, weighted linearly in the number of the pair.
    Section 3.4: the square root of the scores' factor is 0.1 ln(factor) + 1, here the amplitude.

    base            of the rotary angles
    rounds          bounds are whole numbers of pairs, as the authors' code has it
    mscale, mscale_all_dim   weights of ln(factor) in the amplitude and in its divisor (DeepSeek-V2,
                    arXiv:2405.04434, section 3.1.4)
    """

    factor: float
    original: int
    base: float = 10000.0
    fast: float = 32.0
    slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounds: bool = True

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        return yarn_growth(self.factor, self.mscale) / yarn_growth(
            self.factor, self.mscale_all_dim
        )

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Divides low frequencies."""
        pairs = len(frequencies)
        first = self._pair_of(self.fast, pairs)
        last = self._pair_of(self.slow, pairs)
        if self.rounds:
            first = math.floor(first)
            last = math.ceil(last)
        # the authors' bound: channels, not pairs
        first = max(first, 0)
        last = min(last, 2 * pairs - 1)
        numbers = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        stretched = ((numbers - first) / (last - first or 1e-3)).clamp(0, 1)
        return torch.lerp(frequencies, frequencies / self.factor, stretched)

    def _pair_of(self, turns: float, pairs: int) -> float:
        """Return the number of the pair that turns so often in `original` tokens."""
        return (
            pairs
            * math.log(self.original / (turns * 2 * math.pi))
            / math.log(self.base)
        )


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """Square root of the factor of the scores: 0.1 * weight * ln(factor) + 1. Section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def ntk_base(
    base: float, channels: int, factor: float, original: int, length: int
) -> float:
    """Base of the angles of sequences of `length` tokens, after training with `original`: dynamic NTK.

    The fastest pair turns as before, and the slowest is divided by factor * length / original - (factor - 1),
    which is 1 for the original length. Peng et al. 2023 (arXiv:2309.00071), sections 3.1 and 3.3.
    channels: r, those of a head that are rotated
    """
    stretch = factor * max(length, original) / original - (factor - 1)
    return base * stretch ** (channels / max(channels - 2, 1))
