"""Adapters with trained magnitudes: y = (‖W‖ + d) / ‖W + s B A‖ · (W + s B A) x, row by row (DoRA: Liu et al. 2024,
arXiv:2402.09353, section 4).

A row of the sum has the direction of W + s B A and the magnitude ‖W‖ + d. What is trained beside A and B is d, the
change of the magnitude, which begins at 0. It has the gradient of the magnitude itself, and no initial value that
depends on the frozen weights: these may be loaded at any layout, or drawn, or held in parts by ZeRO. In 16 bits a
change is finer than a magnitude. As in the paper's section 4.3, the norm in the denominator has no gradient.

W + s B A is never made. The squared norm of its row i is

    ‖W_i‖² + 2 s B_i · (A W_iᵀ) + s² B_i (A Aᵀ) B_iᵀ

so that one product of r columns with W, as small as that of r tokens, and numbers of shape [out, r] are enough. All
terms are sums over the columns of W: tensor-parallel ranks that divide the columns add theirs in one message of
2 · out numbers. Rows that the ranks divide need none.

Each output row is multiplied by 1 + c: y + c y has no rounding of a number near 1. The layer's bias is added after.
"""

import torch
from torch import nn

from ...moe.experts import GroupedLinear
from ...mpu import collectives
from ...mpu.context import ParallelContext
from ...mpu.group import Group, solo
from ...mpu.param_spec import Init, ParamSpec, Split
from ...ops.grouped import RowRuns, sums_of_runs
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    new_shard,
)
from .adapter import AdaptedExperts, AdaptedLinear, AdapterForm, Linear
from .targets import PackedRows


class DoraLinear(AdaptedLinear):
    """A frozen linear layer with adapters and magnitudes; parts without an adapter keep those of W."""

    def __init__(self, base: Linear, form: AdapterForm):
        super().__init__(base, form)
        # The bias is added to the scaled rows, and not by the layer.
        self.own_bias = base.bias
        base.bias = None  # type: ignore[assignment]  # a module takes None for a parameter
        self.columns = solo("tp")
        if isinstance(base, RowParallelLinear):
            self.columns = base.group
        changes = []
        for part in form.parts:
            spec = _change_spec(base, self.rows, part, form.ctx)
            changes.append(new_shard(spec, form.ctx))
        self.changes = nn.ParameterList(changes)

    @property
    def bias(self) -> nn.Parameter | None:
        """The frozen bias of the layer."""
        return self.own_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as the layer takes it; its collectives, and the norms of a row layer's rows."""
        y = super().forward(x)
        factors = []
        for change, norms in zip(self.changes, self._norms()):
            factors.append(_factor(change, *norms))
        of_rows = self.packed(
            factors, y.new_empty(len(self.weight), dtype=torch.float32)
        )
        of_rows = of_rows.to(y.dtype)
        y = torch.addcmul(y, y, of_rows)
        return y if self.own_bias is None else y + self.own_bias

    @torch.no_grad()
    def _norms(self) -> list[torch.Tensor]:
        """[2, rows on this rank] of each adapter: ‖W_i‖ and ‖(W + s B A)_i‖."""
        weight = self.weight
        own = row_squares(weight)
        norms = []
        for part, (down, up) in zip(self.parts, self.matrices()):
            products = weight @ down.weight.mT
            squares = squared_norms(
                self._rows_of(part, own),
                self._rows_of(part, products),
                down.weight,
                up.weight,
                self.scale,
            )
            norms.append(_summed(squares, self.columns).sqrt_())
        return norms

    def _rows_of(self, part: int | None, values: torch.Tensor) -> torch.Tensor:
        """Values [out(/t), ..] of the rows of one part."""
        if part is None:
            return values
        groups, sizes = self.rows.on_rank(len(values))
        by_group = values.view(groups, -1, *values.shape[1:])
        return by_group.split(sizes, 1)[part].flatten(0, 1)


