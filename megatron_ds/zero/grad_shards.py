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
Armed before the last one only, whole buffers are kept until then: fewer bytes are sent, more are held.

Note: any order of contributions is correct. One that arrives before its cycle is armed, or after its bucket
was reduced, stays in a borrowed buffer until the next turn of the bucket. A parameter without a contribution
on some rank adds zero there: all ranks reduce the same buckets in the same order whatever they received.
"""

from collections.abc import Sequence
from functools import partial

import torch

from ..errors import MegatronDSError
from ..host.transfers import Then
from ..mpu.collectives import progress
from .buckets import GradientStore, Holder, Reduction
from .exchange import BufferPool
from .layout import Layout, SlotPiece


class GradShards(GradientStore):
    """A `GradientStore` of one pipeline stage; `flat` is this rank's shard.

    pool: of the buffers in which gradients fill up, in its dtype. A bucket is reduced when its contributions
    have arrived, or, without `reduction.overlap`, when it is closed or the cycle ends.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        layout: Layout,
        reduction: Reduction,
        *,
        pool: BufferPool,
    ):
        flat = torch.zeros(layout.shard_numel, dtype=pool.dtype, device=pool.device)
        super().__init__(
            holders,
            layout,
            reduction,
            flat,
            layout.slot_intersections(reduction.ranks.shard),
        )
        self._pool = pool
        self.view = self._view
        # Buffers of the pool have one length if buckets are cut by size; if buckets are units, each has its
        # own length.
        longest = max(bucket.stop - bucket.start for bucket in layout.buckets)
        self._least = longest if reduction.overlap else 0
        self._buffers: list[torch.Tensor | None] = [None] * len(layout.buckets)
        self.begin()

    def begin(self) -> None:
        self._wait()  # of a step that failed
        for b, buffer in enumerate(self._buffers):
            if buffer is not None:
                self._pool.give_back(buffer)
                self._buffers[b] = None
        for gradient in self.gradients:
            gradient.begin()
        # Shards that nothing was added to yet.
        self._is_empty = [True] * len(self._buffers)
        self._is_armed = self._is_finished = False
        self._restart_counting()

    def arm(self, stage: int | None = None) -> None:
        """Begin a cycle of gradient contributions."""
        if stage is not None and self.holders[0].stage not in (None, stage):
            return
        if self._is_armed:
            self._launch_up_to(len(self._buffers))
        self._is_armed = True
        self._restart_counting()
        if self._overlap:
            for holder, gradient in zip(self.holders, self.gradients):
                gradient.missing = holder.uses

    def close(self, bucket: int) -> None:
        """Reduce all buckets up to this one if the cycle is armed."""
        if self._is_armed:
            self._launch_up_to(bucket + 1)

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        super().finish()
        if late := [b for b, buffer in enumerate(self._buffers) if buffer is not None]:
            names = [s.name for s in self.layout.slots if s.bucket in late]
            raise MegatronDSError(
                "gradients arrived after their bucket had been reduced for the last time, for one of "
                f"{', '.join(names)}: "
                "one of them received more contributions in one backward than were announced. Give the true "
                "number in `ParameterUse.counts`."
            )

    def start_of(self, piece: SlotPiece) -> int:
        return piece.offset

    def _view(self, index: int) -> torch.Tensor:
        progress(self.ranks.inner)  # so that other ranks can use their buffers again
        slot = self.layout.slots[index]
        bucket = self.layout.buckets[slot.bucket]
        buffer = self._buffer(slot.bucket)
        flat = buffer[slot.start - bucket.start : slot.stop - bucket.start]
        return flat.view(self.holders[index].parameter.shape)

    def _buffer(self, b: int) -> torch.Tensor:
        """Return the whole buffer of a bucket, borrowed if it has none."""
        buffer = self._buffers[b]
        if buffer is None:
            bucket = self.layout.buckets[b]
            buffer = self._pool.borrow(bucket.stop - bucket.start, self._least)
            self._buffers[b] = buffer
        return buffer

    def _launch(self, b: int) -> None:
        bucket = self.layout.buckets[b]
        piece = self._shard_pieces[b]
        buffer, self._buffers[b] = self._buffer(b), None
        whole = buffer[: bucket.stop - bucket.start]
        self._clear_rest(b, whole)
        for gradient in self.gradients[bucket.first_slot : bucket.last_slot]:
            gradient.is_new = True
        mine = self.flat[piece.offset : piece.offset + piece.stop - piece.start]
        add, self._is_empty[b] = not self._is_empty[b], False
        work = self._reduce(b, whole, mine, add)
        self._pool.reducing(Then(work, partial(self._pool.give_back, buffer)))

    def _wait(self) -> None:
        self._pool.retire_all()
        self._exchange.finish()
