"""`GradBuckets`: whole gradients in one flat buffer (ZeRO 0 and 1), reduced over the data-parallel ranks as
they fill; and what it shares with sharded gradients, `GradientStore`.

Each parameter gets a `SlotGradient`, to which layers that compute their weight gradient themselves contribute
once per backward; for other parameters a hook contributes what autograd accumulated. Before the last
micro-batch the buckets are *armed*: from then on contributions are counted, and a complete bucket starts its
reduction while backward continues.

Buffers are not cleared before a step: the first contribution to a parameter overwrites its view. Before the
reduction of a bucket, what received none is zeroed.

    backward of the last micro-batch     ..w4..w3..|..w2..|..w1..b1..|  finish
    reduction                                      |bucket 0 |bucket 1  |bucket 2, wait

Note: in order. A complete bucket waits for those before it. So every rank issues the same collectives in the
same order, even if one of them sends no token to some expert.

Note: sum. The reduction divides nothing: the loss of each micro-batch is scaled by its share of the *global*
batch before backward. So the gradient of a micro-batch has the same bits for any number of ranks, also when
fp16 overflows, and experts, which process the tokens of their whole expert-parallel group, need no factor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..errors import MegatronDSError
from ..host.large_pages import huge_page_zeros
from ..mpu.collectives import all_reduce_, settle
from ..mpu.group import Group, Waitable
from ..mpu.managed_parameter import accumulate, no_accumulator, spec_of
from .data_groups import Hierarchy
from .exchange import BucketGradient, GradientExchange, is_off, reads_in_place
from .layout import Layout, SlotPiece

if TYPE_CHECKING:
    from .gradient_checksum import GradientChecksum

UNARMED = -1
# The gradient of a parameter, whatever a class of its own shows as `grad`.
OWN_GRAD = cast(GetSetDescriptorType, torch.Tensor.grad)


@dataclass(frozen=True, slots=True)
class Holder:
    """A parameter as the buckets see it.

    uses   contributions of one backward, including the tied reduction if there is one
    stage  the pipeline stage to which it belongs, None if the rank has only one
    """

    parameter: nn.Parameter
    uses: int = 1
    stage: int | None = None


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a set are reduced.

    ranks     over which they are summed
    tp        ranks that divide the layers, over which gradients that are partial sums are summed
    exchange  sums them
    overlap   start reductions during backward; False: later (see the two stores)
    checksum  to which each bucket is added before its reduction, if any
    """

    ranks: Hierarchy
    tp: Group
    exchange: GradientExchange
    overlap: bool
    checksum: "GradientChecksum | None" = None


class SlotGradient:
    """The gradient of one parameter in a store: a `GradientAccumulator`.

    index     of its slot
    is_new    nothing was written to its view yet: what comes first overwrites it
    received  whether it received a contribution in this step
    missing   contributions to come before its bucket may be reduced; UNARMED while they are not counted
    """

    __slots__ = ("_store", "index", "is_new", "received", "missing")

    def __reduce__(self) -> tuple:
        return no_accumulator, ()

    def __init__(self, store: "GradientStore", index: int):
        self._store = store
        self.index = index
        self.is_new = True
        self.received = False
        self.missing = UNARMED

    def begin(self) -> None:
        """Forget all contributions."""
        self.is_new = True
        self.received = False

    def move(self, parameter: torch.Tensor) -> None:
        """Contribute what autograd accumulated: a hook."""
        grad = OWN_GRAD.__get__(parameter)
        if grad is None:  # a layer that contributes itself: torch calls the hook anyway
            return
        OWN_GRAD.__set__(parameter, None)
        self.add(grad)

    # The calls of `write` and `ready` are written out where each linear layer comes in each backward.
    def add(self, gradient: torch.Tensor) -> None:
        store = self._store
        view = store.view(self.index)
        factor = store.factor
        if not self.is_new and factor == 1.0:
            view.add_(gradient)
        elif not self.is_new:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            view.copy_(gradient).mul_(factor)
        self.is_new = False
        self.received = True
        store.contributions += 1
        if self.missing != UNARMED:
            store.count(self)

    def contribute(self, add: Callable[..., object], *arguments: object) -> None:
        store = self._store
        if store.factor != 1.0:
            self._refuse_factor()
        add(store.view(self.index), *arguments, self.is_new)
        self.is_new = False
        self.received = True
        store.contributions += 1
        if self.missing != UNARMED:
            store.count(self)

    def write(self, add: Callable[..., object], *arguments: object) -> None:
        if self._store.factor != 1.0:
            self._refuse_factor()
        add(self._store.view(self.index), *arguments, self.is_new)
        self.is_new = False

    def ready(self) -> None:
        self.received = True
        self._store.contributions += 1
        if self.missing != UNARMED:
            self._store.count(self)

    def view(self) -> torch.Tensor:
        return self._store.view(self.index)

    def _refuse_factor(self) -> None:
        raise MegatronDSError(
            f"{self._store.layout.slots[self.index].name} belongs to a layer that adds its gradient to "
            "the buffer itself, without the factor that loss.backward() leaves out. "
            "Call engine.backward(loss)."
        )


