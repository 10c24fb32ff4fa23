"""`GradShards`: gradients of which each data-parallel rank keeps its shard (ZeRO 2 and 3).

A bucket's whole buffer exists only while the bucket fills: it is borrowed from a pool at the first contribution, summed over
the ranks into shards when the bucket is complete, and given back.

    backward of micro-batch k     ..w4..w3..|..w2..|..w1..b1..|            next backward
    whole buffers                 |-- bucket 0 ----|
                                            |---- bucket 1 ----|
                                                   |-- bucket 2 ------|
    reduce-scatter                          |bucket 0 |bucket 1  |bucket 2
    shard, kept until the step              =         +=         +=

A *cycle* begins with `arm` and reduces every bucket once, in order: those that fill up during backward, the rest when the next
cycle begins or in `finish`. Armed before each micro-batch, gradients live only as shards. Armed before the last one only,
whole buffers are kept from the first micro-batch to the last and reduced once: fewer bytes travel, more are held.

Note: any order of contributions is right. A sum does not care to which cycle a contribution is counted: one that arrives
before its cycle is armed, or after its bucket was reduced, lies in a borrowed buffer until the bucket's next turn.
A parameter without a contribution on some rank adds zero there, and holds up nobody: all ranks reduce the same buckets in the
same order whatever they received.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..errors import MegatronDSError
from ..mpu.group import Group
from .buckets import Holder, move_to_main_grad, sum_coalesced
from .buffer_pool import BufferPool
from .data_groups import Hierarchy
from .exchange import GradCommunication
from .layout import Layout, SlotPiece


class GradShards:
    """The gradients of one set of parameters, all of one pipeline stage; `flat` is this rank's shard.

    The surface is that of `GradBuckets`, with `take_main_grad` in place of `main_grad` on the parameters, and `close`.

    holders, ranks, tp, communication   as there
    pool      of the buffers that gradients fill up in; its dtype is theirs
    overlap   reduce a bucket when the announced contributions have come; else when it is closed, or the cycle ends
    """

    def __init__(self, holders: Sequence[Holder], layout: Layout, *, ranks: Hierarchy, tp: Group, pool: BufferPool,
                 communication: GradCommunication, overlap: bool):
        self.holders, self.layout, self.ranks, self.overlap = holders, layout, ranks, overlap
        self.flat = torch.zeros(layout.shard_numel, dtype=pool.dtype, device=pool.device)
        self.pieces = layout.slot_intersections(ranks.shard)
        self._tp, self._pool, self._communication = tp, pool, communication
        self._partial = [self.grad_of(p) for p in self.pieces if holders[p.slot].parameter.spec.partial_over]
        self._shard_pieces = layout.shard_pieces(ranks.shard)
        # Buffers of the pool are alike where buckets are cut by size; where they are units, each gets its own length.
        longest = max(bucket.stop - bucket.start for bucket in layout.buckets)
        self._least = longest if overlap else 0
        self._buffers: list[torch.Tensor | None] = [None] * len(layout.buckets)
        self.begin()
        for i, holder in enumerate(holders):
            self._install(i, holder.parameter)

    def begin(self) -> None:
        """Zero all gradients and start counting anew."""
        self._pool.retire_all()                         # of a step that failed
        self._communication.finish()
        for b, buffer in enumerate(self._buffers):
            if buffer is not None:
                self._give_back(b)
        self._is_empty = [True] * len(self._buffers)    # shards that nothing was added to yet
        self.received = [False] * len(self.holders)
        self._is_armed = self._is_finished = False
        self._start_cycle()

    def arm(self, stage: int | None = None) -> None:
        """A cycle begins: the next backward of `stage` (None: of all) completes its gradients."""
        if stage is not None and self.holders[0].stage not in (None, stage):
            return
        if self._is_armed:
            self._launch_up_to(len(self._buffers))
        self._is_armed = True
        self._start_cycle()

    def reopen(self) -> None:
        """As in `GradBuckets`. Nothing is to be done: the next cycle adds to the shards."""

    def close(self, bucket: int) -> None:
        """Reduce all buckets up to this one if the cycle is armed: no more contributions are on their way."""
        if self._is_armed:
            self._launch_up_to(bucket + 1)

    def finish(self) -> None:
        """Reduce what is not reduced yet, wait for everything, then sum partial gradients over tp. Collective."""
        if self._is_finished:
            return
        self._is_finished = True
        self._launch_up_to(len(self._buffers))
        self._pool.retire_all()
        self._communication.finish()
        if late := [b for b, buffer in enumerate(self._buffers) if buffer is not None]:
            names = [s.name for s in self.layout.slots if s.bucket in late]
            raise MegatronDSError(
                f"gradients arrived after their bucket had been reduced for the last time, for one of {', '.join(names)}: "
                "one of them received more contributions in one backward than `uses` announced. Give the true number.")
        sum_coalesced(self._partial, self._tp)

    def grad_of(self, piece: SlotPiece) -> torch.Tensor:
        """The gradient of a piece, padding included: a view."""
        return self.flat[piece.offset:piece.offset + piece.padded_numel]

    @staticmethod
    def start_of(piece: SlotPiece) -> int:
        """Where a piece begins in `flat`."""
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
        """The whole buffer of a bucket, borrowed and zeroed when it has none."""
        if self._buffers[b] is None:
            numel = self.layout.buckets[b].stop - self.layout.buckets[b].start
            self._buffers[b] = self._pool.borrow(numel, self._least)
            self._buffers[b][:numel].zero_()
        return self._buffers[b]

    def _give_back(self, b: int) -> None:
        self._pool.give_back(self._buffers[b])
        self._buffers[b] = None

    def _start_cycle(self) -> None:
        self._next = 0                                                  # the first bucket not reduced in this cycle
        self._missing = [holder.uses for holder in self.holders]        # contributions still to come, per parameter
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
                self._launch_up_to(next((b for b in range(self._next, len(self._open)) if self._open[b]), len(self._open)))

    def _launch_up_to(self, stop: int) -> None:
        for b in range(self._next, stop):
            self._launch(b)
        self._next = max(self._next, stop)

    def _launch(self, b: int) -> None:
        bucket, piece = self.layout.buckets[b], self._shard_pieces[b]
        buffer, self._buffers[b] = self._buffer(b), None
        whole, mine = buffer[:bucket.stop - bucket.start], self.flat[piece.offset:piece.offset + piece.stop - piece.start]
        add, self._is_empty[b] = not self._is_empty[b], False
        work = self._communication.reduce_scatter(whole, piece.start - bucket.start, mine, self.ranks, add=add)
        self._pool.reducing(work, lambda: self._pool.give_back(buffer))
