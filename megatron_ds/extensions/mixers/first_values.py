"""First values of the weights of mixers, drawn by `tensor_parallel.init` as every other weight: by seed and name."""

import math
from dataclasses import dataclass

import torch

from ...mpu.param_spec import Init

FACTORS = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
LEAST_STEP = 1e-4


@dataclass(frozen=True)
class Uniform:
    """Draws numbers between two bounds."""

    low: float
    high: float

    def __call__(self, out: torch.Tensor, generator: torch.Generator) -> None:
        """Fill `out`, flat fp32 on the CPU."""
        out.uniform_(self.low, self.high, generator=generator)


def _log_of_factor(out: torch.Tensor, generator: torch.Generator) -> None:
    out.uniform_(*FACTORS, generator=generator).log_()


def _softplus_of_step(out: torch.Tensor, generator: torch.Generator) -> None:
    low, high = map(math.log, STEPS)
    steps = out.uniform_(low, high, generator=generator).exp_().clamp_(min=LEAST_STEP)
    # The inverse of softplus: softplus(t + log(1 - exp(-t))) = t.
    out.copy_(steps + torch.log(-torch.expm1(-steps)))


def within(low: float, high: float) -> Init:
    """Return uniform values between two bounds."""
    return Init("drawn", draw=Uniform(low, high))


def log_of_factor() -> Init:
    """Return logarithms of factors that are uniform from 1 to 16 (Dao and Gu 2024, Mamba-2's own program)."""
    return Init("drawn", draw=_log_of_factor)


def softplus_of_step() -> Init:
    """Return values whose softplus are steps, the logarithms of which are uniform (Gu and Dao 2023,
    arXiv:2312.00752, section 3.6)."""
    return Init("drawn", draw=_softplus_of_step)
