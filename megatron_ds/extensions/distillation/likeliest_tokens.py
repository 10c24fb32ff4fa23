"""`LikeliestTokens`: the teacher's K likeliest tokens with their probabilities; all others are one outcome.

    divergence   over K + 1 outcomes, so never above that over the whole vocabulary, and 0 where both models agree
    log p        of another token: as the student divides what the teacher gives to all of them

With the second line the gradient is that of the whole vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ...mpu import collectives
from ...mpu.group import Group
from ...tensor_parallel.token_loss import Parts
from .divergence import Columns


class LikeliestTokens(NamedTuple):
    """Predictions for n tokens.

    tokens     int32 [n, K]
    log_probs  fp32 [n, K]
    others     fp32 [n], the log-probability of all other tokens together
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    others: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the loss."""
        return sum(t.nbytes for t in self)

    @property
    def objective(self) -> torch.Tensor:
        """What a pipeline stage attaches terms of layers to; without gradients there are none."""
        return self.others

    @contextmanager
    def reading(self, columns: Columns, reverse: bool) -> Iterator["LikeliestRows"]:
        """Not collective."""
        with torch.no_grad():
            yield LikeliestRows(self, columns, reverse)

    def divergence(
        self, facts: torch.Tensor, lse: torch.Tensor, reverse: bool
    ) -> torch.Tensor:
        """Return the divergence, as `TeacherTokens` describes it."""
        student, of_others = lse
        apart = self.others - of_others
        of_likeliest = facts[:, 2]
        if not reverse:
            of_others = self.others.exp() * apart
            of_likeliest = of_likeliest.sum(0)
            return of_likeliest + of_others + student
        # The student's share of each rank, and of all others.
        ranks = facts[:, 0] - student
        share = of_others - student
        of_likeliest = ranks.exp_() * of_likeliest
        of_likeliest = of_likeliest.sum(0)
        of_others = share.exp_() * apart
        return of_likeliest - of_others - student


class LikeliestRows(NamedTuple):
    """Rows of `teacher`, beside the student's logits in `columns`."""

    teacher: LikeliestTokens
    columns: Columns
    reverse: bool

    def facts(self, z: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the log of the sum of exponentials of all tokens, and of those that are not among the K; the K's
        part of the divergence."""
        column = self._column(rows)
        lse = z.logsumexp(-1)
        at = z.gather(-1, column)
        log_p = self.teacher.log_probs[rows]
        weights = log_p
        apart = log_p - at
        if self.reverse:
            weights = at - lse[:, None]
            apart = at - log_p
        # Other ranks have the rest of the K.
        is_elsewhere = column == self.columns.valid
        apart = apart * weights.exp()
        apart = apart.masked_fill_(is_elsewhere, 0)
        left = z.scatter(-1, column, -torch.inf)
        left = left.logsumexp(-1)
        return torch.stack([lse, left, apart.sum(-1)])

    def log_probs(
        self, z: torch.Tensor, rows: slice, lse: torch.Tensor
    ) -> torch.Tensor:
        """log p, as `TeacherRows` describes it."""
        column = self._column(rows)
        others = self.teacher.others[rows, None]
        log_p = z + (others - lse)
        return log_p.scatter_(-1, column, self.teacher.log_probs[rows])

    def _column(self, rows: slice) -> torch.Tensor:
        """int64 [rows, K], the columns of the K tokens; the last column, which counts for nothing, where another rank
        has them."""
        tokens = self.teacher.tokens[rows].long()
        column = tokens - self.columns.start
        valid = self.columns.valid
        is_elsewhere = (column < 0) | (column > valid)
        return column.masked_fill_(is_elsewhere, valid)


def likeliest_tokens(parts: Parts, columns: Columns, count: int) -> LikeliestTokens:
    """Return the `count` likeliest of all tokens. parts: the teacher's logits. Collective: an all-gather of `count`
    tokens of each rank, and of their logits."""
    found = [_of_columns(logits, columns, count) for _, logits in parts]
    tokens, values, others = map(torch.cat, zip(*found, strict=True))
    # The candidates of all ranks, [n, t K].
    tokens = _of_all_ranks(tokens, columns.group)
    values = _of_all_ranks(values, columns.group)
    chosen, place = values.topk(count, dim=-1)
    # All others: candidates that are not chosen, and tokens that are no candidates.
    left = values.scatter_(-1, place, -torch.inf)
    no_candidates = _of_all_ranks(others.unsqueeze(1), columns.group)
    others = torch.cat([left, no_candidates], dim=1)
    others = others.logsumexp(-1)
    lse = torch.logaddexp(others, chosen.logsumexp(-1))
    chosen -= lse[:, None]
    tokens = tokens.gather(-1, place)
    return LikeliestTokens(tokens, chosen, others - lse)


def _of_all_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x [n, k] → [n, t k]. Collective: all-gather."""
    gathered = collectives.all_gather(x.unsqueeze(0), group)
    return gathered.transpose(0, 1).flatten(1)


def _of_columns(
    logits: torch.Tensor, columns: Columns, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens int32 [rows, K], scaled logits [rows, K], log of the sum of exponentials of the others [rows]) of a
    rank; ranks that have no K tokens add columns of padding."""
    width = logits.shape[1]
    y = columns.scaled(logits)
    y = pad(y, (0, width - columns.valid), value=-torch.inf)
    values, column = y.topk(min(count, width), dim=-1)
    left = y.scatter_(-1, column, -torch.inf)
    others = left.logsumexp(-1)
    tokens = column + columns.start
    tokens = tokens.int()
    return tokens, values, others
