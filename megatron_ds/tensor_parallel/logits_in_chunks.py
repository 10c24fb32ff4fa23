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

from collections import deque
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.group import Group
from ..ops.product import affine, product_into
from ..ops.soft_cap import cap_, slope_of
from .cross_entropy import own_columns
from .token_loss import LabelLoss, Parts, TokenLoss
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

        Collective as `losses`.
        """
        start, valid = own_columns(len(self.weight), self.group, vocab_size)
        return self.losses(
            LabelLoss(
                labels.reshape(-1) - start,
                valid,
                self.group,
                vocab_size,
                label_smoothing,
            )
        )

    def losses(self, loss: TokenLoss) -> torch.Tensor:
        """Return what `loss` has for each token, fp32 [s, b], or [r, s, b] of r losses.

        Collective: what `loss` is; with sequence parallelism an all-gather of x. Backward: all-reduce, or
        all-gather and reduce-scatter.
        """
        return _Chunked.apply(
            self.x,
            self.weight,
            self.bias,
            loss,
            self.group,
            self.sequence_parallel and self.group.size > 1,
            self.chunks,
            self.cap,
        )

    def parts(self) -> Parts:
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
    def forward(ctx, x, weight, bias, loss, group, sequence_parallel, chunks, cap):
        x = x.contiguous()
        whole = (
            collectives.all_gather(x, group) if sequence_parallel else x
        )  # [s, b, h]
        flat = whole.view(-1, whole.shape[-1])
        losses = loss.of(_logits(flat, weight, bias, chunks, cap))
        assert losses.shape[-1] == len(flat), (losses.shape, whole.shape)
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.bias = bias
        ctx.loss = loss
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        ctx.chunks = chunks
        ctx.cap = cap
        shape = (*losses.shape[:-1], *whole.shape[:-1])
        return torch.ops.aten._unsafe_view(losses, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses):
        [x] = ctx.saved_tensors
        weight = ctx.weight
        group = ctx.group
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        # The rows of all tensor-parallel ranks, whose logits were not kept.
        whole = collectives.all_gather(x, group) if ctx.sequence_parallel else x
        flat = whole.view(-1, whole.shape[-1])
        dlosses = dlosses.flatten(-2)
        dx = torch.empty_like(flat) if needs_dx else None
        dw = GradientSum(weight) if needs_dw else None
        db = dlosses.new_zeros(len(weight)) if needs_db else None
        # Logits of a chunk are computed again and become their gradients.
        logits = _logits(flat, weight, ctx.bias, ctx.chunks, ctx.cap)
        for rows, dlogits in _gradients(ctx.loss, logits, dlosses, ctx.cap):
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
            *[None] * 5,
        )


def _gradients(
    loss: TokenLoss, logits: Parts, dlosses: torch.Tensor, cap: float | None
) -> Parts:
    """Yields (rows, the gradient by their logits before the cap). It overwrites the logits."""
    if cap is None:
        yield from loss.gradients(logits, dlosses)
        return
    slopes: deque[torch.Tensor] = deque()

    def noted() -> Parts:
        for rows, part in logits:
            slopes.append(slope_of(part, cap))
            yield rows, part

    for rows, dlogits in loss.gradients(noted(), dlosses):
        yield rows, dlogits.mul_(slopes.popleft())


def _logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    cap: float | None,
) -> Parts:
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
