"""`GradBuckets`: whole gradients in one flat buffer (ZeRO 0 and 1), reduced over the data-parallel ranks as
they fill.

Each parameter gets `main_grad`, its view of the buffer, and `grad_ready()`, called once per contribution and
backward. Layers that compute their weight gradient themselves add to main_grad and call grad_ready; for other
parameters a hook adds what autograd accumulated. Micro-batches add up. Before the last one the buckets are
*armed*: from then on contributions are counted, and a bucket whose parameters are all complete starts its
reduction while backward continues.

    backward of the last micro-batch     ..w4..w3..|..w2..|..w1..b1..|  finish
    reduction                                      |bucket 0 |bucket 1  |bucket 2, wait

Note: in order. Buckets start strictly in the order of the layout; a complete bucket waits for those before
it. So every rank issues the same collectives in the same order, even if one of them sends no token to some
expert.

Note: sum. The reduction sums and nothing is divided: the loss of each micro-batch is scaled by its share of
the *global* batch before backward. So the gradient of a micro-batch has the same bits for any number of
ranks, also when fp16 overflows, and experts, which process the tokens of their whole expert-parallel group,
need no factor of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..errors import MegatronDSError
from ..host.memory_maps import huge_page_zeros
from ..mpu.collectives import all_reduce_
from ..mpu.group import Group, Work
from .data_groups import Hierarchy
from .exchange import BucketGradient, GradientExchange
from .layout import Layout, SlotPiece

UNARMED = -1


@dataclass(frozen=True, slots=True)
class Holder:
    """A parameter as the buckets see it.

    uses   contributions of one backward, including the tied reduction if there is one
    stage  the pipeline stage to which it belongs, None if the rank has only one
    """

    parameter: nn.Parameter
    uses: int = 1
    stage: int | None = None


class GradientStore(Protocol):
    """The gradients of one set of parameters: `GradBuckets`, or `GradShards` if they are sharded.

    holders   in the order of layout.slots
    ranks     ranks that hold the same parameters and sum their gradients
    flat      the gradients that this rank keeps, padding included
    received  of each holder, whether it received a contribution in this step
    """

    holders: Sequence[Holder]
    layout: Layout
    ranks: Hierarchy
    flat: torch.Tensor
    received: list[bool]

    def begin(self) -> None:
        """Zero all gradients and the counts of contributions."""

    def arm(self, stage: int | None = None) -> None:
        """The next backward of `stage` (None: of all) completes its gradients: count contributions from now
        on."""

    def close(self, bucket: int) -> None:
        """No more contributions to buckets up to this one are on their way."""

    def reopen(self) -> None:
        """Reduce the gradients so far, so that later ones can be added and reduced. Collective."""

    def finish(self) -> None:
        """Reduce what is not reduced yet, wait for everything, then sum partial gradients over tp.
        Collective."""

    def grad_of(self, piece: SlotPiece) -> torch.Tensor:
        """The gradient of a piece, padding included: a view."""

    def start_of(self, piece: SlotPiece) -> int:
        """Where a piece begins in `flat`."""


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a set are reduced.

    ranks     over which they are summed
    tp        ranks over which parameters whose gradient is a partial sum are summed
    exchange  sums them
    overlap   start reductions during backward; False: later (see the two stores)
    """

    ranks: Hierarchy
    tp: Group
    exchange: GradientExchange
    overlap: bool


