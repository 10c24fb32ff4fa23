"""`DistilledTokens`: the language loss of each token, and the divergence of the student from the teacher, of logits
whose vocabulary is split over the group.

    p, q                softmax of the teacher's and of the student's logits, both divided by the temperature
    forward, KL(p, q)   Σ p (log p - log q)         gradient by the student's scaled logits   q - p
    reverse, KL(q, p)   Σ q (log q - log p)                                                   q (log q - log p - KL)

Hinton et al. 2015 (arXiv:1503.02531, section 2) have the first, and its factor T² in the loss; Gu et al. 2023
(arXiv:2306.08543, section 2) the second. Each rank computes five numbers per token of its own columns, and one
all-gather of them gives both losses on every rank. Rows are read some at a time, and gradients overwrite the logits.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ...mpu import collectives
from ...mpu.group import Group
from ...ops.logits import cross_entropy_facts, cross_entropy_gradient_
from ...tensor_parallel.cross_entropy import own_columns
from ...tensor_parallel.token_loss import Parts


class TeacherRows(Protocol):
    """The predictions of a teacher for some rows. z fp32 [rows, valid + 1]: the student's scaled logits, -inf in the
    last column."""

    def facts(self, z: torch.Tensor, rows: slice) -> torch.Tensor:
        """fp32 [3, rows] of this rank's columns: the log of the sum of exponentials of z; another one, of which
        `log_probs` needs that over all ranks; a part of the divergence."""

    def log_probs(
        self, z: torch.Tensor, rows: slice, lse: torch.Tensor
    ) -> torch.Tensor:
        """log p [rows, valid + 1], of no meaning in the last column. lse [rows, 1]: the second of the facts, over all
        ranks."""


class TeacherTokens(Protocol):
    """The predictions of a teacher for the n tokens of a micro-batch."""

    @property
    def nbytes(self) -> int:
        """Bytes of the predictions."""

    def reading(
        self, columns: "Columns", reverse: bool
    ) -> AbstractContextManager[TeacherRows]:
        """Inside, rows can be read. Collective."""

    def divergence(
        self, facts: torch.Tensor, lse: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        """fp32 [n]. facts [t, 3, n] of all ranks; lse [2, n]: the first two, over all ranks."""


class Columns:
    """The columns of a rank: from `start` on, of which `valid` are no padding, of logits divided by `temperature`."""

    def __init__(self, width: int, group: Group, vocab_size: int, temperature: float):
        self.start, self.valid = own_columns(width, group, vocab_size)
        self.group = group
        self.temperature = temperature

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, V'/t] → fp32 [rows, valid + 1], divided by the temperature, -inf in the last column."""
        z = logits.new_empty(len(logits), self.valid + 1, dtype=torch.float32)
        torch.div(logits[:, : self.valid], self.temperature, out=z[:, : self.valid])
        z[:, self.valid] = -torch.inf
        return z


class DistilledTokens:
    """A `TokenLoss` with two losses: language loss, and divergence.

    labels   int64 [n], of the whole vocabulary
    teacher  of the same tokens
    """

    def __init__(
        self,
        labels: torch.Tensor,
        columns: Columns,
        teacher: TeacherTokens,
        reverse: bool,
    ):
        self.labels = labels - columns.start
        self.columns = columns
        self.teacher = teacher
        self.reverse = reverse

    def of(self, parts: Parts) -> torch.Tensor:
        """fp32 [2, n]. Collective: all-gather of five numbers per token."""
        columns = self.columns
        found = []
        with self.teacher.reading(columns, self.reverse) as teacher:
            for rows, logits in parts:
                labels = self.labels[rows]
                own = cross_entropy_facts(logits, labels, columns.valid, False)
                found.append(
                    torch.cat([own, teacher.facts(columns.scaled(logits), rows)])
                )
        # The facts of all ranks.
        facts = torch.cat(found, dim=1).unsqueeze(0)
        facts = collectives.all_gather(facts, columns.group)  # [t, 5, n]
        self.lse = facts[:, 0].logsumexp(0)
        language = self.lse - facts[:, 1].sum(0)
        self.scaled_lse = facts[:, 2:4].logsumexp(0)
        self.apart = self.teacher.divergence(
            facts[:, 2:], self.scaled_lse, self.reverse
        )
        return torch.stack([language, self.apart])

    def gradients(self, parts: Parts, dlosses: torch.Tensor) -> Parts:
        """Yields the gradients, dlosses [2, n]."""
        columns = self.columns
        valid = columns.valid
        on_label, on_divergence = dlosses
        on_divergence = on_divergence / columns.temperature
        with self.teacher.reading(columns, self.reverse) as teacher:
            for rows, logits in parts:
                z = columns.scaled(logits)
                lse, other = self.scaled_lse[:, rows, None]
                log_p = teacher.log_probs(z, rows, other)
                log_q = z.sub_(lse)
                if self.reverse:
                    apart = self.apart[rows, None]
                    gradient = (log_q - log_p).sub_(apart).mul_(log_q.exp())
                else:
                    gradient = log_q.exp_().sub_(log_p.exp_())
                gradient *= on_divergence[rows, None]
                # The divergence was of the logits that this overwrites.
                labels = self.labels[rows]
                on_rows = on_label[rows]
                cross_entropy_gradient_(
                    logits, labels, self.lse[rows], on_rows, valid, 1.0, 0.0
                )
                logits[:, :valid] += gradient[:, :valid]
                yield rows, logits
