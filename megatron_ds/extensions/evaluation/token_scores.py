"""Log-probabilities of given tokens, and the likeliest ones, of logits whose vocabulary is split over the group.

Each rank computes four numbers per token of its own columns: the log of the sum of exponentials, the label's
logit where the rank holds it, the largest logit and its column. One all-gather of them gives the result on
every rank; whole logits are neither gathered nor kept.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...mpu import collectives
from ...mpu.group import Group
from ...ops.logits import cross_entropy_facts
from ...tensor_parallel.cross_entropy import own_columns
from ...tensor_parallel.logits_in_chunks import LogitsInChunks


class TokenScores(NamedTuple):
    """log_probs fp32 [s, b] of the labels; likeliest int64 [s, b], the token with the largest logit, the first
    one of equals."""

    log_probs: torch.Tensor
    likeliest: torch.Tensor

    @property
    def objective(self) -> torch.Tensor:
        """What a pipeline stage attaches terms of layers to; without gradients there are none."""
        return self.log_probs


def token_scores(
    logits: torch.Tensor | LogitsInChunks,
    labels: torch.Tensor,
    group: Group,
    vocab_size: int,
) -> TokenScores:
    """logits [s, b, V'/t], labels [s, b] in [0, vocab_size) → the scores, the same on every rank.

    Columns from `vocab_size` on are padding. Collective: an all-gather of four numbers per token; for
    `LogitsInChunks` with sequence parallelism another one, of hidden states.
    """
    flat = labels.reshape(-1)
    parts: Iterable[tuple[slice, torch.Tensor]]
    if isinstance(logits, LogitsInChunks):
        parts = logits.parts()
    else:
        parts = [(slice(None), logits.flatten(0, -2))]
    found = [_facts(part, flat[rows], group, vocab_size) for rows, part in parts]
    # Of all ranks: the sum of exponentials, the label's logit, and the first of the largest logits.
    facts = collectives.all_gather(torch.cat(found, dim=1).unsqueeze(0), group)
    log_probs = facts[:, 1].sum(0) - facts[:, 0].logsumexp(0)
    holder = facts[:, 2].argmax(0, keepdim=True)
    likeliest = facts[:, 3].gather(0, holder)[0].long()
    return TokenScores(log_probs.view(labels.shape), likeliest.view(labels.shape))


def _facts(
    logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab_size: int
) -> torch.Tensor:
    """logits [n, V'/t] → fp32 [4, n] of this rank's columns."""
    start, valid = own_columns(logits.shape[-1], group, vocab_size)
    sums = cross_entropy_facts(logits, labels - start, valid, False)
    largest = torch.full_like(sums, -torch.inf)
    if valid:
        largest[0], column = logits[:, :valid].max(-1)
        largest[1] = column + start
    return torch.cat([sums, largest])
