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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..host.autograd_functions import differentiable_once, direct_apply
from ..mpu import collectives
from ..mpu.context import ParallelContext, new_parameter
from ..mpu.group import DONE, Group, Work, solo
from ..mpu.managed_parameter import SUM, ManagedParameter, accumulator_of
from ..mpu.param_spec import Init, Matrices, ParamSpec, Split
from ..ops.linear_products import UNBOUND, LayerProducts, LinearProducts
from .weight_grad import (
    Finish,
    add_gradient,
    linear_gradient,
    now_or_later,
)


@dataclass(frozen=True)
class LinearCall:
    """What a linear layer does beside its weight and bias, made once for the layer.

    group              the ranks that divide the layer
    sequence_parallel  they hold slices of the sequence outside of it; False in a group of one
    products           of the layer; None: chosen in each call
    """

    group: Group
    sequence_parallel: bool = False
    products: LayerProducts | None = None
    is_divided: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_divided", self.group.size > 1)


def layer_call(ctx: ParallelContext) -> LinearCall:
    """Return the call of a layer that the tensor-parallel ranks divide."""
    sequence_parallel = ctx.sequence_parallel and ctx.tp.size > 1
    return LinearCall(ctx.tp, sequence_parallel, LayerProducts())


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, the output split over the tensor-parallel group: [s(/t), b, in] → [s, b, out/t]."""

    bias: nn.Parameter | None

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
        self.call = layer_call(ctx)
        self.gather_output = gather_output
        interleaved = gather_output and parts > 1
        assert not interleaved, (
            "gathered parts would interleave: [gate_1; up_1; gate_2; up_2]"
        )
        # Each rank holds rows of every part, and the elements of the bias that belong to them.
        rows = Split("tp", 0, parts)
        weight = ParamSpec(
            f"{name}.weight",
            (out_features, in_features),
            Init("normal", init_std),
            (rows,),
            matrices=Matrices(),
        )
        self.weight = new_shard(weight, ctx)
        self.register_parameter("bias", None)
        if bias:
            spec = ParamSpec(
                f"{name}.bias", (out_features,), Init("zeros"), (rows,), decay=False
            )
            self.bias = new_shard(spec, ctx)

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks."""
        return self.call.group

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks hold parts of the sequence outside of the layer."""
        return self.call.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x Wᵀ + b. Collective with sequence parallelism or gather_output; the backward always."""
        y = _apply(_column_linear, x, self.weight, self.bias, self.call)
        return _GatherLast.apply(y, self.call.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b, the input split over the tensor-parallel group: [s, b, in/t] → [s(/t), b, out].

    The bias is added once, to the sum.
    """

    bias: nn.Parameter | None

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
        self.call = layer_call(ctx)
        weight = ParamSpec(
            f"{name}.weight",
            (out_features, in_features),
            Init("normal", init_std),
            (Split("tp", 1),),
            matrices=Matrices(),
        )
        self.weight = new_shard(weight, ctx)
        self.register_parameter("bias", None)
        if bias:
            spec = ParamSpec(
                f"{name}.bias",
                (out_features,),
                Init("zeros"),
                partial_over=ctx.partial_over,
                decay=False,
            )
            self.bias = new_shard(spec, ctx)

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks."""
        return self.call.group

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks hold parts of the sequence outside of the layer."""
        return self.call.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x Wᵀ + b. Collective; the backward only with sequence parallelism."""
        return _apply(_row_linear, x, self.weight, self.bias, self.call)


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
        bias: bool = True,
        partial_over: tuple[str, ...] = (),
        matrices: Matrices | None = None,
    ):
        """partial_over: give `ParallelContext.partial_over` if x is this rank's slice of the sequence.

        matrices: of `ParamSpec`, for a layer beside another one
        """
        super().__init__()
        weight = ParamSpec(
            f"{name}.weight",
            (out_features, in_features),
            Init("normal", init_std),
            partial_over=partial_over,
            matrices=matrices,
        )
        self.weight = new_shard(weight, ctx)
        self.bias = None
        if bias:
            spec = ParamSpec(
                f"{name}.bias",
                (out_features,),
                Init("zeros"),
                partial_over=partial_over,
                decay=False,
            )
            self.bias = new_shard(spec, ctx)
        self.call = LinearCall(solo("tp"), products=LayerProducts())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., in] → [.., out]; x may be a slice of the sequence."""
        return _apply(_column_linear, x, self.weight, self.bias, self.call)


def new_shard(spec: ParamSpec, ctx: ParallelContext) -> ManagedParameter:
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
    call = LinearCall(group, sequence_parallel and group.size > 1)
    return _apply(_column_linear, x, weight, bias, call)


class _Linear(NamedTuple):
    """A function of autograd: `apply`, and `forward` for calls that no gradient follows."""

    apply: Callable[..., torch.Tensor]
    forward: Callable[..., torch.Tensor]


class _NothingKept:
    """The context of a forward without a backward, for which autograd need not be asked."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep none."""


