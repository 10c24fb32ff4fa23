"""`WholeTeacher`: the teacher's distribution over the whole vocabulary.

It keeps the hidden states before the head rather than logits, which are V'/t columns: the head's product is computed
again for the rows that are read, in forward and in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ...mpu import collectives
from ...ops.product import affine
from ...ops.soft_cap import cap_
from .divergence import Columns


@dataclass(frozen=True)
class WholeTeacher:
    """x [s(/t), b, h], the hidden states; weight [V'/t, h] and bias [V'/t] or None of the head.

    sequence_parallel: x is a slice of the sequence
    cap: bound of the logits, cap tanh(logits / cap)
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    sequence_parallel: bool
    cap: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the loss."""
        return self.x.nbytes

    @property
    def objective(self) -> torch.Tensor:
        """What a pipeline stage attaches terms of layers to; without gradients there are none."""
        return self.x

    @contextmanager
    def reading(self, columns: Columns, reverse: bool) -> Iterator["WholeRows"]:
        """Collective with sequence parallelism, which gathers hidden states."""
        with torch.no_grad():
            x = self.x.contiguous()
            if self.sequence_parallel and columns.group.size > 1:
                x = collectives.all_gather(x, columns.group)
            flat = x.view(-1, x.shape[-1])
            yield WholeRows(columns, reverse, partial(self._logits, flat))

    def divergence(
        self, facts: torch.Tensor, lse: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        """Return the divergence, as `TeacherTokens` describes it."""
        student, teacher = lse
        of_ranks = facts[:, 1]
        of_all = teacher
        other = student
        if reverse:
            of_ranks = facts[:, 0]
            of_all = student
            other = teacher
        # The weight of a rank is its share of the probability over which the mean is taken.
        weights = (of_ranks - of_all).exp_()
        return (weights * facts[:, 2]).sum(0) - of_all + other

    def _logits(self, flat: torch.Tensor, rows: slice) -> torch.Tensor:
        logits = affine(flat[rows], self.weight, self.bias)
        return logits if self.cap is None else cap_(logits, self.cap)


@dataclass(frozen=True)
class WholeRows:
    """logits: a slice of the tokens → the teacher's logits [rows, V'/t]."""

    columns: Columns
    reverse: bool
    logits: Callable[[slice], torch.Tensor]

    def facts(self, z: torch.Tensor, rows: slice) -> torch.Tensor:
        """Facts of `TeacherRows`: the second is that of the teacher; the third is the mean difference of scaled logits
        in this rank's columns under the teacher, or under the student in reverse."""
        valid = self.columns.valid
        facts = z.new_full((3, len(z)), -torch.inf)
        facts[2] = 0
        y = self.columns.scaled(self.logits(rows))
        if not valid:
            return facts
        z = z[:, :valid]
        y = y[:, :valid]
        facts[0] = z.logsumexp(-1)
        facts[1] = y.logsumexp(-1)
        of = z if self.reverse else y
        difference = z - y if self.reverse else y - z
        facts[2] = difference.mul_(of.softmax(-1)).sum(-1)
        return facts

    def log_probs(
        self, z: torch.Tensor, rows: slice, lse: torch.Tensor
    ) -> torch.Tensor:
        """log p, as `TeacherRows` describes it."""
        return self.columns.scaled(self.logits(rows)).sub_(lse)
