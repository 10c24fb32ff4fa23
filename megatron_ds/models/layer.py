"""A model is an ordered list of *named layers*.

A layer's name is global ("decoder.layers.3"), so cutting the list into pipeline stages never renames a
parameter, and nothing is allocated before a stage builds its own slice. Every built layer is a module with
one signature:

    forward(x, batch) -> x                     x: [s, b, h], with sequence parallelism [s / t, b, h]

The embedding ignores x (None) and reads `batch.tokens`; a head returns logits [s, b, Vp / t], or another
value that the model's loss takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..batch.batch import Batch
from ..errors import ConfigError
from ..mpu.context import ParallelContext, Recompute
from ..mpu.group import Group
from ..ops.dropout import dropout, dropout_add
from ..ops.work import WATCHERS
from ..registry import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class LayerFlops:
    """Model FLOPs of one sequence in a layer, forward and backward: matrix products, without recomputation.

    weights  products with weights, whose backward has an input half and a weight half of equal cost
    scores   products without weights, such as attention scores and the sums that they weigh
    frozen   products with weights that are not trained, whose backward has the input half alone
    again    of the forward, what the backward of the layer computes once more in any case, as for tiles of
             the sequence; its products with weights then belong to the input half
    """

    weights: float = 0.0
    scores: float = 0.0
    again: float = 0.0
    frozen: float = 0.0

    @property
    def total(self) -> float:
        """FLOPs of products with and without weights."""
        return self.weights + self.scores + self.frozen

    @property
    def forward(self) -> float:
        """FLOPs of the forward: a third, and the half of products with frozen weights."""
        return self.total / 3 + self.frozen / 6


def no_products(seq_length: int, vocab_size: int) -> LayerFlops:
    """`Layer.flops` of a layer that multiplies no matrices."""
    return LayerFlops()


@dataclass(frozen=True)
class Layer:
    """One entry of the list of layers that a model is.

    make          builds the module. A layer that is `tied_to` another takes that layer's weight as its
                  argument if both are on one rank; without argument it builds a copy (`spec.tied_copy`),
                  initialized equally because the two have the same name
    kind          layers of the same kind cost the same
    noun          names the layer in texts; "" for its kind
    flops         function(positions of a sequence, rows of the padded vocabulary) -> LayerFlops
    is_block      one of the repeated layers: pipelines cut between them, `KeptTokens` counts them
    recompute     of a block; how many blocks of a stage recompute is decided when the stage is built
    drops_tokens  whether the block may see only some of the tokens
    """

    name: str
    make: Callable[..., nn.Module]
    kind: str
    tied_to: str | None = None
    is_block: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    drops_tokens: bool = False
    flops: Callable[[int, int], LayerFlops] = no_products
    noun: str = ""

    @property
    def sort(self) -> str:
        """`kind`, and "dropping block" for a block that drops tokens: layers of one sort cost alike."""
        return f"dropping {self.kind}" if self.drops_tokens else self.kind


class HiddenDropout:
    """In training, sets elements of x [s(/t), b, h] to 0 with probability `p`, at a named site of the model.

    The mask is a function of (seed, site, sample, position), so it is the same under every layout.
    """

    def __init__(self, p: float, site: str, ctx: ParallelContext):
        self.p = p
        self.site = site
        self.ctx = ctx

    def is_active(self, batch: Batch) -> bool:
        """Return whether it changes anything."""
        return self.p > 0 and batch.training

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return dropout(x, self.p, **self._table(batch)) if self.is_active(batch) else x

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """`residual` + dropout of x, in one operation."""
        if not self.is_active(batch):
            return residual + x
        return dropout_add(x, residual, self.p, **self._table(batch))

    def _table(self, batch: Batch) -> dict[str, object]:
        """Return the random numbers of the rows of x, as `ops.dropout.dropout` takes them."""
        rows, picked = batch.positions(self.ctx.slice.rows(batch.seq_length))
        return {
            "seed": self.ctx.seed,
            "site": self.site,
            "sample_ids": batch.sample_ids,
            "rows": rows,
            "picked": picked,
        }


def recompute(
    function: Callable,
    *args: object,
    keep: Callable[..., Callable[[], torch.Tensor]] | None = None,
) -> torch.Tensor:
    """`function(*args)`, saving only `args` for backward, which calls `function` again.

    keep: function of `args` that keeps the first of them; it returns a function that returns it again


    Full recomputation wraps a block and keeps its input [s, b, h]; selective wraps core attention, whose
    scores grow with s² and cost little to compute again (Korthikanti et al. 2022, arXiv:2205.05198, section
    5). No random state is kept or restored: dropout masks are functions of (seed, site, sample). Collectives
    inside run again too, on every rank of the group in the same order.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    # Plans distinguish both runs. Compiled code has no such contexts.
    contexts: dict = {}
    for watcher in WATCHERS:
        contexts["context_fn"] = watcher.recomputation_contexts
    if keep is None:
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=False, **contexts
        )
    again, (x, *others) = keep(*args), args
    given = [x]
    run = lambda: function(given.pop() if given else again(), *others)
    return checkpoint(run, use_reentrant=False, preserve_rng_state=False, **contexts)


def check_divides(what: str, number: int, tp: Group, reason: str) -> int:
    """`number` per rank. Raises ConfigError that lists the legal sizes."""
    if number % tp.size:
        legal = ", ".join(str(t) for t in range(1, number + 1) if number % t == 0)
        raise ConfigError(
            f"{what}={number} is not a multiple of tensor_model_parallel_size={tp.size}: "
            f"{reason}. Use a tensor-parallel size in ({legal})."
        )
    return number // tp.size


def pick(table: Mapping[str, T], what: str, name: str) -> T:
    """`table[name]`. Raises ConfigError with the most similar name."""
    if name not in table:
        raise ConfigError(
            f"unknown {what} {name!r}{did_you_mean(name, [*table]) or '.'} Known: "
            f"{', '.join(sorted(table))}."
        )
    return table[name]
