"""`GradShards`: gradients of which each data-parallel rank keeps its shard (ZeRO 2 and 3).

The whole buffer of a bucket exists only while the bucket fills: it is borrowed from a pool at the first
contribution, summed over the ranks into shards when the bucket is complete, and given back.

    backward of micro-batch k     ..w4..w3..|..w2..|..w1..b1..|            next backward
    whole buffers                 |-- bucket 0 ----|
                                            |---- bucket 1 ----|
                                                   |-- bucket 2 ------|
    reduce-scatter                          |bucket 0 |bucket 1  |bucket 2
    shard, kept until the step              =         +=         +=

A *cycle* begins with `arm` and reduces every bucket once, in order: those that fill up during backward, the
rest when the next cycle begins or in `finish`. Armed before each micro-batch, gradients exist only as shards.
Armed before the last one only, whole buffers are kept from the first micro-batch to the last and reduced
once: fewer bytes are sent, more are held.

Note: any order of contributions is correct. A sum does not depend on the cycle in which a contribution is
counted: one that arrives before its cycle is armed, or after its bucket was reduced, stays in a borrowed
buffer until the next turn of the bucket. A parameter without a contribution on some rank adds zero there and
delays no other rank: all ranks reduce the same buckets in the same order whatever they received.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..errors import MegatronDSError
from .buckets import GradientStore, Holder, Reduction, move_to_main_grad, sum_coalesced
from .exchange import BucketGradient, BufferPool
from .layout import Layout, SlotPiece


class GradShards(GradientStore):
    """A `GradientStore` of one pipeline stage; `flat` is this rank's shard.

    The parameters get `take_main_grad` in place of `main_grad`.

    pool       of the buffers in which gradients fill up; gradients have its dtype
    reduction  overlap: reduce a bucket when the announced contributions have arrived; else when it is closed,
               or when the cycle ends
    """

    def __init__(self, holders: Sequence[Holder], layout: Layout, reduction: Reduction, *, pool: BufferPool):
        ranks, overlap = reduction.ranks, reduction.overlap
        self.holders, self.layout, self.ranks, self.overlap = holders, layout, ranks, overlap
        self.flat = torch.zeros(layout.shard_numel, dtype=pool.dtype, device=pool.device)
        self.pieces = layout.slot_intersections(ranks.shard)
        self._tp, self._pool, self._exchange = reduction.tp, pool, reduction.exchange
        self._partial = [self.grad_of(p) for p in self.pieces if holders[p.slot].parameter.spec.partial_over]
        self._shard_pieces = layout.shard_pieces(ranks.shard)
        # Buffers of the pool have one length if buckets are cut by size; if buckets are units, each has its
        # own length.
        longest = max(bucket.stop - bucket.start for bucket in layout.buckets)
        self._least = longest if overlap else 0
        self._buffers: list[torch.Tensor | None] = [None] * len(layout.buckets)
        self.begin()
        for i, holder in enumerate(holders):
            self._install(i, holder.parameter)

    def begin(self) -> None:
        self._pool.retire_all()                         # of a step that failed
        self._exchange.finish()
        for b, buffer in enumerate(self._buffers):
            if buffer is not None:
                self._give_back(b)
        self._is_empty = [True] * len(self._buffers)    # shards that nothing was added to yet
        self.received = [False] * len(self.holders)
        self._is_armed = self._is_finished = False
        self._start_cycle()

    def arm(self, stage: int | None = None) -> None:
        """Begin a cycle of gradient contributions."""
        if stage is not None and self.holders[0].stage not in (None, stage):
            return
        if self._is_armed:
            self._launch_up_to(len(self._buffers))
        self._is_armed = True
        self._start_cycle()

    def reopen(self) -> None:
        """Does nothing: the next cycle adds to the shards."""

    def close(self, bucket: int) -> None:
        """Reduce all buckets up to this one if the cycle is armed."""
        if self._is_armed:
            self._launch_up_to(bucket + 1)

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        self._launch_up_to(len(self._buffers))
        self._pool.retire_all()
        self._exchange.finish()
        if late := [b for b, buffer in enumerate(self._buffers) if buffer is not None]:
            names = [s.name for s in self.layout.slots if s.bucket in late]
            raise MegatronDSError(
                "gradients arrived after their bucket had been reduced for the last time, for one of "
                f"{', '.join(names)}: "
                "one of them received more contributions in one backward than were announced. Give the true "
                "number in `ParameterUse.counts`.")
        sum_coalesced(self._partial, self._tp)

    def grad_of(self, piece: SlotPiece) -> torch.Tensor:
        return self.flat[piece.offset:piece.offset + piece.padded_numel]

    @staticmethod
    def start_of(piece: SlotPiece) -> int:
        return piece.offset

    def _install(self, i: int, parameter: nn.Parameter) -> None:
        parameter.take_main_grad = partial(self._main_grad, i, tuple(parameter.shape))
        parameter.grad_ready = partial(self._contributed, i)
        parameter.register_post_accumulate_grad_hook(move_to_main_grad)

    def _main_grad(self, i: int, shape: tuple[int, ...]) -> torch.Tensor:
        slot = self.layout.slots[i]
        bucket = self.layout.buckets[slot.bucket]
        buffer = self._buffer(slot.bucket)
        return buffer[slot.start - bucket.start:slot.stop - bucket.start].view(shape)

    def _buffer(self, b: int) -> torch.Tensor:
        """The whole buffer of a bucket, borrowed and zeroed if it has none."""
        if self._buffers[b] is None:
            numel = self.layout.buckets[b].stop - self.layout.buckets[b].start
            self._buffers[b] = self._pool.borrow(numel, self._least)
            self._buffers[b][:numel].zero_()
        return self._buffers[b]

    def _give_back(self, b: int) -> None:
        self._pool.give_back(self._buffers[b])
        self._buffers[b] = None

    def _start_cycle(self) -> None:
        self._next = 0                                            # the first bucket not reduced in this cycle
        self._missing = [holder.uses for holder in self.holders]  # contributions still to come
        self._open = [bucket.last_slot - bucket.first_slot for bucket in self.layout.buckets]

    def _contributed(self, i: int) -> None:
        self.received[i] = True
        if not self._is_armed:
            return
        self._missing[i] -= 1
        if self._missing[i] == 0:
            bucket = self.layout.slots[i].bucket
            self._open[bucket] -= 1
            if self.overlap and not self._open[bucket]:
                buckets = range(self._next, len(self._open))
                self._launch_up_to(next((b for b in buckets if self._open[b]), len(self._open)))

    def _launch_up_to(self, stop: int) -> None:
        for b in range(self._next, stop):
            self._launch(b)
        self._next = max(self._next, stop)

    def _launch(self, b: int) -> None:
        bucket, piece = self.layout.buckets[b], self._shard_pieces[b]
        buffer, self._buffers[b] = self._buffer(b), None
        whole = buffer[:bucket.stop - bucket.start]
        mine = self.flat[piece.offset:piece.offset + piece.stop - piece.start]
        add, self._is_empty[b] = not self._is_empty[b], False
        work = self._exchange.reduce(BucketGradient(self.layout.slots[bucket.first_slot].name, whole, mine,
                                                    piece.start - bucket.start, add, self.ranks))
        self._pool.reducing(work, lambda: self._pool.give_back(buffer))
