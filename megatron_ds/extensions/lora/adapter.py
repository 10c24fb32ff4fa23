"""Adapters of rank r: y = W x + s B A x, where W is frozen (Hu et al. 2021, arXiv:2106.09685, section 4.1).

    column layer   A [r, in] on every rank      B [out/t, r]      the rows of W's shard
    row layer      A [r, in/t]                  B [out, r] on every rank
    whole layer    A [r, in] on every rank      B [out, r] on every rank
    experts        A [E, r, in(/t)]             B [E, out(/t), r]     one of each for each expert

The two matrices are linear layers of the package, so that between them there are s·b·r numbers: a column layer
sums their gradient over the tensor-parallel ranks, a row layer their values. With sequence parallelism, A of a
column layer and B of a row layer see a slice of the sequence, and the others gather and scatter r channels.
A layer that every rank has whole computes slices of the sequence, and so does its adapter, without
communication. Experts need none of their own: outputs of tensor-parallel ranks are partial sums in any case, and so
are the gradients of the matrices that all of these ranks hold.

A starts with normally distributed values of the variance of peft's (1 / 3 in), B with zeros: the first step
begins at the model without adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from ...moe.experts import GroupedLinear
from ...mpu.context import ParallelContext
from ...mpu.param_spec import Matrices
from ...ops.grouped import RowRuns
from ...tensor_parallel.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from .targets import PackedRows

Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
Drop = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class AdapterForm:
    """What the adapters of one layer are made of.

    rank   columns of B
    scale  of the sum
    parts  of the packed rows, each with an adapter; (None,): one adapter for all rows
    drops  dropout of the input of each adapter; of experts one, whose call takes the runs of rows too
    """

    rank: int
    scale: float
    ctx: ParallelContext
    parts: tuple[int | None, ...] = (None,)
    drops: tuple[Drop, ...] = ()


class AdaptedLinear(nn.Module):
    """A frozen linear layer with adapters: x → the layer's output + those of its adapters."""

    def __init__(self, base: Linear, form: AdapterForm):
        super().__init__()
        self.base = base
        self.scale = form.scale
        self.drops = form.drops
        self.rows = PackedRows.of(base.weight.spec)
        self.parts = form.parts
        self.adapters = nn.ModuleList(
            _adapter_of(base, self.rows, part, form.rank, form.ctx)
            for part in form.parts
        )

    @property
    def weight(self) -> nn.Parameter:
        """The frozen weight of the layer."""
        return self.base.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The frozen bias of the layer."""
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as the layer takes it; the collectives of the layer, and of its adapters with r channels."""
        y = self.base(x)
        outputs = []
        for drop, (down, up) in zip(self.drops, self.matrices()):
            outputs.append(up(down(drop(x)) * self.scale))
        return y + self.packed(outputs, y)

    def matrices(self) -> list[tuple[Linear, Linear]]:
        """Return (A, B) of each adapter."""
        pairs = (tuple(pair.children()) for pair in self.adapters)
        return [cast(tuple[Linear, Linear], pair) for pair in pairs]

    def packed(
        self, outputs: Sequence[torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Return the values of the adapters in the rows of `like` [.., out(/t)]; 0 for parts without an adapter."""
        if self.parts == (None,):
            return outputs[0]
        # This rank's groups: [.., groups, rows of a part].
        *outer, width = like.shape
        groups, sizes = self.rows.on_rank(width)
        of_part = dict(zip(self.parts, outputs))
        pieces = []
        for part, size in enumerate(sizes):
            if part in of_part:
                pieces.append(of_part[part].view(*outer, groups, size))
            else:
                pieces.append(like.new_zeros(*outer, groups, size))
        return torch.cat(pieces, -1).view(*outer, width)


class AdaptedExperts(nn.Module):
    """A frozen linear layer of experts with an adapter for each expert, in all rows."""

    def __init__(self, base: GroupedLinear, form: AdapterForm):
        super().__init__()
        self.base = base
        self.scale = form.scale
        [self.drop] = form.drops
        # The adapter is divided as the base is: by its rows, or by its columns.
        weight = base.weight.spec
        experts, rows, columns = weight.shape
        cut = weight.tensor_split
        assert cut is not None, (
            "weights of experts are divided over tensor-parallel ranks"
        )
        cuts_rows = cut.dim == 1
        name = weight.name.removesuffix(".weight")
        self.down = GroupedLinear(
            f"{name}.lora_a",
            (experts, form.rank, columns),
            form.ctx,
            None if cuts_rows else cut,
            init_std=initial_std(columns),
            bias=False,
        )
        self.up = GroupedLinear(
            f"{name}.lora_b",
            (experts, rows, form.rank),
            form.ctx,
            cut if cuts_rows else None,
            init_std=0.0,
            bias=False,
        )

    @property
    def weight(self) -> nn.Parameter:
        """The frozen weights of the experts."""
        return self.base.weight

    def forward(self, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
        """Rows [n, in] of the experts in `runs` → [n, out]."""
        down = self.down(self.drop(x, runs), runs)
        return self.base(x, runs) + self.up(down * self.scale, runs)


def _adapter_of(
    base: Linear,
    rows: PackedRows,
    part: int | None,
    rank: int,
    ctx: ParallelContext,
) -> nn.ModuleList:
    """[A, B] of one part of a layer's rows."""
    weight = base.weight.spec
    columns = weight.shape[1]
    name = weight.name.removesuffix(".weight")
    if part is not None:
        name = f"{name}.{part}"
    a = f"{name}.lora_a"
    b = f"{name}.lora_b"
    std = initial_std(columns)
    out = rows.rows_of(part)
    # A of a row layer reads its slice of the input. What is whole sees tokens of the rank's slice of the sequence.
    whole = partial(
        ReplicatedLinear,
        bias=False,
        partial_over=ctx.partial_over,
        matrices=Matrices(),
    )
    down: Linear
    up: Linear
    if isinstance(base, RowParallelLinear):
        down = RowParallelLinear(columns, rank, ctx, name=a, init_std=std, bias=False)
    else:
        down = whole(columns, rank, ctx, name=a, init_std=std)
    # B writes the rows that the layer writes on this rank.
    if isinstance(base, ColumnParallelLinear):
        splits = rows.splits if part is None else 1
        up = ColumnParallelLinear(
            rank, out, ctx, name=b, init_std=0.0, bias=False, parts=splits
        )
    else:
        up = whole(rank, out, ctx, name=b, init_std=0.0)
    return nn.ModuleList((down, up))


def initial_std(columns: int) -> float:
    """Standard deviation of A: that of the uniform distribution of variance 1 / 3 in."""
    return (3 * columns) ** -0.5
