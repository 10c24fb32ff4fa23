"""`ParallelContext`: what every layer of a model needs besides its own sizes: groups, its slice of the
sequence, dtype, device, seed and recomputation. One value, passed to every function that makes layers.

A layer that divides work over another mesh axis asks `ctx.group("cp")`, or any set of axes, when it is built.
Asking for a group of several ranks for the first time connects it, which is collective over the world
(`mesh.py`).

`SequenceSlice`: two axes divide a sequence, in two steps. Context parallelism decides which tokens a *batch*
of the rank holds: two chunks, one from each half, so that causal attention costs the same on every rank
("zigzag"), or one run of tokens where every rank has the same work anyway. Sequence parallelism then divides
those tokens, in their order, over the tensor-parallel ranks: each holds the *rows* of hidden states of its
part between two linear layers.

    8 tokens, cp 2, tp 2          cp 0: 0 1 | 6 7            cp 1: 2 3 | 4 5
                                  tp 0: 0 1   tp 1: 6 7      tp 0: 2 3   tp 1: 4 5

Tokens of one cp rank are in ascending order. Without context parallelism a batch holds whole sequences and
rows are a contiguous run; then nothing here makes a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import ConfigError
from .group import Group, solo
from .managed_parameter import ManagedParameter, described
from .param_spec import ParamSpec
from .sequence_slice import SequenceSlice

if TYPE_CHECKING:
    from ..host.waiting_tensors import WaitingTensors
    from .sequence_ranks import SequenceRanks

GRANULARITIES = (None, "selective", "full")


class GroupSource(Protocol):
    """Gives the group of this rank over a set of mesh axes: a `Mesh`."""

    def group(self, *axes: str) -> Group:
        """Return the group of this rank over these axes. The first call for them is collective over the world."""

    def split(self, size: int, *axes: str) -> tuple[Group, Group]:
        """(inner, outer) groups of that group: runs of `size` ranks, and ranks of equal position in them."""


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in backward. Raises ConfigError for an unknown granularity.

    granularity  None; "selective": core attention; "full": whole blocks
    num_layers   blocks of each pipeline stage that recompute, from its first; None for all
    offload      inputs of recomputed blocks wait in host memory
    partition    each tensor-parallel rank keeps a part of them, unless sequence parallelism divides them
    """

    granularity: str | None = None
    num_layers: int | None = None
    offload: bool = False
    partition: bool = False

    def __post_init__(self):
        if self.granularity not in GRANULARITIES:
            raise ConfigError(
                f"recompute_granularity={self.granularity!r} is not known: use 'full', "
                "'selective' or none."
            )


@dataclass(frozen=True)
class ParallelContext:
    """The default is one process without peers, fp32, on the CPU.

    groups             None: every group has this rank alone
    sequence_parallel  between linear layers each tensor-parallel rank holds its part of the sequence
    dtype              of parameters and activations
    device             of parameters; "meta" to build layers without memory
    seed               of dropout masks and token selection; initial weights have theirs in
                       `tensor_parallel.init`
    logit_chunks       parts of a micro-batch for which the head and the loss are computed one by one; 1: the
                       head returns logits; 0: as many as `tensor_parallel.logits_in_chunks` finds suitable
    mlp_tiles          tiles of a sequence to which a dense feed-forward is applied one by one; 0: one for as
                       many tokens as the hidden size
    zigzag             of `SequenceSlice`
    cp_comm_type       how context-parallel ranks share attention: of all layers, or of each
    cp_heads           context-parallel ranks that exchange tokens for heads, of layers with "a2a+p2p"
    """

    groups: GroupSource | None = None
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    seed: int = 0
    recompute: Recompute = field(default_factory=Recompute)
    logit_chunks: int = 1
    zigzag: bool = True
    cp_comm_type: tuple[str, ...] = ("p2p",)
    cp_heads: int = 1
    mlp_tiles: int = 1

    def comm_type(self, layer: int) -> str:
        """Return how context-parallel ranks share the attention of a layer."""
        return self.cp_comm_type[layer if len(self.cp_comm_type) > 1 else 0]

    def group(self, *axes: str) -> Group:
        """Return the group over these mesh axes; collective over the world when it is first used."""
        return solo("-".join(axes)) if self.groups is None else self.groups.group(*axes)

    @cached_property
    def tp(self) -> Group:
        """The tensor-parallel group."""
        return self.group("tp")

    @cached_property
    def etp(self) -> Group:
        """The ranks that divide each expert: those of `tp`, unless experts are divided in another way."""
        return self.group("etp")

    @cached_property
    def cp(self) -> Group:
        """The context-parallel group."""
        return self.group("cp")

    @cached_property
    def split_cp(self) -> tuple[Group, Group]:
        """(ranks that exchange tokens for heads, ranks of equal position) of the context-parallel group.
        Collective over the world when it is first used."""
        assert self.groups is not None, "a layer of one rank divides no heads"
        return self.groups.split(self.cp_heads, "cp")

    @cached_property
    def slice(self) -> SequenceSlice:
        """Which tokens of a sequence this rank holds."""
        tp = self.tp
        cp = self.cp
        return SequenceSlice.of(
            tp=(tp.rank, tp.size),
            sequence_parallel=self.sequence_parallel,
            cp=(cp.rank, cp.size),
            zigzag=self.zigzag,
        )

    @cached_property
    def waiting(self) -> "WaitingTensors":
        """Tensors of this rank that wait in host memory for their backward."""
        from ..host.waiting_tensors import WaitingTensors

        return WaitingTensors()

    @property
    def sequence_group(self) -> Group | None:
        """Ranks that divide the rows of a sequence between linear layers; None if each holds all rows."""
        return self.tp if self.sequence_parallel else None

    @cached_property
    def sequence_ranks(self) -> "SequenceRanks | None":
        """Ranks that hold different tokens of a sequence; None if this rank holds all of them."""
        tp = self.sequence_group or solo("tp")
        cp = self.cp
        if tp.size * cp.size == 1:
            return None
        if tp.size > 1 and cp.size > 1:
            every = self.group("tp", "cp")
        else:
            every = cp if cp.size > 1 else tp
        from .sequence_ranks import SequenceRanks

        return SequenceRanks(every, tp, cp, self.slice)

    @property
    def partial_over(self) -> tuple[str, ...]:
        """`ParamSpec.partial_over` of parameters that are applied to hidden states between linear layers."""
        return ("tp",) if self.sequence_parallel else ()


def new_parameter(
    spec: ParamSpec,
    *,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> ManagedParameter:
    """Return this rank's shard of `spec`, uninitialised; `tensor_parallel.init` writes its values.

    sizes: ranks of mesh axes, 1 where absent.
    """
    data = torch.empty(spec.local_shape(sizes or {}), dtype=dtype, device=device)
    return described(data, spec)