class GradBuckets(GradientStore):
    """A `GradientStore` of whole gradients.

    sharded  reduce-scatter instead of all-reduce: only this rank's shard is valid afterwards
    dtype    gradients accumulate in it
    """

    def __init__(self, holders: Sequence[Holder], layout: Layout, reduction: Reduction, *, sharded: bool,
                 dtype: torch.dtype = torch.float32):
        ranks = reduction.ranks
        self.holders, self.layout, self.ranks = holders, layout, ranks
        self.sharded, self.overlap, self._exchange = sharded, reduction.overlap, reduction.exchange
        self.flat = huge_page_zeros(layout.numel, dtype=dtype, device=holders[0].parameter.device)
        self.pieces = layout.slot_intersections(ranks.shard) if sharded else layout.whole_slots()
        self._tp = reduction.tp
        self._partial = [self.grad_of(p) for p in self.pieces if holders[p.slot].parameter.spec.partial_over]
        self._shard_pieces = layout.shard_pieces(ranks.shard)
        self._missing = [UNARMED] * len(holders)      # contributions still to come, per parameter
        self._open = [0] * len(layout.buckets)        # incomplete parameters, per bucket
        self._next = 0                                # the first bucket whose reduction has not begun
        self._works: list[Work] = []
        for i, holder in enumerate(holders):
            self._install(i, holder.parameter)
        self.begin()

    def begin(self) -> None:
        self._wait()                # for reductions of gradients that are dropped: they write into the buffer
        self.flat.zero_()
        self.received = [False] * len(self.holders)
        self._restart_counting()

    def arm(self, stage: int | None = None) -> None:
        for i, holder in enumerate(self.holders):
            if self._missing[i] == UNARMED and (stage is None or holder.stage in (None, stage)):
                self._missing[i] = holder.uses

    def close(self, bucket: int) -> None:
        """Does nothing: buckets are counted."""

    def finish(self) -> None:
        self._complete()
        sum_coalesced(self._partial, self._tp)

    def reopen(self) -> None:
        """Reduce the gradients so far, so that later ones can be added and reduced. Collective.

        One rank keeps the sum of each element (its owner if they are sharded), and the others keep zero: the
        next reduction adds further gradients of each rank to it.
        """
        self._complete()
        if self.sharded:
            at = 0
            for piece in self._shard_pieces:
                self.flat[at:piece.start].zero_()
                at = piece.stop
            self.flat[at:].zero_()
        elif self.ranks.data.rank:
            self.flat.zero_()
        self._restart_counting()

    def grad_of(self, piece: SlotPiece) -> torch.Tensor:
        start = self.start_of(piece)
        return self.flat[start:start + piece.padded_numel]

    @staticmethod
    def start_of(piece: SlotPiece) -> int:
        return piece.flat

    def _install(self, i: int, parameter: nn.Parameter) -> None:
        slot = self.layout.slots[i]
        parameter.main_grad = self.flat[slot.start:slot.stop].view(parameter.shape)
        parameter.grad_ready = partial(self._contributed, i)
        parameter.register_post_accumulate_grad_hook(move_to_main_grad)

    def _contributed(self, i: int) -> None:
        self.received[i] = True
        missing = self._missing[i]
        if missing == UNARMED or not self.overlap:
            return
        if missing == 0:
            raise MegatronDSError(
                f"{self.holders[i].parameter.spec.name} received more than the {self.holders[i].uses} "
                "gradient contribution(s) announced for one backward: its bucket may be reduced already, "
                "and the rest would be lost. Give the true number in `ParameterUse.counts`.")
        self._missing[i] = missing - 1
        if missing == 1:
            bucket = self.layout.slots[i].bucket
            self._open[bucket] -= 1
            if self.overlap and not self._open[bucket]:
                self._launch_up_to(self._first_open())

    def _restart_counting(self) -> None:
        self._next = 0
        self._missing = [UNARMED] * len(self.holders)
        self._open = [bucket.last_slot - bucket.first_slot for bucket in self.layout.buckets]

    def _complete(self) -> None:
        self._launch_up_to(len(self.layout.buckets))
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._exchange.finish()

    def _first_open(self) -> int:
        return next((b for b in range(self._next, len(self._open)) if self._open[b]), len(self._open))

    def _launch_up_to(self, stop: int) -> None:
        for b in range(self._next, stop):
            bucket, piece = self.layout.buckets[b], self._shard_pieces[b]
            whole = self.flat[bucket.start:bucket.stop]
            out, start = whole, 0
            if self.sharded:
                out, start = self.flat[piece.start:piece.stop], piece.start - bucket.start
            name = self.layout.slots[bucket.first_slot].name
            gradient = BucketGradient(name, whole, out, start, False, self.ranks)
            self._works.append(self._exchange.reduce(gradient))
        self._next = max(self._next, stop)


def sum_coalesced(views: list[torch.Tensor], group: Group) -> None:
    """Sum small tensors over the group in one message.

    Sums commute, so this comes after the data-parallel reduction: once a step, and of the shard only where
    there is one.
    """
    if group.size == 1 or not views:
        return
    joined = torch.cat(views)
    all_reduce_(joined, group)
    torch._foreach_copy_(views, list(joined.split([view.numel() for view in views])))


def move_to_main_grad(parameter: nn.Parameter) -> None:
    """A hook: what autograd accumulated is one contribution."""
    if parameter.grad is None:       # a layer that adds to main_grad itself: torch calls the hook anyway
        return
    main_grad = getattr(parameter, "main_grad", None)
    (parameter.take_main_grad() if main_grad is None else main_grad).add_(parameter.grad)
    parameter.grad = None
    parameter.grad_ready()
