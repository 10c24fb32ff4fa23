"""`Experts`: the feed-forward networks of one layer, of which each expert-parallel rank holds some.

    linear_fc1.weight   [E, (2) f, h]     Split("ep", 0), Split("etp", 1)
    linear_fc2.weight   [E, h, f]         Split("ep", 0), Split("etp", 2)

All experts of a layer are one logical tensor, and a rank holds a run of its first dimension. So the number of
parameters does not grow with the number of experts, one kernel computes all experts of a rank, and a
checkpoint is read by any expert-parallel size as rectangles of that tensor. The initial values of an expert
depend on its number only.

Letters: E experts, h hidden size, f width of an expert, n rows on this rank, sorted by expert.
"""

from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..config.options.model import ModelConfig
from ..mpu.context import ParallelContext
from ..mpu.param_spec import Init, Matrices, ParamSpec, Split
from ..ops.activation import ACTIVATIONS
from ..ops.grouped import RowRuns, grouped_affine, grouped_product, sums_of_runs
from ..tensor_parallel.linear import new_shard
from ..tensor_parallel.weight_grad import Finish, grouped_gradient, now_or_later


class Experts(nn.Module):
    """Rows [n, h], sorted by expert → the same shape."""

    def __init__(
        self,
        config: ModelConfig,
        num_experts: int,
        name: str,
        ctx: ParallelContext,
        *,
        output_std: float,
    ):
        super().__init__()
        h = config.hidden_size
        f = config.expert_ffn_size
        self.activation = ACTIVATIONS[config.activation]
        parts = self.activation.parts
        bias = config.add_bias_linear
        self.linear_fc1 = GroupedLinear(
            f"{name}.linear_fc1",
            (num_experts, parts * f, h),
            ctx,
            Split("etp", 1, parts),
            init_std=config.init_method_std,
            bias=bias,
        )
        self.linear_fc2 = GroupedLinear(
            f"{name}.linear_fc2",
            (num_experts, h, f),
            ctx,
            Split("etp", 2),
            init_std=output_std,
            bias=bias,
        )

    def forward(self, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """runs: rows of each expert of this rank.

        Ranks that divide an expert hold the same x and parts of each expert's width, so results are partial sums.
        """
        return self.linear_fc2(
            self.activation(self.linear_fc1(x, runs)), runs
        )  # [n, f/t] between


class GroupedLinear(nn.Module):
    """y = x W_eᵀ + b_e for the rows of each expert: [n, in] → [n, out]."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        ctx: ParallelContext,
        cut: Split | None,
        *,
        init_std: float,
        bias: bool,
    ):
        """shape: experts, out, in. cut: over "etp", of out or of in; None: each of its ranks holds the whole
        weight, beside a cut one, and its gradient is a partial sum.

        The bias of a cut input is added by one of these ranks, since outputs are partial sums.
        """
        super().__init__()
        # The weights of all experts as one parameter.
        experts = Split("ep", 0)
        self.weight = new_shard(
            ParamSpec(
                f"{name}.weight",
                shape,
                Init("normal", init_std),
                (experts,) if cut is None else (experts, cut),
                matrices=Matrices(),
                partial_over=("etp",) if cut is None else (),
            ),
            ctx,
        )
        # A bias of the output is cut with it; a bias after a cut input is whole on each rank.
        self.bias = None
        self.adds_bias = True
        if bias:
            of_output = cut if cut is not None and cut.dim == 1 else None
            spec = ParamSpec(
                f"{name}.bias",
                shape[:2],
                Init("zeros"),
                (experts,) if of_output is None else (experts, of_output),
                decay=False,
                partial_over=("etp",) if of_output is None else (),
            )
            self.bias = new_shard(spec, ctx)
            self.adds_bias = of_output is not None or ctx.etp.rank == 0

    def forward(self, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """runs: rows of each expert of this rank, n in all."""
        return _GroupedLinear.apply(x, self.weight, self.bias, runs, self.adds_bias)


class _GroupedLinear(torch.autograd.Function):
    # The weight is kept on ctx and not with save_for_backward: see `tensor_parallel.linear._ColumnLinear`.

    @staticmethod
    def forward(ctx, x, weight, bias, runs, adds_bias):
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight
        ctx.runs = runs
        ctx.adds_bias = adds_bias
        return grouped_affine(x, weight, bias if adds_bias else None, runs)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        weight = ctx.weight
        runs = ctx.runs
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dw = (
            now_or_later(weight, partial(_begin_dw, weight, x, dy, runs))()
            if needs_dw
            else None
        )
        dx = grouped_product(dy, weight, runs) if needs_dx else None
        db = None
        if needs_db:
            db = (
                sums_of_runs(dy, runs)
                if ctx.adds_bias
                else dy.new_zeros(len(weight), dy.shape[1])
            )
        return dx, dw, db, None, None


def _begin_dw(
    weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, runs: RowRuns
) -> Finish:
    return partial(grouped_gradient, weight, x, dy, runs)