class DoraExperts(AdaptedExperts):
    """A frozen linear layer of experts with an adapter and magnitudes for each expert."""

    def __init__(self, base: GroupedLinear, form: AdapterForm):
        super().__init__(base, form)
        self.own_bias = base.bias
        base.bias = None
        # The rows are divided as a bias is: outputs of a cut input are partial sums, and so is the gradient.
        cut = base.weight.spec.tensor_split
        assert cut is not None, (
            "weights of experts are divided over tensor-parallel ranks"
        )
        cuts_rows = cut.dim == 1
        self.columns = solo("etp") if cuts_rows else form.ctx.etp
        experts = Split("ep", 0)
        self.change = new_shard(
            ParamSpec(
                f"{base.weight.spec.name.removesuffix('.weight')}.lora_m.weight",
                base.weight.spec.shape[:2],
                Init("zeros"),
                (experts, cut) if cuts_rows else (experts,),
                decay=False,
                partial_over=() if cuts_rows else ("etp",),
            ),
            form.ctx,
        )

    def forward(self, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Rows [n, in] of the experts in `runs` → [n, out]; the norms of rows whose columns ranks divide."""
        y = super().forward(x, runs)
        factor = _factor(self.change, *self._norms()).to(y.dtype)
        bias = self.own_bias if self.base.adds_bias else None
        return _ScaledRuns.apply(y, factor, bias, runs)

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        weight = self.weight
        down = self.down.weight
        squares = squared_norms(
            row_squares(weight),
            weight @ down.mT,
            down,
            self.up.weight,
            self.scale,
        )
        return _summed(squares, self.columns).sqrt_()


class _ScaledRuns(torch.autograd.Function):
    # Values of experts are spread over their rows again in backward, and not kept.

    @staticmethod
    def forward(ctx, y, factor, bias, runs):
        ctx.save_for_backward(y, factor)
        ctx.runs = runs
        scaled = torch.addcmul(y, y, _of_rows(factor, runs, len(y)))
        return scaled if bias is None else scaled.add_(_of_rows(bias, runs, len(y)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        y, factor = ctx.saved_tensors
        runs = ctx.runs
        dfactor = sums_of_runs(dy * y, runs)
        return (
            torch.addcmul(dy, dy, _of_rows(factor, runs, len(y))),
            dfactor,
            None,
            None,
        )


def _of_rows(values: torch.Tensor, runs: RowRuns, rows: int) -> torch.Tensor:
    """[experts, out] → [n, out]. With the number of rows, the host does not wait for the device to add them up."""
    return values.repeat_interleave(runs.on_device, 0, output_size=rows)


def row_squares(weight: torch.Tensor) -> torch.Tensor:
    """‖W_i‖² of each row, fp32: [.., out, in] → [.., out]."""
    return torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32).square_()


def squared_norms(
    own: torch.Tensor,
    products: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[2, .., out]: ‖W_i‖² and ‖(W + s B A)_i‖²; own ‖W_i‖², products W Aᵀ and B [.., out, r]."""
    down = down.float()
    up = up.float()
    # Of s B_i (2 A W_iᵀ + s A Aᵀ B_iᵀ), the second term is a product of r columns.
    inner = 2 * products.float() + scale * (up @ (down @ down.mT))
    return torch.stack((own, own + scale * (up * inner).sum(-1)))


def _summed(squares: torch.Tensor, columns: Group) -> torch.Tensor:
    """Sums over the ranks that divide the columns of W. Rounding may leave a number below 0 where it is near 0."""
    if columns.size > 1:
        collectives.all_reduce_(squares, columns)
    return squares.clamp_(min=0)


def _factor(
    change: torch.Tensor, before: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """c = (‖W‖ + d) / ‖W + s B A‖ - 1, fp32. Outputs of rows of zeros are 0, whatever c is."""
    return (before + change - after) / after.where(after > 0, 1)


def _change_spec(
    base: Linear, rows: PackedRows, part: int | None, ctx: ParallelContext
) -> ParamSpec:
    """d of one part of a layer's rows, divided as the rows of B are."""
    name = base.weight.spec.name.removesuffix(".weight")
    if part is not None:
        name = f"{name}.{part}"
    splits: tuple[Split, ...] = ()
    partial_over = ctx.partial_over
    # The ranks divide the rows of a column layer, and scale slices of the sequence after others.
    if isinstance(base, ColumnParallelLinear):
        splits = (Split("tp", 0, rows.splits if part is None else 1),)
        partial_over = ()
    return ParamSpec(
        f"{name}.lora_m.weight",
        (rows.rows_of(part),),
        Init("zeros"),
        splits,
        partial_over=partial_over,
        decay=False,
    )
