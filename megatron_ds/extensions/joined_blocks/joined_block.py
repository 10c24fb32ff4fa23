"""The functions of a block before and after its attention, each joined to one function of autograd.

    before   x → norm → linear_qkv
    after    attended → linear_proj → + x, norm → linear_fc1 → activation → linear_fc2 → + sum

A function of autograd that is written in Python takes the host about 10 µs, and views between functions as much. For
a small block that is more than a GPU takes. The two functions compute what the layers compute one by one, in the same
order, and keep the same tensors.
"""

from typing import NamedTuple

import torch
from torch.autograd.function import Function

from ...host.autograd_functions import Halves, differentiable_once, direct_apply
from ...models.attention import SelfAttention
from ...ops.linear_products import LinearProducts
from ...ops.norms import Norm
from ...tensor_parallel.linear import (
    LinearCall,
    Parameters,
    column_gradients,
    column_rows,
    row_gradients,
    row_rows,
)
from ...tensor_parallel.weight_grad import add_gradient

JoinedLinear = tuple[Parameters, LinearCall, LinearProducts]


class JoinedNorm(NamedTuple):
    """A norm: the functions that compute it, its parameters, and the module, which has its `eps`."""

    halves: Halves
    parameters: Parameters
    module: Norm

    def add_gradients(self, dw: torch.Tensor, db: torch.Tensor | None) -> None:
        """Add the gradients of the parameters."""
        weight, bias = self.parameters
        add_gradient(weight, dw)
        if bias is not None:
            assert db is not None, "halves of a norm with a bias return its gradient"
            add_gradient(bias, db)


class JoinedBlock(NamedTuple):
    """The layers of a block for inputs of one shape."""

    attention: SelfAttention
    norm_before: JoinedNorm
    qkv: JoinedLinear
    proj: JoinedLinear
    norm_after: JoinedNorm
    fc1: JoinedLinear
    activation: Halves
    fc2: JoinedLinear


class BeforeAttention(Function):
    """x [s(/t), b, h] → [s, b, (n + 2g)/t * d] of a `JoinedBlock`."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.shape = x.shape
        (forward, _), parameters, norm = block.norm_before
        samples, width = x.shape[1:]
        normed, *kept = forward(x.reshape(-1, width), None, *parameters, norm.eps)
        qkv = column_rows(normed, *block.qkv)
        ctx.save_for_backward(normed, *kept)
        return qkv.resize_(qkv.shape[0] // samples, samples, qkv.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        normed, *kept = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # each is freed after its step, unless the graph is retained
        norm = ctx.block.norm_before
        dy = dy.reshape(-1, dy.shape[-1])
        dnormed, _, _ = column_gradients(dy, normed, *ctx.block.qkv)
        del normed
        dx, *of_norm = norm.halves.backward(dnormed, None, *kept, norm.parameters)
        norm.add_gradients(*of_norm)
        return dx.view(ctx.shape), None


class AfterAttention(Function):
    """attended [s, b, n/t * d], x [s(/t), b, h] → the output of a `JoinedBlock`, like x."""

    @staticmethod
    def forward(ctx, attended, x, block):
        ctx.block = block
        ctx.shapes = attended.shape, x.shape
        (forward, _), parameters, norm = block.norm_after
        attended = attended.reshape(-1, attended.shape[-1]).contiguous()
        residual = x.reshape(-1, x.shape[-1])
        out = row_rows(attended, *block.proj)
        normed, *kept = forward(out, residual, *parameters, norm.eps)
        total = kept[0]
        # The feed-forward.
        wide = column_rows(normed, *block.fc1)
        active = block.activation.forward(wide)
        out = row_rows(active, *block.fc2)
        ctx.save_for_backward(attended, *kept, normed, wide, active)
        return out.add_(total).resize_(x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        attended, *kept, normed, wide, active = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        block = ctx.block
        norm = block.norm_after
        of_attended, of_x = ctx.shapes
        dy = dy.reshape(-1, dy.shape[-1])
        dactive, _, _ = row_gradients(dy, active, *block.fc2)
        del active
        dwide = block.activation.backward(dactive, wide)
        del dactive, wide
        dnormed, _, _ = column_gradients(dwide, normed, *block.fc1)
        del dwide, normed
        dx, *of_norm = norm.halves.backward(dnormed, dy, *kept, norm.parameters)
        norm.add_gradients(*of_norm)
        dattended, _, _ = row_gradients(dx, attended, *block.proj)
        return dattended.view(of_attended), dx.view(of_x), None


# (x, block) → queries, keys and values;  (attended, x, block) → the output.
before = direct_apply(BeforeAttention)
after = direct_apply(AfterAttention)
