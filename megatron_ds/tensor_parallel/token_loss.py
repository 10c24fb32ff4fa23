"""`TokenLoss`: a loss of each token that reads the logits of a rank's columns some rows at a time; `LabelLoss`, the
cross entropy with labels.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from ..mpu.group import Group
from ..ops.logits import cross_entropy_facts, cross_entropy_gradient_
from .cross_entropy import target_weights, token_losses

# (rows, their logits [rows, V'/t]), in order; the next iteration overwrites the logits.
Parts = Iterator[tuple[slice, torch.Tensor]]


class TokenLoss(Protocol):
    """The losses of n tokens whose vocabulary is split over a group. It keeps between forward and backward what its
    gradient needs besides the logits."""

    def of(self, parts: Parts) -> torch.Tensor:
        """Return the loss of each token, fp32 [n], or [r, n] of r losses; the same on every rank. Collective."""

    def gradients(self, parts: Parts, dlosses: torch.Tensor) -> Parts:
        """Yields (rows, the gradient by their logits), which overwrites these. dlosses: as the result of `of`."""


class LabelLoss:
    """labels int64 [n], counted from this rank's first column; valid: its columns that are no padding."""

    def __init__(
        self,
        labels: torch.Tensor,
        valid: int,
        group: Group,
        vocab_size: int,
        label_smoothing: float,
    ):
        self.labels = labels
        self.valid = valid
        self.group = group
        self.vocab_size = vocab_size
        self.label_smoothing = label_smoothing

    def of(self, parts: Parts) -> torch.Tensor:
        """Return the cross entropy. Collective: all-gather."""
        smoothed = self.label_smoothing > 0
        facts = [
            cross_entropy_facts(logits, self.labels[rows], self.valid, smoothed)
            for rows, logits in parts
        ]
        loss, self.lse = token_losses(
            torch.cat(facts, dim=1), self.group, self.vocab_size, self.label_smoothing
        )
        return loss

    def gradients(self, parts: Parts, dlosses: torch.Tensor) -> Parts:
        """Yields probabilities less targets, times `dlosses`."""
        target = target_weights(self.label_smoothing, self.vocab_size)
        for rows, logits in parts:
            yield (
                rows,
                cross_entropy_gradient_(
                    logits,
                    self.labels[rows],
                    self.lse[rows],
                    dlosses[rows],
                    self.valid,
                    *target,
                ),
            )
