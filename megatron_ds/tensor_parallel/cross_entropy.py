"""Cross entropy of logits whose vocabulary is split over the group, with its own backward.

Each rank computes the softmax p_r over its own columns, and the log of its sum, lse_r. One all-gather of a
few numbers per token (lse_r, the label's logit where the rank holds it, the sum of logits for smoothing)
gives the rest on every rank:

    lse = log Σ_r exp(lse_r)                    loss = lse - logit[label]
    p = p_r * exp(lse_r - lse)                  dlogit = p - target

So a call has one small collective in forward and none in backward, and allocates no buffer of the size of the
logits, which are the largest tensor of a training step: they are overwritten by p_r, and in backward by the
gradient. The arithmetic is fp32, some rows at a time. In 16 bits the probabilities are kept, not their
differences from the target; the label's probability is also kept in fp32, because its difference is small
where the label is predicted well.

Columns from `vocab_size` on are padding, set to -inf in the logits: their probability and gradient are
exactly zero.
"""

import torch
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.group import Group

# fp32 elements processed at once, in whole rows: as many as fit a CPU's cache, and as keep a GPU busy.
CPU_BLOCK, GPU_BLOCK = 2**18, 2**24
# fp16 has no exponents for unlikely tokens: probabilities are kept times the largest power of two that fits.
KEPT_TIMES = {torch.float16: 2.0**15}


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: Group, vocab_size: int,
                                 label_smoothing: float = 0.0) -> torch.Tensor:
    """logits [s, b, V'/t], labels [s, b] in [0, vocab_size) → loss per token, fp32 [s, b].

    The same on every rank. Overwrites the logits. Smoothing as in `reference_cross_entropy`, over the
    whole vocabulary for any t. One backward per forward. Collective: all-gather.
    """
    return _CrossEntropy.apply(logits, labels, group, vocab_size, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group, vocab_size, label_smoothing):
        assert labels.shape == logits.shape[:-1], (labels.shape, logits.shape)
        width = logits.shape[-1]
        start = group.rank * width
        valid = max(0, min(width, vocab_size - start))          # columns of this rank without padding
        column = labels.reshape(-1, 1) - start                                   # [s b, 1]
        elsewhere = (column < 0) | (column >= valid)
        column = column.masked_fill(elsewhere, 0)

        p = logits.detach().flatten(0, -2)
        p[:, valid:] = -torch.inf
        weight = smoothing_weight(label_smoothing, vocab_size) if label_smoothing else 0.0
        label_logit = p.gather(-1, column).float().masked_fill_(elsewhere, 0)
        sums = [p[:, :valid].sum(-1, keepdim=True, dtype=torch.float32)] if weight else []
        label_p, own_lse = _softmax_(p, column, valid)
        facts = torch.stack([own_lse, label_logit, *sums])
        facts = collectives.all_gather(facts.unsqueeze(0), group)                # [t, facts, s b, 1]
        lse = torch.logsumexp(facts[:, 0], dim=0)
        loss = lse - facts[:, 1].sum(0)
        if weight:
            # -mean log p = lse - mean logit
            loss = (1 - weight) * loss + weight * (lse - facts[:, 2].sum(0) / vocab_size)

        ctx.save_for_backward(column, elsewhere, label_p, (own_lse - lse).exp_())
        ctx.p, ctx.valid, ctx.shape = p, valid, logits.shape
        ctx.on_label, ctx.on_all = 1 - weight, weight / vocab_size
        return torch.ops.aten._unsafe_view(loss, labels.shape)         # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        column, elsewhere, label_p, share = ctx.saved_tensors
        assert ctx.p is not None, "the first backward overwrote the probabilities: run the forward again"
        gradient, ctx.p = ctx.p, None
        dloss = dloss.reshape(-1, 1)
        factor, on_all = share * dloss / KEPT_TIMES.get(gradient.dtype, 1.0), dloss * ctx.on_all
        on_label = (label_p * share - ctx.on_label) * dloss - on_all
        for rows in _blocks(gradient):
            part = gradient[rows]
            wide = part.float()                                                  # in fp32 itself
            wide.mul_(factor[rows])
            if ctx.on_all:
                wide[:, :ctx.valid].sub_(on_all[rows])
            at_label = torch.where(elsewhere[rows], wide.gather(-1, column[rows]), on_label[rows])
            wide.scatter_(-1, column[rows], at_label)
            if wide is not part:
                part.copy_(wide)
        return gradient.view(ctx.shape), None, None, None, None


def _softmax_(logits: torch.Tensor, column: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the logits [n, V'/t] by the softmax over this rank's columns, times KEPT_TIMES.

    Returns the probability of `column` and the log of the sum of exponentials, both fp32 [n, 1].
    """
    at_column, lse = (logits.new_empty(len(logits), 1, dtype=torch.float32) for _ in range(2))
    if valid == 0:
        logits.zero_()
        return at_column.zero_(), lse.fill_(-torch.inf)
    for rows in _blocks(logits):
        part = logits[rows]
        largest = part.amax(-1, keepdim=True).float()
        in_place = part.dtype == torch.float32
        p = (torch.softmax(part, dim=-1, out=part) if in_place
             else torch.softmax(part, dim=-1, dtype=torch.float32))
        # p_max = exp(max - lse) is at least 1 / columns, so its logarithm is accurate.
        lse[rows] = largest - p.amax(-1, keepdim=True).log_()
        at_column[rows] = p.gather(-1, column[rows])
        if not in_place:
            times = KEPT_TIMES.get(part.dtype)
            part.copy_(p.mul_(times) if times else p)
    return at_column, lse


def _blocks(t: torch.Tensor) -> list[slice]:
    rows = max(1, (CPU_BLOCK if t.device.type == "cpu" else GPU_BLOCK) // t.shape[1])
    return [slice(start, start + rows) for start in range(0, t.shape[0], rows)]


def reference_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int,
                            label_smoothing: float = 0.0) -> torch.Tensor:
    """The loss of whole logits [.., V'] and labels [..]; columns from `vocab_size` on are ignored.

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
