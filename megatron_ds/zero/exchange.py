"""`GradientExchange`: the strategy by which gradients are summed over the data-parallel ranks;
`FullPrecisionExchange`.

    accumulates (fp32)   |--------- bucket ---------|         |- shard -|    added, or the first of a step
                              ↓ / divisor, cast                    ↑ cast, × divisor
    sent (fp16)          |--------- bucket ---------|   sum   |- shard -|

In the dtype in which gradients accumulate they are summed in place. Another dtype has two buffers of its own.

Note: divisor. A 16-bit sum of n ranks can leave the range of fp16 although each of its terms and the fp32 sum
are inside: dividing before and multiplying after avoids that. With a power of two that is exact, except for
elements below 2^-14 times the divisor, which lose bits or vanish.

Note: GPUs. All of this runs on a stream of its own, and the backward goes on beside it. It waits for a
reduction only where it needs the buffer again, and at the end.

Another strategy (compressed gradients, for example) is a class with the same methods, given as
`ZeroSettings.exchange`. It may leave buckets unreduced, and may keep state for each bucket, such as the error
of the last compression. Such state belongs to one rank and one layout: checkpoints do not contain it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from ..host.side_streams import Mark, SideStream, side_stream
from ..host.transfers import Then
from ..mpu.collectives import all_reduce_, is_read, reduce_scatter_into_
from ..mpu.group import DONE, Group, Waitable
from .data_groups import Hierarchy

# Reductions under way before a buffer is waited for rather than allocated.
UNDER_WAY = 2
PATIENCE = 0.02  # seconds that a late rank has to read a buffer before another one is allocated
Sent = tuple[str, Group, int, int]  # operation, group, bytes of payload, calls


@dataclass(frozen=True, slots=True)
class BucketGradient:
    """The gradients of one bucket on this rank, to be summed over `ranks`.

    name   of its first parameter: identifies the bucket over all steps of a run
    whole  the gradients of this rank, [numel]; they may be overwritten
    out    destination of the sum: `whole` itself, or this rank's shard, which may be a view of `whole`
    start  first element of the shard in `whole`; 0 if `out` is the whole
    add    add the sum to `out` rather than replace it
    """

    name: str
    whole: torch.Tensor
    out: torch.Tensor
    start: int
    add: bool
    ranks: Hierarchy

    @property
    def is_sharded(self) -> bool:
        """Whether this rank keeps a shard of the sum only."""
        return self.out is not self.whole


class GradientExchange(Protocol):
    """Sums gradients over data-parallel ranks; one object for all sets of parameters of a rank.

    All ranks call `reduce` for the same buckets in the same order. Methods that communicate are collective.

    An exchange may have `sums_in_place`, True if it sums buckets where they lie (`reads_in_place`).
    """

    @property
    def nbytes(self) -> int:
        """Bytes of buffers and state that it holds now."""

    def planned_bytes(self, longest: int, ranks: int) -> int:
        """Bytes that it will hold, with buckets of up to `longest` elements and this many ranks."""

    def sent(
        self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool
    ) -> Iterator[Sent]:
        """Return the messages that reduce `buckets` buckets of `numel` elements in total. Groups of one rank may be
        included."""

    def begin(self) -> None:
        """A step begins. Reductions of an earlier step that failed may be unfinished: finish them."""

    def reduce(self, bucket: BucketGradient) -> Waitable:
        """Begin to sum a bucket; its `out` is valid after the wait."""

    def finish(self) -> None:
        """Wait for everything that was begun."""


def reads_in_place(exchange: GradientExchange) -> bool:
    """Return whether ranks of a host can read each other's buckets where they lie."""
    return getattr(exchange, "sums_in_place", False)


def is_off(exchange: GradientExchange) -> bool:
    """Return whether an exchange leaves the gradients of each rank as they are, in this step."""
    return getattr(exchange, "is_off", False)


