"""`ParallelContext`: what every layer of a model needs beside its own sizes: groups, its slice of the
sequence, dtype, device, seed and recomputation. One value, passed to every function that makes layers.

A layer that divides work over another mesh axis asks `ctx.group("cp")`, or any set of axes, when it is built.
Asking for a group of several ranks for the first time connects it, which is collective over the world
(`mesh.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from ..errors import ConfigError
from .group import Group, solo
from .param_spec import ParamSpec
from .sequence_slice import SequenceSlice

GRANULARITIES = (None, "selective", "full")


class GroupSource(Protocol):
    """Gives the group of this rank over a set of mesh axes: a `Mesh`."""

    def group(self, *axes: str) -> Group:
        """Collective over the world when first asked for these axes."""


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in backward. Raises ConfigError for an unknown granularity.

    granularity  None; "selective": core attention; "full": whole blocks
    num_layers   blocks of each pipeline stage that recompute, from its first; None for all
    """

    granularity: str | None = None
    num_layers: int | None = None

    def __post_init__(self):
        if self.granularity not in GRANULARITIES:
            raise ConfigError(f"recompute_granularity={self.granularity!r} is not known: use 'full', "
                              "'selective' or none.")


@dataclass(frozen=True)
class Precision:
    """The recipe of formats that layers compute in. Today one format: that of parameters and activations."""

    parameters: torch.dtype = torch.float32


@dataclass(frozen=True)
class ParallelContext:
    """The default is one process without peers, fp32, on the CPU.

    groups             None: every group has this rank alone
    sequence_parallel  between linear layers each tensor-parallel rank holds its part of the sequence
    device             of parameters; "meta" to build layers without memory
    seed               of dropout masks and token selection; initial weights have theirs in
                       `tensor_parallel.init`
    """

    groups: GroupSource | None = None
    sequence_parallel: bool = False
    precision: Precision = field(default_factory=Precision)
    device: torch.device = torch.device("cpu")
    seed: int = 0
    recompute: Recompute = field(default_factory=Recompute)

    def group(self, *axes: str) -> Group:
        """The group over these mesh axes; collective over the world when it is first used."""
        return solo("-".join(axes)) if self.groups is None else self.groups.group(*axes)

    @cached_property
    def tp(self) -> Group:
        """The tensor-parallel group."""
        return self.group("tp")

    @cached_property
    def slice(self) -> SequenceSlice:
        """Which tokens of a sequence this rank holds."""
        tp, cp = self.tp, self.group("cp")
        return SequenceSlice.of(tp=(tp.rank, tp.size), sequence_parallel=self.sequence_parallel,
                                cp=(cp.rank, cp.size))

    @property
    def sequence_group(self) -> Group | None:
        """Ranks that divide the rows of a sequence between linear layers; None if each holds all rows."""
        return self.tp if self.sequence_parallel else None

    @property
    def partial_over(self) -> tuple[str, ...]:
        """`ParamSpec.partial_over` of parameters that are applied to hidden states between linear layers."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self.precision.parameters


def new_parameter(spec: ParamSpec, *, sizes: Mapping[str, int] | None = None,
                  dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> nn.Parameter:
    """This rank's shard of `spec`, uninitialised, with `.spec` set; `tensor_parallel.init` writes its values.

    sizes: ranks of mesh axes, 1 where absent.
    """
    parameter = nn.Parameter(torch.empty(spec.local_shape(sizes or {}), dtype=dtype, device=device))
    parameter.spec = spec
    return parameter