def _apply(
    function: _Linear,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: LinearCall,
) -> torch.Tensor:
    if torch.compiler.is_dynamo_compiling():
        # A backward that writes gradients to buffers cannot be part of a graph.
        if accumulator_of(weight) is not None:
            from .outside_graphs import call_outside_graphs

            return call_outside_graphs(_apply, function, x, weight, bias, call)
        call = LinearCall(call.group, call.sequence_parallel)
    parameters = weight, bias
    if not torch.is_grad_enabled():
        return function.forward(_NothingKept(), x, parameters, call)
    # Autograd does not follow parameters whose gradients the backward adds to ZeRO's buffers.
    is_managed = getattr(weight, SUM, None) is not None
    if bias is not None:
        is_managed = is_managed and getattr(bias, SUM, None) is not None
    followed = () if is_managed and x.requires_grad else parameters
    return function.apply(x, parameters, call, *followed)


class _ColumnLinear(torch.autograd.Function):
    # Note: why the parameters are kept on ctx and not with save_for_backward. Under non-reentrant recomputation
    # saved tensors come back as other tensor objects, without `gradient_sum`. The group is on ctx because
    # backward runs in another thread.
    # Note: `followed` are the parameters once more, or nothing; see `_apply`.

    @staticmethod
    def forward(ctx, x, parameters, call, *followed):
        x = _keep(ctx, x, parameters, call)
        s, *others, _ = ctx.shape
        if call.sequence_parallel:
            s *= call.group.size
        y = column_rows(x, parameters, *ctx.how)
        return _reshaped(y, call, s, *others, y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx, dw, db = column_gradients(
            dy, x, ctx.trained, *ctx.how, ctx.needs_input_grad[0]
        )
        return dx if dx is None else dx.view(ctx.shape), None, None, dw, db


class _RowLinear(torch.autograd.Function):
    # The parameters are on ctx for the reason that is given at _ColumnLinear.

    @staticmethod
    def forward(ctx, x, parameters, call, *followed):
        x = _keep(ctx, x, parameters, call)
        s, *others, _ = ctx.shape
        if call.sequence_parallel:
            s //= call.group.size
        y = row_rows(x, parameters, *ctx.how)
        return _reshaped(y, call, s, *others, y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx, dw, db = row_gradients(
            dy, x, ctx.trained, *ctx.how, ctx.needs_input_grad[0]
        )
        return dx if dx is None else dx.view(ctx.shape), None, None, dw, db


_column_linear = _Linear(direct_apply(_ColumnLinear), _ColumnLinear.forward)
_row_linear = _Linear(direct_apply(_RowLinear), _RowLinear.forward)


def _keep(ctx, x, parameters, call) -> torch.Tensor:
    """Keep what backward needs; x as contiguous rows."""
    ctx.shape = x.shape
    x = x.reshape(-1, x.shape[-1]).contiguous()
    weight, bias = parameters
    # The input serves the gradient of the weight alone, which a frozen one has not.
    ctx.save_for_backward(x if weight.requires_grad else None)
    ctx.trained = weight, bias if bias is not None and bias.requires_grad else None
    ctx.how = call, UNBOUND if call.products is None else call.products.of(x)
    return x


# The halves of both layers, without autograd, of contiguous rows: x [s(/t) b, in], dy [s(/t) b, out]. `parameters`
# are the weight, and the bias or None. Gradients are (dx, dw, db), None where they are added to the buffers of ZeRO
# or not wanted: dw where x is None, db where the bias is.
Parameters = tuple[torch.Tensor, torch.Tensor | None]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def column_rows(
    x: torch.Tensor, parameters: Parameters, call: LinearCall, products: LinearProducts
) -> torch.Tensor:
    """y [s b, out/t]."""
    if call.sequence_parallel:
        x = collectives.all_gather(x, call.group)
    return products.affine(x, *parameters)


def column_gradients(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Parameters,
    call: LinearCall,
    products: LinearProducts,
    needs_dx: bool = True,
) -> Gradients:
    """Return the gradients of `column_rows`."""
    weight, bias = parameters
    # The products of the layer are chosen for contiguous matrices.
    if not dy.is_contiguous():
        products = UNBOUND
    # The gather of the input runs while the gradient of the input is computed.
    finish_dw = None
    if x is not None and call.sequence_parallel:
        begin = partial(_begin_gather, x, call.group, weight, dy, products)
        finish_dw = now_or_later(weight, begin)
    dx = None
    reduced: Work = DONE
    if needs_dx:
        dx = products.product(dy, weight)
        if call.is_divided:
            dx, reduced = _start_reduce(dx, call)
    # The reduction runs while the gradient of the weight is computed.
    dw = db = None
    if finish_dw is not None:
        dw = finish_dw()
    elif x is not None:
        dw = linear_gradient(weight, x, dy, products)
    if bias is not None:
        db = add_gradient(bias, dy.sum(0))
    if reduced is not DONE:
        reduced.wait()
    return dx, dw, db


def row_rows(
    x: torch.Tensor, parameters: Parameters, call: LinearCall, products: LinearProducts
) -> torch.Tensor:
    """y [s(/t) b, out]."""
    if not call.is_divided:
        return products.affine(x, *parameters)
    # The bias inside the product would be added by each rank.
    weight, bias = parameters
    y = products.affine(x, weight, None)
    if call.sequence_parallel:
        y = collectives.reduce_scatter(y, call.group)
    else:
        collectives.all_reduce_(y, call.group)
    return y if bias is None else y.add_(bias)


def row_gradients(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    parameters: Parameters,
    call: LinearCall,
    products: LinearProducts,
    needs_dx: bool = True,
) -> Gradients:
    """Return the gradients of `row_rows`."""
    weight, bias = parameters
    # With sequence parallelism db is a partial sum, over this rank's slice.
    db = None
    if bias is not None:
        db = add_gradient(bias, dy.sum(0))
    if call.sequence_parallel:
        dy = collectives.all_gather(dy, call.group)
    if not dy.is_contiguous():
        products = UNBOUND
    dx = products.product(dy, weight) if needs_dx else None
    dw = None if x is None else linear_gradient(weight, x, dy, products)
    return dx, dw, db


def _reshaped(y: torch.Tensor, call: LinearCall, *shape: int) -> torch.Tensor:
    """y, which nothing else holds, in another shape. Autograd forbids writing in place to a view that a Function
    returns, so it is none.

    `resize_` takes a third of the time. torch.compile, in which a layer has no products of its own, does not trace
    it, and tensors that wrap others cannot change their shape.
    """
    if call.products is None or type(y) is not torch.Tensor:
        return torch.ops.aten._unsafe_view(y, shape)
    return y.resize_(shape)


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        ctx.group = group
        return collectives.all_gather(y, group, dim=-1)

    @staticmethod
    def backward(ctx, dy):
        return collectives.shard(dy, ctx.group, dim=-1), None


def _begin_gather(
    x: torch.Tensor,
    group: Group,
    weight: torch.Tensor,
    dy: torch.Tensor,
    products: LinearProducts,
) -> Finish:
    """Gather x [rows of this rank, in] over the group, then compute the gradient of the weight; dy [s b, out]."""
    whole, gathered = start_all_gather(x, group)

    def finish():
        gathered.wait()
        return linear_gradient(weight, whole, dy, products)

    return finish


def start_all_gather(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Work]:
    """[s/t, b, in] → [s, b, in], valid after the wait."""
    whole = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return whole, collectives.all_gather_into_(
        whole.view(-1), x.view(-1), group, async_op=True
    )


def _start_reduce(dx: torch.Tensor, call: LinearCall) -> tuple[torch.Tensor, Work]:
    """dx [s b, in], a partial sum → the sum, or this rank's slice of it [s b/t, in], valid after the wait."""
    group = call.group
    if not call.sequence_parallel:
        return dx, collectives.all_reduce_(dx, group, async_op=True)
    mine = dx.new_empty((dx.shape[0] // group.size, dx.shape[1]))
    return mine, collectives.reduce_scatter_into_(
        mine.view(-1), dx.view(-1), group, async_op=True
    )
