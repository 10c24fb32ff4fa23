"""Cross entropy of logits whose vocabulary is split over the group, with its own backward.

Each rank takes the softmax over its own columns and its own log of the sum, lse_r. One all-gather of a few numbers per token
(lse_r, the label's logit where the rank holds it, the sum of logits for smoothing) gives all the rest on every rank:

    lse = log Σ_r exp(lse_r)      loss = lse - logit[label]      p = p_r * exp(lse_r - lse)      dlogit = p - target

so there is one small collective a call, none in backward, and one fp32 buffer of the size of the logits, which becomes p_r and
then, in backward, the gradient. Logits in fp32 are that buffer themselves: nothing is as large as they are, so a second one
would be what a training step takes most memory with.

Columns from `vocab_size` on are padding, set to -inf in the logits: their probability and gradient are exactly zero.
"""

import torch

from ..mpu import collectives
from ..mpu.group import Group
from ..ops.cross_entropy import smoothing_weight


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab_size: int,
                                 label_smoothing: float = 0.0) -> torch.Tensor:
    """logits [s, b, V'/t], labels [s, b] in [0, vocab_size) → loss per token, fp32 [s, b], the same on every rank.

    The logits are used up: whoever wants them afterwards keeps a copy.
    Smoothing as in `ops.cross_entropy.cross_entropy`, over the whole vocabulary for any t. One backward per forward.
    """
    return _CrossEntropy.apply(logits, labels, group, vocab_size, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group, vocab_size, label_smoothing):
        width = logits.shape[-1]
        start = group.rank * width
        valid = max(0, min(width, vocab_size - start))          # columns of this rank that are no padding
        column = labels - start
        elsewhere = (column < 0) | (column >= valid)
        column = column.masked_fill(elsewhere, 0).unsqueeze(-1)                  # [s, b, 1]

        logits = logits.detach()
        if valid < width:
            logits[..., valid:] = -torch.inf
        label_logit = logits.gather(-1, column).squeeze(-1).float().masked_fill_(elsewhere, 0)
        weight = smoothing_weight(label_smoothing, vocab_size) if label_smoothing else 0.0
        sums = [logits[..., :valid].sum(-1, dtype=torch.float32)] if weight else []
        p, own_lse = _softmax(logits, valid)
        facts = [own_lse, label_logit, *sums]
        facts = collectives.all_gather(torch.stack(facts).unsqueeze(0), group)   # [t, facts, s, b]
        lse = torch.logsumexp(facts[:, 0], dim=0)
        loss = lse - facts[:, 1].sum(0)
        if weight:
            # -mean log p = lse - mean logit
            loss = (1 - weight) * loss + weight * (lse - facts[:, 2].sum(0) / vocab_size)

        ctx.save_for_backward(column, elsewhere, (own_lse - lse).exp_())
        ctx.p, ctx.valid, ctx.dtype = p, valid, logits.dtype
        ctx.on_label, ctx.on_all = 1 - weight, weight / vocab_size
        return loss

    @staticmethod
    def backward(ctx, dloss):
        column, elsewhere, share = ctx.saved_tensors
        assert ctx.p is not None, "the loss turned its probabilities into the gradient: run the forward again"
        gradient, ctx.p = ctx.p, None
        gradient.mul_((share * dloss).unsqueeze(-1))
        on_label = (dloss * -ctx.on_label).masked_fill_(elsewhere, 0).unsqueeze(-1)
        gradient.scatter_add_(-1, column, on_label)
        if ctx.on_all:
            gradient[..., :ctx.valid].sub_((dloss * ctx.on_all).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None, None


def _softmax(logits: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 softmax over this rank's columns, in place of logits in fp32, and the log of the sum they were divided by."""
    if valid == 0:
        return torch.zeros_like(logits, dtype=torch.float32), torch.full_like(logits[..., 0], -torch.inf, dtype=torch.float32)
    largest = logits.amax(-1).float()
    if logits.is_cuda and logits.dtype != torch.float32:
        p = torch.softmax(logits, dim=-1, dtype=torch.float32)          # reads 16 bits and writes 32 in one kernel
    else:
        p = logits.float()
        torch.softmax(p, dim=-1, out=p)
    # p_max = exp(max - lse) is at least 1 / columns, so its logarithm is accurate.
    return p, largest - p.amax(-1).log()
