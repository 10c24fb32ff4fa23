"""Linear layers split over the tensor-parallel group, and the autograd functions they share.

    column   W = [W_1; ..; W_t] by output rows     x whole → each rank its slice of y
    row      W = [W_1 | .. | W_t] by input columns  each rank's slice of x → partial y, summed over the ranks

Shoeybi et al. 2019 (arXiv:1909.08053), section 3; with sequence parallelism Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2: the activations outside the pair are slices of the sequence, all-reduces
become all-gather and reduce-scatter, and the column layer keeps its slice of x, gathering it again in
backward.

                 forward                       backward
    column       nothing      / gather x       all-reduce dx  / reduce-scatter dx, overlapping dW
    row          all-reduce y / reduce-scatter y      nothing / gather dy

Where a backward is split (weight_grad.py), the column layer gathers x in the weight half, so that it keeps
only a slice between the halves.

Shapes: s positions, b samples, t ranks; x [s, b, in], with sequence parallelism [s/t, b, in].
"""

from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..mpu import collectives
from ..mpu.context import ParallelContext, new_parameter
from ..mpu.group import DONE, Group, Work, solo
from ..mpu.param_spec import Init, Matrices, ParamSpec, Split
from ..ops.product import affine, product
from .weight_grad import Finish, linear_gradient, nothing, now_or_later


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, the output split over the tensor-parallel group: [s(/t), b, in] → [s, b, out/t]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        name: str,
        init_std: float,
        bias: bool = True,
        parts: int = 1,
        gather_output: bool = False,
    ):
        """parts: matrices packed into one weight, each split over the ranks by itself (2 for [gate; up]).

        gather_output: return the whole [s, b, out] on every rank
        """
        super().__init__()
        self.group = ctx.tp
        self.sequence_parallel = ctx.sequence_parallel
        self.gather_output = gather_output
        interleaved = gather_output and parts > 1
        assert not interleaved, (
            "gathered parts would interleave: [gate_1; up_1; gate_2; up_2]"
        )
        rows = Split("tp", 0, parts)
        weight = ParamSpec(
            f"{name}.weight",
            (out_features, in_features),
            Init("normal", init_std),
            (rows,),
            matrices=Matrices(),
        )
        self.weight = new_shard(weight, ctx)
        self.bias = None
        if bias:
            spec = ParamSpec(
                f"{name}.bias", (out_features,), Init("zeros"), (rows,), decay=False
            )
            self.bias = new_shard(spec, ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x Wᵀ + b. Collective with sequence parallelism or gather_output; the backward always."""
        y = column_linear(x, self.weight, self.bias, self.group, self.sequence_parallel)
        return _GatherLast.apply(y, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b, the input split over the tensor-parallel group: [s, b, in/t] → [s(/t), b, out].

    The bias is added once, to the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        name: str,
        init_std: float,
        bias: bool = True,
    ):
        super().__init__()
        self.group = ctx.tp
        self.sequence_parallel = ctx.sequence_parallel
        weight = ParamSpec(
            f"{name}.weight",
            (out_features, in_features),
            Init("normal", init_std),
            (Split("tp", 1),),
            matrices=Matrices(),
        )
        self.weight = new_shard(weight, ctx)
        self.bias = None
        if bias:
            spec = ParamSpec(
                f"{name}.bias",
                (out_features,),
                Init("zeros"),
                partial_over=ctx.partial_over,
                decay=False,
            )
            self.bias = new_shard(spec, ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x Wᵀ + b. Collective; the backward only with sequence parallelism."""
        return row_linear(x, self.weight, self.bias, self.group, self.sequence_parallel)


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ + b, whole on every tensor-parallel rank: [.., in] → [.., out]. No communication.

    For products too small to be worth a message.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        name: str,
        init_std: float,
        partial_over: tuple[str, ...] = (),
    ):
        """partial_over: give `ParallelContext.partial_over` if x is this rank's slice of the sequence."""
        super().__init__()
        make = lambda leaf, shape, init, decay: new_shard(
            ParamSpec(
                f"{name}.{leaf}", shape, init, partial_over=partial_over, decay=decay
            ),
            ctx,
        )
        self.weight = make(
            "weight", (out_features, in_features), Init("normal", init_std), True
        )
        self.bias = make("bias", (out_features,), Init("zeros"), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., in] → [.., out]; x may be a slice of the sequence."""
        return column_linear(x, self.weight, self.bias, solo("tp"))


def new_shard(spec: ParamSpec, ctx: ParallelContext) -> nn.Parameter:
    """This rank's shard of a parameter, uninitialized."""
    sizes = {split.axis: ctx.group(split.axis).size for split in spec.splits}
    return new_parameter(spec, sizes=sizes, dtype=ctx.dtype, device=ctx.device)


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """x [s(/t), b, in], weight [out/t, in], bias [out/t] or None → [s, b, out/t]."""
    return _apply(
        _ColumnLinear, x, weight, bias, group, sequence_parallel and group.size > 1
    )


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Group,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """x [s, b, in/t], weight [out, in/t], bias [out] or None → [s(/t), b, out]."""
    return _apply(
        _RowLinear, x, weight, bias, group, sequence_parallel and group.size > 1
    )