class OrderedExchange(GradientExchange):
    """A `GradientExchange` of one or two hops that runs beside the backward, in one order on all ranks.

    A class that is derived from it has `_start`.
    """

    def __init__(self, device: torch.device):
        self._beside = (
            side_stream(device, "reductions") if device.type == "cuda" else None
        )
        self._last: TwoHops | None = None
        self._unsettled: Beside | None = None

    def begin(self) -> None:
        self.finish()

    def reduce(self, bucket: BucketGradient) -> Waitable:
        if self._beside is None:
            return self._begin(bucket)
        with self._beside.behind_current():
            begun = Beside(self._begin(bucket), self._beside)
        before = self._unsettled
        self._unsettled = begun
        if before is not None:
            before.settle()
        return begun

    def finish(self) -> None:
        if self._unsettled is not None:
            self._unsettled.wait()
            self._unsettled = None
        with nullcontext() if self._beside is None else self._beside.behind_current():
            if self._last is not None:
                self._last.wait()
                self._last = None
            self._retire()
        if self._beside is not None:
            self._beside.mark().wait()

    def _start(self, bucket: BucketGradient) -> Waitable:
        """Begin the sum of a bucket; `out` is valid after the wait."""
        raise NotImplementedError

    def _retire(self) -> None:
        """Wait for what is still under way."""

    def _begin(self, bucket: BucketGradient) -> Waitable:
        """Begin a bucket, then the second hop of the one before it.

        Buckets of one hop, or of one rank, do so too. The wait for any bucket but the last then begins no
        collective, so ranks may wait at different times: how long a buffer is read by others differs by rank.
        """
        before = self._last
        self._last = None
        alone = not bucket.is_sharded and bucket.ranks.data.size == 1
        work = DONE if alone else self._start(bucket)
        if before is not None:
            before.go_on()
        return work

    def _two_hops(self, first: Waitable, second: Callable[[], Waitable]) -> Waitable:
        """Return the work of both hops; the second follows the first when the next bucket has begun."""
        self._last = TwoHops(first, second)
        return self._last


