"""A model is an ordered list of *named layers*: how they are named, and where their tensors are placed.

A layer's name is global ("decoder.layers.3"), so cutting the list into pipeline stages never renames a parameter, and
nothing is allocated before a stage builds its own slice. Every built layer is a module with one signature:

    forward(x, batch, cache=None) -> x         x: [s, b, h], with sequence parallelism [s / t, b, h]

where the embedding ignores x (None) and reads `batch.tokens`, and a head returns logits [s, b, Vp / t], or whatever the
model's loss understands.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError
from ..mpu.group import Group
from ..registry import did_you_mean


@dataclass(frozen=True)
class Placement:
    """Where and how the tensors of a layer live: what every module needs beside its own sizes.

    tp                 the tensor-parallel group
    sequence_parallel  outside the linears, each rank holds its slice of the sequence
    seed               of dropout masks; not of the initial weights, which `tensor_parallel.init` draws
    """

    tp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device | str
    seed: int

    def rows(self, x: torch.Tensor) -> range:
        """The positions of the sequence that x [s(/t), b, h] holds on this rank."""
        start = self.tp.rank * x.shape[0] if self.sequence_parallel else 0
        return range(start, start + x.shape[0])


@dataclass(frozen=True)
class LayerFlops:
    """Model FLOPs of one sequence through a layer, forward and backward: matrix products only, nothing for recomputation.

    weights  products with weights, whose backward has an input half and a weight half of equal cost
    scores   products without weights, such as attention scores and the sums that they weigh
    """

    weights: float = 0.0
    scores: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.scores


def no_products(seq_length: int, vocab_size: int) -> LayerFlops:
    """`Layer.flops` of a layer that multiplies no matrices."""
    return LayerFlops()


@dataclass(frozen=True)
class Layer:
    """One entry of the list.

    make  builds the module. A layer that is `tied_to` another takes that layer's weight as its argument when both are on
          one stage; called without, it builds a copy of its own (`spec.tied_copy`), equal because its name is.
    kind  label of layers that cost the same; recomputation and token dropping apply to a "block"
    flops  function(positions of a sequence, rows of the padded vocabulary) -> LayerFlops
    recompute_num_layers  of the blocks on one stage only the first so many recompute; None for all
    drops_tokens  a block that may see some of the tokens only
    """

    name: str
    make: Callable[..., nn.Module]
    kind: str
    tied_to: str | None = None
    recompute_num_layers: int | None = None
    drops_tokens: bool = False
    flops: Callable[[int, int], LayerFlops] = no_products

    @property
    def is_block(self) -> bool:
        return self.kind == "block"

    @property
    def sort(self) -> str:
        """`kind`, and "dropping block" for a block that drops tokens: layers of one sort do and keep alike."""
        return "dropping block" if self.drops_tokens else self.kind


def check_divides(what: str, number: int, tp: Group, reason: str) -> int:
    """`number` per rank. Raises ConfigError with the sizes that would do."""
    if number % tp.size:
        legal = ", ".join(str(t) for t in range(1, number + 1) if number % t == 0)
        raise ConfigError(f"{what}={number} is not a multiple of tensor_model_parallel_size={tp.size}: {reason}. "
                          f"Use a tensor-parallel size in ({legal}).")
    return number // tp.size


def pick(table: Mapping[str, object], what: str, name: str):
    """`table[name]`. Raises ConfigError naming the nearest known name."""
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}{did_you_mean(name, [*table]) or '.'} Known: {', '.join(sorted(table))}.")
    return table[name]
