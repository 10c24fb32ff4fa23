"""Cross entropy of logits whose vocabulary is split over the group, with its own backward.

Each rank computes a few numbers per token of its own columns (ops/logits.py): the log of the sum of
exponentials, lse_r; the label's logit where the rank holds it; the sum of logits for smoothing. One
all-gather of them gives the rest on every rank:

    lse = log Σ_r exp(lse_r)                    loss = lse - logit[label]
    p = exp(logit - lse)                        dlogit = p - target

So a call has one small collective in forward and none in backward, and allocates no buffer of the size of the
logits, which are the largest tensor of a training step: the gradient overwrites them.

Columns from `vocab_size` on are padding: their probability and gradient are exactly zero.
"""

import torch
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.group import Group
from ..ops.logits import keep_logits


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: Group,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """logits [s, b, V'/t], labels [s, b] in [0, vocab_size) → loss per token, fp32 [s, b].

    The same on every rank. Overwrites the logits. Smoothing as in `reference_cross_entropy`, over the
    whole vocabulary for any t. One backward per forward. Collective: all-gather.
    """
    return _CrossEntropy.apply(logits, labels, group, vocab_size, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group, vocab_size, label_smoothing):
        assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
        start, valid = own_columns(logits.shape[-1], group, vocab_size)
        kept = keep_logits(
            logits.detach().flatten(0, -2), labels.reshape(-1) - start, valid
        )
        loss, lse = token_losses(
            kept.facts(label_smoothing > 0), group, vocab_size, label_smoothing
        )
        kept.settle(lse)
        ctx.kept = kept
        ctx.shape = logits.shape
        ctx.target = target_weights(label_smoothing, vocab_size)
        return torch.ops.aten._unsafe_view(
            loss, labels.shape
        )  # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        kept = ctx.kept
        ctx.kept = None
        assert kept is not None, (
            "the first backward overwrote the logits: run the forward again"
        )
        return (
            kept.gradient_(dloss.reshape(-1), *ctx.target).view(ctx.shape),
            None,
            None,
            None,
            None,
        )


def own_columns(width: int, group: Group, vocab_size: int) -> tuple[int, int]:
    """(first of the rank's columns, number of them without padding), for `width` columns on each rank."""
    start = group.rank * width
    return start, max(0, min(width, vocab_size - start))


def token_losses(
    facts: torch.Tensor, group: Group, vocab_size: int, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """facts [k, n] of this rank's columns → loss of each token and lse over all columns, fp32 [n].

    facts: of `ops.logits.cross_entropy_facts`. Collective: all-gather.
    """
    facts = collectives.all_gather(facts.unsqueeze(0), group)  # [t, k, n]
    lse = torch.logsumexp(facts[:, 0], dim=0)
    loss = lse - facts[:, 1].sum(0)
    if label_smoothing:
        weight = smoothing_weight(label_smoothing, vocab_size)
        # -mean log p = lse - mean logit
        loss = (1 - weight) * loss + weight * (lse - facts[:, 2].sum(0) / vocab_size)
    return loss, lse


def target_weights(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
    """Return the target's part on the label alone, and its part on each token of the vocabulary."""
    weight = smoothing_weight(label_smoothing, vocab_size) if label_smoothing else 0.0
    return 1 - weight, weight / vocab_size


def reference_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss of whole logits [.., V'] and labels [..]; columns from `vocab_size` on are ignored.

    Smoothing as in Megatron: the label's target is 1 - e, every other token's e / (vocab_size - 1). (torch
    spreads e over all tokens, the label included: its e is Megatron's times vocab_size / (vocab_size - 1).)
    """
    log_p = torch.log_softmax(logits[..., :vocab_size].float(), dim=-1)
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        e = smoothing_weight(label_smoothing, vocab_size)
        loss = (1 - e) * loss - e * log_p.mean(-1)
    return loss


def smoothing_weight(label_smoothing: float, vocab_size: int) -> float:
    """Weight of the mean over all tokens: each but the label then has label_smoothing / (vocab_size - 1)."""
    return label_smoothing * vocab_size / (vocab_size - 1)
