"""Rows of optimizer updates: the tensors that one update reads and writes, and the numbers of all rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

# Number of updates after which every beta**step is 0, and the correction of the moments 1.
UNCORRECTED = 1 << 62


class AdamRow(NamedTuple):
    """The tensors of one update: contiguous, on one device, of the same length.

    p     fp32 weight, updated in place as m and v, the moments, are
    grad  only read; fp32, bf16 or fp16
    step  number of this update, from 1; UNCORRECTED: moments are used as they are
    low   bf16 or fp16: receives p, rounded to nearest even
    """

    p: torch.Tensor
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: int
    low: torch.Tensor | None = None


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one update of all rows.

    divisor  of the gradients, a number or an fp32 scalar on the rows' device, rounded to fp32
    skip     None or an fp32 scalar on that device: nothing is updated if it is not 0
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    divisor: float | torch.Tensor = 1.0
    skip: torch.Tensor | None = None

    @property
    def grad_scale(self) -> float:
        """1 / divisor. The host waits for it if it is on a GPU."""
        return 1.0 / fp32(float(self.divisor))


def fp32(x: float) -> float:
    """x rounded to fp32: torch would use a Python number in double for some operations."""
    return float(np.float32(x))


class UpdateRow(NamedTuple):
    """The tensors of one update: contiguous, on one device, of the same length.

    p      fp32 weight, updated in place as `state` is
    grad   only read; fp32, bf16 or fp16
    low    None, or bf16 or fp16: receives p, rounded to nearest even
    """

    p: torch.Tensor
    grad: torch.Tensor
    state: torch.Tensor
    low: torch.Tensor | None = None