def _apply(
    function: type[torch.autograd.Function],
    x: torch.Tensor,
    weight: torch.Tensor,
    *others: object,
) -> torch.Tensor:
    if torch.compiler.is_compiling() and hasattr(weight, "grad_ready"):
        from .outside_graphs import apply_outside_graphs

        return apply_outside_graphs(function, x, weight, *others)
    return function.apply(x, weight, *others)


class _ColumnLinear(torch.autograd.Function):
    # Note: why the weight is kept on ctx and not with save_for_backward. Under non-reentrant recomputation
    # saved tensors come back as other tensor objects, without `main_grad`. The group is on ctx because
    # backward runs in another thread.

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        return _affine(
            collectives.all_gather(x, group) if sequence_parallel else x, weight, bias
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,), weight, group = ctx.saved_tensors, ctx.weight, ctx.group
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1])  # [s b, out/t]
        finish_dw = nothing
        if needs_dw:
            finish_dw = now_or_later(
                weight,
                partial(
                    _begin_dw, weight, x, dy, group if ctx.sequence_parallel else None
                ),
            )
        dx = None
        reduced = DONE
        if needs_dx:
            dx, reduced = _start_reduce(
                product(dy, weight), ctx.sequence_parallel, group
            )
        dw = finish_dw()
        db = dy.sum(0) if needs_db else None
        reduced.wait()
        return None if dx is None else dx.view(x.shape), dw, db, None, None


class _RowLinear(torch.autograd.Function):
    # See the note at _ColumnLinear.

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        if group.size == 1:
            return _affine(
                x, weight, bias
            )  # the bias inside the matrix product is the only difference
        y = _affine(x, weight, None)
        if sequence_parallel:
            y = collectives.reduce_scatter(y, group)  # [s/t, b, out]
        else:
            collectives.all_reduce_(y, group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,), weight, group = ctx.saved_tensors, ctx.weight, ctx.group
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        # With sequence parallelism db is a partial sum, over this rank's slice.
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs_db else None
        if ctx.sequence_parallel:
            dy = collectives.all_gather(dy, group)
        dy = dy.reshape(-1, dy.shape[-1])  # [s b, out]
        dx = product(dy, weight).view(x.shape) if needs_dx else None
        dw = (
            now_or_later(weight, partial(_begin_dw, weight, x, dy))()
            if needs_dw
            else None
        )
        return dx, dw, db, None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        ctx.group = group
        return collectives.all_gather(y, group, dim=-1)

    @staticmethod
    def backward(ctx, dy):
        return collectives.shard(dy, ctx.group, dim=-1), None


def _affine(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # Autograd forbids writing in place to a view that a Function returns; _unsafe_view makes none.
    y = affine(x.view(-1, x.shape[-1]), weight, bias)
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def _begin_dw(
    weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, group: Group | None = None
) -> Finish:
    """x [.., in], to be gathered over the group, if any; dy [s b, out]."""
    x, gathered = (x, DONE) if group is None else start_all_gather(x, group)

    def finish():
        gathered.wait()
        return linear_gradient(weight, x.view(-1, x.shape[-1]), dy)

    return finish


def start_all_gather(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """[s/t, b, in] → [s, b, in], valid after the wait."""
    whole = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return whole, collectives.all_gather_into_(
        whole.view(-1), x.view(-1), group, async_op=True
    )


def _start_reduce(
    dx: torch.Tensor, scatter: bool, group: Group
) -> tuple[torch.Tensor, Work]:
    """dx [s b, in], a partial sum → the sum, or this rank's slice of it [s b/t, in], valid after the wait."""
    if not scatter:
        return dx, collectives.all_reduce_(dx, group, async_op=True)
    mine = dx.new_empty((dx.shape[0] // group.size, dx.shape[1]))
    return mine, collectives.reduce_scatter_into_(
        mine.view(-1), dx.view(-1), group, async_op=True
    )
