"""The product with the vocabulary and the cross entropy, some rows at a time: whole logits never exist.

    forward, each chunk of rows     logits = x Wᵀ + b      facts of this rank's columns
    once                            all-gather of the facts of all rows: the loss, and lse of each row
    backward, each chunk            logits again           dlogits over them     dx     dW, db summed up

It keeps x and two numbers per token in place of [s b, V'/t] logits, and works in the memory of one chunk. The
price is a second product with the weight: a third more time in the head. The idea is that of recomputation
within a layer; Wijmans et al. 2024 (arXiv:2411.09009) have the same for one kernel.

The other way is one pass: each chunk's dlogits, dx and share of dW in forward, before the next chunk (Hsu et
al. 2024, arXiv:2410.10989; Bekman et al. 2025, arXiv:2506.13996, section 3.1). It saves the second product,
but

    memory   dW waits for the backward of the loss in a buffer of its own, 4 V'/t h bytes for each
             micro-batch that is alive; here the products are added to the main gradient
    fp16     dlogits are rounded before the scale of the loss, and small ones become 0
    order    the weight half of a split backward would run in forward, and evaluation would compute gradients

Note: sums. The loss of each token is returned, and the caller weighs all tokens at once: a mean of means over
chunks would give the tokens of a chunk with few counted ones more weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.group import Group
from ..ops.logits import cross_entropy_facts, cross_entropy_gradient_
from ..ops.product import affine, product_into
from ..ops.soft_cap import cap_, slope_of
from .cross_entropy import own_columns, target_weights, token_losses
from .weight_grad import GradientSum

# Rows of a suitable chunk: fewer leave the processors of a GPU or a CPU idle, more only take memory.
FEWEST_ROWS = 256
MOST_ROWS = 4096


def suitable_chunks(rows: int, hidden: int, columns: int) -> int:
    """Number of chunks of which the logits [.., columns] are not larger than x [rows, hidden], or have
    FEWEST_ROWS rows."""
    each = min(max(rows * hidden // columns, FEWEST_ROWS), MOST_ROWS)
    return max(1, -(-rows // each))


@dataclass(frozen=True)
class LogitsInChunks:
    """Logits [s, b, V'/t] that are not computed yet: x Wᵀ + b, in `chunks` parts of the s b rows.

    x [s(/t), b, h]; weight [V'/t, h]; bias [V'/t] or None. sequence_parallel: x is a slice of the sequence.
    cap: bound of the logits, cap tanh(logits / cap)
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    group: Group
    sequence_parallel: bool
    chunks: int
    cap: float | None = None

    def cross_entropy(
        self, labels: torch.Tensor, vocab_size: int, label_smoothing: float = 0.0
    ) -> torch.Tensor:
        """`vocab_parallel_cross_entropy` of the logits: labels [s, b] → loss per token, fp32 [s, b].

        Collective: all-gather; with sequence parallelism another one, of x. Backward: all-reduce, or
        all-gather and reduce-scatter.
        """
        return _Chunked.apply(
            self.x,
            self.weight,
            self.bias,
            labels,
            self.group,
            self.sequence_parallel and self.group.size > 1,
            self.chunks,
            self.cap,
            vocab_size,
            label_smoothing,
        )

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (rows of s b, their logits [rows, V'/t]) without a graph; the next iteration overwrites the
        logits. With sequence parallelism a collective, which gathers x."""
        gathers = self.sequence_parallel and self.group.size > 1
        x = self.x.detach().contiguous()
        whole = collectives.all_gather(x, self.group) if gathers else x
        flat = whole.view(-1, whole.shape[-1])
        yield from _logits(flat, self.weight, self.bias, self.chunks, self.cap)


class _Chunked(torch.autograd.Function):
    # See the note at linear._ColumnLinear about the weight on ctx.

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        bias,
        labels,
        group,
        sequence_parallel,
        chunks,
        cap,
        vocab_size,
        label_smoothing,
    ):
        x = x.contiguous()
        whole = (
            collectives.all_gather(x, group) if sequence_parallel else x
        )  # [s, b, h]
        assert labels.shape == whole.shape[:-1], (labels.shape, whole.shape)
        start, valid = own_columns(len(weight), group, vocab_size)
        flat = whole.view(-1, whole.shape[-1])
        own_labels = labels.reshape(-1) - start
        smoothed = label_smoothing > 0
        # Logits of a chunk become a few numbers of each row.
        facts = [
            cross_entropy_facts(logits, own_labels[rows], valid, smoothed)
            for rows, logits in _logits(flat, weight, bias, chunks, cap)
        ]
        loss, lse = token_losses(
            torch.cat(facts, dim=1), group, vocab_size, label_smoothing
        )
        ctx.save_for_backward(x, own_labels, lse)
        ctx.weight = weight
        ctx.bias = bias
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        ctx.chunks = chunks
        ctx.cap = cap
        ctx.valid = valid
        ctx.target = target_weights(label_smoothing, vocab_size)
        return torch.ops.aten._unsafe_view(loss, labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        (x, labels, lse), weight, group = ctx.saved_tensors, ctx.weight, ctx.group
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        # The rows of all tensor-parallel ranks, whose logits were not kept.
        whole = collectives.all_gather(x, group) if ctx.sequence_parallel else x
        flat = whole.view(-1, whole.shape[-1])
        dloss = dloss.reshape(-1)
        dx = torch.empty_like(flat) if needs_dx else None
        dw = GradientSum(weight) if needs_dw else None
        db = lse.new_zeros(len(weight)) if needs_db else None
        # Logits of a chunk are computed again and become their gradients.
        for rows, logits in _logits(flat, weight, ctx.bias, ctx.chunks, ctx.cap):
            slope = None if ctx.cap is None else slope_of(logits, ctx.cap)
            dlogits = cross_entropy_gradient_(
                logits, labels[rows], lse[rows], dloss[rows], ctx.valid, *ctx.target
            )
            if slope is not None:
                dlogits.mul_(slope)
            if dx is not None:
                product_into(dx[rows], dlogits, weight)
            if dw is not None:
                dw.add(flat[rows], dlogits)
            if db is not None:
                db += dlogits.sum(0, dtype=db.dtype)
        # Each rank has part of the vocabulary: the gradients of x are added over ranks.
        if dx is not None:
            dx = dx.view(whole.shape)
            if ctx.sequence_parallel:
                dx = collectives.reduce_scatter(dx, group)
            else:
                collectives.all_reduce_(dx, group)
        return (
            dx,
            None if dw is None else dw.deliver(),
            None if db is None else db.to(weight.dtype),
            *[None] * 7,
        )


def _logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    cap: float | None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields (rows, their logits [rows, V'/t]) of x [n, h] in at most `chunks` parts; the next iteration
    overwrites the logits."""
    each = max(1, -(-len(x) // chunks))
    memory = x.new_empty(min(each, len(x)), len(weight))
    for start in range(0, len(x), each):
        part = x[start : start + each]
        logits = memory[: len(part)]
        affine(part, weight, bias, logits)
        if cap is not None:
            cap_(logits, cap)
        yield slice(start, start + len(part)), logits