class FullPrecisionExchange(OrderedExchange):
    """A `GradientExchange` that sums every element, in one dtype.

    accumulates  dtype of the gradients
    sent_dtype   dtype of the sum; None: the same
    divisor      before the sum, multiplied with after it; None: the number of ranks
    """

    def __init__(
        self,
        accumulates: torch.dtype,
        device: torch.device,
        sent_dtype: torch.dtype | None = None,
        divisor: float | None = 1.0,
    ):
        super().__init__(device)
        self.dtype = sent_dtype or accumulates
        self._divisor = divisor
        self._wire = (
            None if self.dtype == accumulates else BufferPool(self.dtype, device)
        )

    @property
    def nbytes(self) -> int:
        return self._wire.nbytes if self._wire else 0

    @property
    def sums_in_place(self) -> bool:
        return self._wire is None

    def planned_bytes(self, longest: int, ranks: int) -> int:
        return (
            (UNDER_WAY + 1) * longest * self.dtype.itemsize
            if self._wire and ranks > 1
            else 0
        )

    def sent(
        self, numel: int, buckets: int, ranks: Hierarchy, *, sharded: bool
    ) -> Iterator[Sent]:
        nbytes = numel * self.dtype.itemsize
        if not sharded:
            yield "all_reduce", ranks.data, nbytes, buckets
            return
        yield "reduce_scatter", ranks.inner, nbytes, buckets
        yield (
            "reduce_scatter",
            ranks.outer,
            numel // ranks.inner.size * self.dtype.itemsize,
            buckets,
        )

    def _retire(self) -> None:
        if self._wire:
            self._wire.retire_all()

    def _start(self, bucket: BucketGradient) -> Waitable:
        group = bucket.ranks.data
        whole = bucket.whole
        buffer, sent = self._cast(whole, group)
        if not bucket.is_sharded:
            return self._land(
                all_reduce_(sent, group, async_op=True), buffer, sent, bucket
            )
        in_place = buffer is None and not bucket.add
        shard = (
            bucket.out
            if in_place
            else sent[bucket.start : bucket.start + bucket.out.numel()]
        )
        return self._land(
            self._scatter(sent, shard, bucket.ranks), buffer, shard, bucket
        )

    def _scatter(
        self, sent: torch.Tensor, shard: torch.Tensor, ranks: Hierarchy
    ) -> Waitable:
        """Sum over the inner group, then this rank's part over the outer one."""
        if ranks.outer.size == 1:
            return reduce_scatter_into_(shard, sent, ranks.inner, async_op=True)
        numel = sent.numel() // ranks.inner.size
        part = sent[ranks.inner.rank * numel : (ranks.inner.rank + 1) * numel]
        first = reduce_scatter_into_(part, sent, ranks.inner, async_op=True)
        second = lambda: reduce_scatter_into_(shard, part, ranks.outer, async_op=True)
        return self._two_hops(first, second)

    def _divisor_of(self, group: Group) -> float:
        return 1.0 if group.size == 1 else self._divisor or float(group.size)

    def _cast(
        self, whole: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(the buffer that was borrowed, if any; the bucket as it is sent)"""
        factor = 1 / self._divisor_of(group)
        if self._wire is None or group.size == 1:
            return None, whole if factor == 1 else whole.mul_(factor)
        buffer = self._wire.borrow(whole.numel(), 0)
        sent = buffer[: whole.numel()]
        # Divided in the wider dtype, then rounded.
        return buffer, sent.copy_(whole) if factor == 1 else torch.mul(
            whole, factor, out=sent
        )

    def _land(
        self,
        work: Waitable,
        buffer: torch.Tensor | None,
        part: torch.Tensor,
        bucket: BucketGradient,
    ) -> Waitable:
        """Copy or add the received sum to the shard. part: the memory in which the sum arrives."""
        # A sum that arrives in its place needs nothing more.
        out = bucket.out
        add = bucket.add
        wire = self._wire
        factor = self._divisor_of(bucket.ranks.data)
        if part is out and factor == 1:
            return work

        def then() -> None:
            if add:
                out.add_(part, alpha=factor)
            else:
                if part is not out:
                    out.copy_(part)
                if factor != 1:
                    out.mul_(factor)
            if buffer is not None and wire is not None:
                wire.give_back(buffer)

        # The borrowed buffer is free when the sum has landed.
        landing = Then(work, then)
        if buffer is not None and wire is not None:
            wire.reducing(landing)
        return landing


class Beside:
    """A reduction on a stream of its own; what follows the collective there is queued in `settle`.

    That is when the next bucket has been queued, or at the first `wait`: the second hop of a bucket runs
    beside the first hop of the next.
    """

    __slots__ = ("_work", "_stream", "_mark")

    def __init__(self, work: Waitable, stream: SideStream):
        self._work: Waitable | None = work
        self._stream = stream
        self._mark = Mark()

    def settle(self) -> None:
        """Queue the rest. Its inputs were ordered when it began."""
        if self._work is not None:
            with self._stream.apart():
                self._work.wait()
            self._work, self._mark = None, self._stream.mark()

    def wait(self) -> None:
        """The current stream waits for the sum."""
        self.settle()
        self._mark.wait()


class TwoHops:
    """A collective that is followed by another.

    The second hop of a bucket begins right after the first hop of the next bucket, not in `wait`, which ranks
    may call at different times: all ranks issue all collectives in the same order.
    """

    __slots__ = ("_work", "_second")

    def __init__(self, first: Waitable, second: Callable[[], Waitable]):
        self._work = first
        self._second: Callable[[], Waitable] | None = second

    def go_on(self) -> None:
        """Wait for the first collective and begin the second. Collective."""
        if self._second is not None:
            self._work.wait()
            self._work = self._second()
            self._second = None

    def wait(self) -> None:
        """Wait for both. Collective."""
        self.go_on()
        self._work.wait()


class BufferPool:
    """Flat buffers of one dtype that buckets borrow.

    group   in whose shared memory buffers are made, if it has one: other ranks of the host read them there. A
            buffer that one still reads is not borrowed again
    nbytes  bytes of all its buffers: the most that were ever borrowed or read at a time
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, group: Group | None = None
    ):
        self.dtype = dtype
        self.device = device
        self.nbytes = 0
        self._group = group if group and group.sums else None
        self._free: list[torch.Tensor] = []
        self._reductions: deque[Waitable] = deque()

    def borrow(self, numel: int, least: int) -> torch.Tensor:
        """Return a buffer of at least `numel` elements with undefined contents; a new one has at least `least`."""
        while (buffer := self._fitting(numel)) is None and len(
            self._reductions
        ) >= UNDER_WAY:
            self._reductions.popleft().wait()
        if buffer is None and self._group is not None:
            buffer = self._fitting(numel, PATIENCE)
        if buffer is None:
            buffer = self._make(max(numel, least))
            self.nbytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """The buffer may be borrowed again."""
        self._free.append(buffer)

    def reducing(self, work: Waitable) -> None:
        """A reduction is under way; its `wait` gives a buffer back."""
        self._reductions.append(work)

    def retire_all(self) -> None:
        """Wait for all reductions."""
        while self._reductions:
            self._reductions.popleft().wait()

    def _make(self, numel: int) -> torch.Tensor:
        if self._group is None:
            return torch.empty(numel, dtype=self.dtype, device=self.device)
        return self._group.shared_memory.zeros(numel, self.dtype)

    def _fitting(self, numel: int, wait_seconds: float = 0.0) -> torch.Tensor | None:
        """Return the smallest free buffer that is long enough and, within the time, read by no other rank."""
        deadline = time.monotonic() + wait_seconds
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= numel]
        for i in sorted(fitting, key=lambda i: self._free[i].numel()):
            left = max(0.0, deadline - time.monotonic())
            if self._group is None or is_read(self._free[i], self._group, left):
                return self._free.pop(i)
        return None