class GradientStore:
    """The gradients of one set of parameters: `GradBuckets`, or `GradShards` if they are sharded. Counts
    contributions; the methods without a body are those in which the two differ.

    holders   in the order of layout.slots
    ranks     ranks that hold the same parameters and sum their gradients
    flat      the gradients that this rank keeps, padding included
    gradients  of the holders
    contributions  their number so far, in all steps
    view      from the index of a slot to its whole gradient, in the shape of the parameter: a view
    """

    view: Callable[[int], torch.Tensor]

    def __init__(
        self,
        holders: Sequence[Holder],
        layout: Layout,
        reduction: Reduction,
        flat: torch.Tensor,
        pieces: Sequence[SlotPiece],
    ):
        self.holders = holders
        self.layout = layout
        self.ranks = reduction.ranks
        self.flat = flat
        self._overlap = reduction.overlap
        self._exchange = reduction.exchange
        self._checksum = reduction.checksum
        self._tp = reduction.tp
        # Sums over tensor-parallel ranks are completed for the parts in this rank's shard.
        self._partial = [
            self.grad_of(p)
            for p in pieces
            if spec_of(holders[p.slot].parameter).partial_over
        ]
        self._shard_pieces = layout.shard_pieces(self.ranks.shard)
        self.contributions = 0
        # A factor of what autograd accumulates, for backwards of an unscaled loss.
        self.factor = 1.0
        self.hooks: list = []  # handles of those on parameters
        self.gradients: list[SlotGradient] = []
        # Layers contribute to these; autograd's sums are moved by a hook.
        for i, holder in enumerate(holders):
            gradient = SlotGradient(self, i)
            self.gradients.append(gradient)
            accumulate(holder.parameter, gradient)
            hook = holder.parameter.register_post_accumulate_grad_hook(gradient.move)
            self.hooks.append(hook)

    def begin(self) -> None:
        """Forget all gradients and start counting anew."""

    def arm(self, stage: int | None = None) -> None:
        """The next backward of `stage` (None: of all) completes its gradients: count from now on."""

    def close(self, bucket: int) -> None:
        """No more contributions to buckets up to this one are on their way."""

    def reopen(self) -> None:
        """Reduce what is there; more gradients are added to it and reduced later. Collective."""

    def complete(self) -> None:
        """Reduce the rest and wait: what this rank keeps is valid, and may be changed. Collective."""
        self._launch_up_to(len(self.layout.buckets))
        self._wait()

    def finish(self) -> None:
        """Reduce the rest, wait for everything, then sum partial gradients over tp. Collective."""
        self.complete()
        sum_coalesced(self._partial, self._tp)

    def grad_of(self, piece: SlotPiece) -> torch.Tensor:
        """Return the gradient of a piece, padding included: a view."""
        start = self.start_of(piece)
        return self.flat[start : start + piece.padded_numel]

    def start_of(self, piece: SlotPiece) -> int:
        """Return where a piece begins in `flat`."""
        raise NotImplementedError

    def _clear_rest(self, b: int, whole: torch.Tensor) -> None:
        """Zero what nothing was written to in a bucket, padding included."""
        bucket = self.layout.buckets[b]
        at = 0
        rest = []
        for i in range(bucket.first_slot, bucket.last_slot):
            slot = self.layout.slots[i]
            gradient = self.gradients[i]
            rest.append(
                (at, (slot.stop if gradient.is_new else slot.start) - bucket.start)
            )
            at = slot.stop - bucket.start
            gradient.is_new = False
        rest.append((at, whole.numel()))
        if parts := [whole[start:stop] for start, stop in rest if start < stop]:
            torch._foreach_zero_(parts)

    def _restart_counting(self) -> None:
        self._next = 0  # the first bucket whose reduction has not begun
        for gradient in self.gradients:
            gradient.missing = UNARMED
        # The slots of each bucket that are not complete.
        self._open = [
            bucket.last_slot - bucket.first_slot for bucket in self.layout.buckets
        ]

    def count(self, gradient: SlotGradient) -> None:
        """Count a contribution to armed buckets, and begin the reductions for which it was the last."""
        if gradient.missing == 0:
            self._refuse(gradient.index)
            return
        gradient.missing -= 1
        if gradient.missing == 0:
            bucket = self.layout.slots[gradient.index].bucket
            self._open[bucket] -= 1
            if not self._open[bucket]:
                buckets = range(self._next, len(self._open))
                self._launch_up_to(
                    next((b for b in buckets if self._open[b]), len(self._open))
                )

    def _refuse(self, i: int) -> None:
        """More contributions came than were announced."""

    def _launch_up_to(self, stop: int) -> None:
        for b in range(self._next, stop):
            self._launch(b)
        self._next = max(self._next, stop)

    def _launch(self, b: int) -> None:
        """Begin the reduction of a bucket."""

    def _reduce(
        self, b: int, whole: torch.Tensor, out: torch.Tensor, add: bool
    ) -> Waitable:
        if self._checksum is not None:
            self._checksum.add(whole)
        bucket = self.layout.buckets[b]
        start = 0 if out is whole else self._shard_pieces[b].start - bucket.start
        name = self.layout.slots[bucket.first_slot].name
        return self._exchange.reduce(
            BucketGradient(name, whole, out, start, add, self.ranks)
        )

    def _wait(self) -> None:
        """Wait for all reductions."""


class GradBuckets(GradientStore):
    """A `GradientStore` of whole gradients.

    sharded      reduce-scatter instead of all-reduce: only this rank's shard is valid afterwards
    stays_whole  the exchange leaves some steps unreduced, and the whole gradient of each rank is read
    dtype        gradients accumulate in it
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        layout: Layout,
        reduction: Reduction,
        *,
        sharded: bool,
        stays_whole: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        data = reduction.ranks.data
        # A buffer that other ranks read in place lies in shared memory.
        is_read = data.sums is not None and reads_in_place(reduction.exchange)
        flat = (
            data.shared_memory.zeros(layout.numel, dtype)
            if is_read
            else huge_page_zeros(
                layout.numel, dtype=dtype, device=holders[0].parameter.device
            )
        )
        # Gradients that are complete here: this rank's shard, or all of them.
        in_shard = sharded and not stays_whole
        pieces = (
            layout.slot_intersections(reduction.ranks.shard)
            if in_shard
            else layout.whole_slots()
        )
        super().__init__(holders, layout, reduction, flat, pieces)
        self.sharded = sharded
        self._stays_whole = stays_whole
        self._works: list[Waitable] = []
        views = [
            flat[slot.start : slot.stop].view(holder.parameter.shape)
            for slot, holder in zip(layout.slots, holders)
        ]
        self.view = views.__getitem__
        self.begin()

    def begin(self) -> None:
        self._wait()  # for reductions of gradients that are dropped: they write into the buffer
        for gradient in self.gradients:
            gradient.begin()
        self._restart_counting()

    def arm(self, stage: int | None = None) -> None:
        for holder, gradient in zip(self.holders, self.gradients):
            is_of_stage = stage is None or holder.stage in (None, stage)
            if self._overlap and is_of_stage and gradient.missing == UNARMED:
                gradient.missing = holder.uses

    def reopen(self) -> None:
        """Reduce the gradients so far, so that later ones can be added and reduced. Collective.

        One rank keeps the sum of each element (its owner if they are sharded), and the others keep zero: the
        next reduction adds further gradients of each rank to it.
        """
        self._launch_up_to(len(self.layout.buckets))
        self._wait()
        if self._stays_whole and is_off(self._exchange):
            pass
        elif self.sharded:
            at = 0
            for piece in self._shard_pieces:
                self.flat[at : piece.start].zero_()
                at = piece.stop
            self.flat[at:].zero_()
        elif self.ranks.data.rank:
            self.flat.zero_()
        self._restart_counting()

    def start_of(self, piece: SlotPiece) -> int:
        return piece.flat

    def _refuse(self, i: int) -> None:
        raise MegatronDSError(
            f"{spec_of(self.holders[i].parameter).name} received more than the {self.holders[i].uses} "
            "gradient contribution(s) announced for one backward: its bucket may be reduced already, "
            "and the rest would be lost. Give the true number in `ParameterUse.counts`."
        )

    def _launch(self, b: int) -> None:
        bucket = self.layout.buckets[b]
        piece = self._shard_pieces[b]
        whole = self.flat[bucket.start : bucket.stop]
        self._clear_rest(b, whole)
        out = self.flat[piece.start : piece.stop] if self.sharded else whole
        self._works.append(self._reduce(b, whole, out, add=False))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._exchange.finish()
        settle(self.ranks.inner)


def sum_coalesced(views: list[torch.Tensor], group: Group) -> None:
    """Sum small tensors over the group in one message, after the data-parallel reduction: once a step."""
    if group.size == 1 or not views:
        return
    joined = torch.cat(views)
    all_reduce_(joined, group)
    torch._foreach_copy_(views, list(joined.split([view.numel() for view in views])))
